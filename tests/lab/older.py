"""What configurations that were stored before an option existed have in its place."""

NEWER_OPTIONS = {
    "initial_gate": None,
    "layer_norm": False,
    "max_memory": None,
    "forget": "recent",
    "recompute": False,
    "offload": False,
    "memory": "flat",
    "block_size": 16,
    "blocks": 8,
}

"""The packages that only some parts need, the extra that installs each, and the sentence about one that is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json

DISTRIBUTION = "sab-torch"
"""What `pip` knows this package by; it is imported as `sab`."""
EXTRAS = {
    "tyro": "train",
    "rich": "train",
    "safetensors": "train",
    "tensorboard": "train",
    "matplotlib": "report",
    "ray": "ray",
    "sklearn": "sklearn",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "faiss": "search",
    "mambapy": "rivals",
    "minGRU_pytorch": "rivals",
    "xlstm": "rivals",
    "x_transformers": "rivals",
    "native_sparse_attention_pytorch": "rivals",
}
"""The extra of each package, by the name that it is imported by."""
PURPOSES = {
    "train": "training and the commands",
    "report": "figures and the report",
    "ray": "`sab reproduce --on ray`",
    "sklearn": "the estimators of `sab.estimators`",
    "onnx": "`sab.export.to_onnx`",
    "search": "`sab.search.IndexedStream`",
    "rivals": "`sab reproduce rivals` and the models of other packages",
}
"""What each extra is for."""


def require(*packages: str) -> None:
    """Raise an error with one sentence if one of these packages is missing."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(missing(package), name=package)


def missing(package: str) -> str:
    """The sentence about a missing package and how to install it."""
    extra = EXTRAS[package]
    return f"{package} is missing; install the extra {extra!r}: {install_command(extra)}"


def install_command(extra: str) -> str:
    """The command that installs an extra, in the way that this package was installed."""
    try:
        origin = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        folder = json.loads(origin or "{}").get("dir_info")
    except importlib.metadata.PackageNotFoundError:  # a checkout on Python's path
        folder = {"editable": True}
    if folder is None:
        return f"pip install '{DISTRIBUTION}[{extra}]'"
    return f"pip install {'-e ' if folder.get('editable') else ''}'.[{extra}]' in the repository"


def explain(error: ModuleNotFoundError) -> str | None:
    """The sentence about a module that was not found; None where it is no package of an extra, but a bug."""
    package = (error.name or "").partition(".")[0]
    return missing(package) if package in EXTRAS else None

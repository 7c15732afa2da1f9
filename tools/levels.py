"""The tables of "Two levels" in docs/long-memory.md, from the records in benchmarks/levels.jsonl.

`python -m tools.levels stream` or `training`, or with a seed `recall-0` or `copying-0`, first measures that part
anew, on one CPU core.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sab
from sab.lab.tasks.copying import Copying
from sab.lab.tasks.recall import Recall
from sab.ops import blocks, reference
from tools.pages import ROOT, markdown, replace_part

PAGE, RECORDS = ROOT / "docs" / "long-memory.md", ROOT / "benchmarks" / "levels.jsonl"
LENGTHS = (1_000, 10_000, 100_000)
SEEDS = (0, 1, 2)
HIERARCHICAL: dict[str, Any] = {"memory": "hierarchical"}
WAYS: dict[str, dict[str, Any]] = {
    "flat": {"k_att": 1},
    "hierarchical": {"k_att": 1, **HIERARCHICAL, "block_size": 8, "blocks": 4},
}
"""Of the recall task."""
BLANKS = 32
"""How many steps before the first question are looked at, too."""
Record = dict[str, Any]


def main() -> None:
    measures: dict[str, Callable[[], list[Record]]] = {"stream": measure_stream, "training": measure_training}
    for seed in SEEDS:
        measures |= {f"recall-{seed}": partial(measure_recall, seed), f"copying-{seed}": partial(measure_copying, seed)}
    torch.set_num_threads(1)
    for part in sys.argv[1:]:
        new = [{"part": part} | one for one in measures[part]()]
        records = [*(one for one in load() if one["part"] != part), *new]
        RECORDS.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    replace_part(PAGE, "levels", page_part(load()))


def load() -> list[Record]:
    lines = RECORDS.read_text(encoding="utf-8").splitlines() if RECORDS.exists() else []
    return [json.loads(line) for line in lines]


def _both(n: int) -> dict[str, Any]:
    """A flat layer and a hierarchical one with the same weights."""
    torch.manual_seed(0)
    flat, levels = sab.SABLSTM(16, n), sab.SABLSTM(16, n, **HIERARCHICAL)
    levels.load_state_dict(flat.state_dict())
    return {"flat": flat, "hierarchical": levels}


def measure_stream() -> list[Record]:
    """The time of a step after so many steps: of several rounds in turn the fastest."""
    found: list[Record] = []
    for n in (64, 128):
        layers = _both(n)
        for length in LENGTHS:
            with torch.no_grad():
                began = layers["flat"](torch.randn(length, 1, 16))[1]
                states = {name: layer(torch.randn(1, 1, 16), began)[1] for name, layer in layers.items()}
                fastest = dict.fromkeys(layers, float("inf"))
                for _ in range(40):
                    for name, layer in layers.items():
                        x, state, start = torch.randn(1, 1, 16), states[name], time.process_time()
                        for _ in range(20):
                            _, state = layer(x, state)
                        fastest[name] = min(fastest[name], (time.process_time() - start) / 20)
                        states[name] = state
            found += _times(n, length, fastest)
    return found


def measure_training() -> list[Record]:
    """The time of a step, forward and backward, of a sequence of this length; a batch of one."""
    found: list[Record] = []
    for n in (64, 128):
        layers = _both(n)
        for length in LENGTHS if n == 64 else LENGTHS[:2]:
            x, fastest = torch.randn(length, 1, 16), dict.fromkeys(layers, float("inf"))
            for _ in range(max(50_000 // length, 2)):
                for name, layer in layers.items():
                    start = time.process_time()
                    layer(x)[0].sum().backward()
                    fastest[name] = min(fastest[name], (time.process_time() - start) / length)
            found += _times(n, length, fastest)
    return found


def _times(n: int, length: int, seconds: dict[str, float]) -> list[Record]:
    return [{"n": n, "length": length, "memory": name, "us": 1e6 * one} for name, one in seconds.items()]


class Model(nn.Module):
    """A layer of 64 units between one-hot symbols and a readout."""

    def __init__(self, task: Any, **options: Any):
        super().__init__()
        self.symbols = task.input_size
        self.layer = sab.SABLSTM(task.input_size, 64, **options)
        self.readout = nn.Linear(64, task.output_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.layer(self.encode(x))[0])

    def encode(self, x: Tensor) -> Tensor:
        return F.one_hot(x, self.symbols).float()

    def reading(self, **options: Any) -> Model:
        """The same weights in a layer with other options."""
        task = type("Sizes", (), {"input_size": self.symbols, "output_size": self.readout.out_features})
        other = Model(task, **options)
        other.load_state_dict(self.state_dict())
        return other.eval()


def _train(task: Any, seed: int, iterations: int, **options: Any) -> tuple[Model, int | None]:
    """A trained model, and after how many iterations it first answered 99 % of 32 sequences."""
    torch.manual_seed(seed)
    model, generator, solved = Model(task, **options), torch.Generator().manual_seed(seed), None
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for iteration in range(1, iterations + 1):
        x, y = task.draw(generator, 32, "train")
        outputs = model(x)
        optimizer.zero_grad()
        task.loss(outputs, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if solved is None and task.metrics(outputs, y)[task.headline.metric] >= 0.99:
            solved = iteration
    return model.eval(), solved


def _accuracy(model: Model, task: Any, rows: int) -> float:
    """On sequences that no training has drawn, two at a time."""
    generator, found = torch.Generator().manual_seed(12345), []
    with torch.no_grad():
        for _ in range(rows // 2):
            x, y = task.draw(generator, 2, "test")
            found.append(task.metrics(model(x), y)[task.headline.metric].item())
    return sum(found) / len(found)


def measure_recall(seed: int) -> list[Record]:
    """Recall with every state kept, trained at 100 steps with 5 of 13 blocks read, and tested far beyond."""
    found: list[Record] = []
    for trained, options in WAYS.items():
        model, solved = _train(Recall(length=100), seed, 1200, **options)
        about = {"trained": trained, "seed": seed, "solved": solved}
        for length, rows in zip((100, *LENGTHS), (64, 32, 8, 2), strict=True):
            for read in WAYS if length < 100_000 else [trained]:
                accuracy = _accuracy(model.reading(**WAYS[read]), Recall(length=length), rows)
                found.append({**about, "read": read, "length": length, "rows": rows, "accuracy": accuracy})
            if trained == "flat" and 100 < length < 100_000:
                found += [{**about, "length": length, **one} for one in _found(model, length)]
    return found


def measure_copying(seed: int) -> list[Record]:
    """Copying over 100 steps, trained and tested at this length with 5 of 15 blocks read."""
    found: list[Record] = []
    few: dict[str, Any] = {**HIERARCHICAL, "block_size": 4, "blocks": 4}
    for trained, options in {"flat": {}, "hierarchical": few}.items():
        model, solved = _train(Copying(length=100), seed, 2000, **options)
        accuracy = _accuracy(model, Copying(length=100), 64)
        found.append({"trained": trained, "seed": seed, "solved": solved, "accuracy": accuracy})
    return found


def _found(model: Model, length: int) -> list[Record]:
    """How much of what a flat layer selects lies in the blocks that keys of three kinds would have read.

    The last steps, on sequences of this length: those that ask, and the blanks before them.
    """
    task, config = Recall(length=length), sab.SABConfig(**WAYS["hierarchical"])
    x, _ = task.draw(torch.Generator().manual_seed(54321), 2, "test")
    tail = task.pairs + BLANKS
    reads: list[dict[str, tuple[Tensor, Tensor]]] = []
    score = reference._score

    def watched(h: Tensor, seen: Tensor, microstates: Tensor, keys: Tensor, *others: Any) -> Tensor:
        scores = score(h, seen, microstates, keys, *others)
        units = torch.eye(keys.shape[-1]).expand(len(keys), -1, -1)
        reads.append(_reads(score(h, seen, microstates, units, *others), keys, scores, config))
        return scores

    with torch.no_grad(), patch.object(reference, "_score", watched):
        given = model.encode(x)
        state = model.layer(given[:-tail])[1]
        model.reading(k_att=1, backend="reference").layer(given[-tail:], state)
    steps = {"questions": reads[BLANKS:], "blanks": reads[:BLANKS]}
    return [
        {"steps": name, "block_key": key, "found": _mean(some, key, 0), "weight": _mean(some, key, 1)}
        for name, some in steps.items()
        for key in some[0]
    ]


def _reads(query: Tensor, keys: Tensor, scores: Tensor, config: sab.SABConfig) -> dict[str, tuple[Tensor, Tensor]]:
    """By the kind of a block's key, the share of the true best that is found and of their weights, each [B]."""
    best = scores.topk(config.k_top)
    weights = best.values.softmax(1)
    numbers = torch.arange(keys.shape[1]).expand_as(scores)
    levels = blocks.score(query, keys, numbers, config.block_size)
    size = int(blocks.sizes(torch.tensor([keys.shape[1]]), config.block_size))
    whole = keys[:, : int(levels.last[0]) * size].unflatten(1, (-1, size))
    mean = whole.mean(2)
    of_mean = (mean @ query.unsqueeze(-1)).squeeze(-1)
    radius = (whole - mean.unsqueeze(2)).norm(dim=-1).amax(2)
    ranked = {
        "bounds": levels.scores[:, :-1],
        "mean": of_mean,
        "ball": of_mean + radius * query.norm(dim=1, keepdim=True),
    }
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, of_blocks in ranked.items():
        chosen = of_blocks.topk(min(config.blocks, of_blocks.shape[1])).indices
        is_found = (levels.read(numbers, chosen) >= 0).gather(1, best.indices)
        found[name] = is_found.float().mean(1), (weights * is_found).sum(1)
    return found


def _mean(reads: list[dict[str, tuple[Tensor, Tensor]]], key: str, place: int) -> float:
    return torch.stack([one[key][place] for one in reads]).mean().item()


def page_part(records: list[Record]) -> str:
    """All tables."""
    return "\n\n".join(
        [
            "µs a step of CPU time, one core, the fastest of several rounds in turn; half of the steps are kept:",
            _times_table(records),
            "Recall, right answers in per cent, seeds 0, 1 and 2, and the iteration of the first batch with 99 %:",
            _accuracy_table(records),
            "The part of the flat selection, and of its weight, in the blocks read, by the kind of their keys, of the\n"
            "seeds that learned recall:",
            _found_table(records),
            _copying_line(records),
        ]
    )


def _times_table(records: list[Record]) -> str:
    times = {
        (one["part"], one["n"], one["length"], one["memory"]): one["us"]
        for one in records
        if one["part"] in ("stream", "training")
    }
    rows = []
    for part, n, length in dict.fromkeys(key[:3] for key in times):
        flat, levels = (times[part, n, length, memory] for memory in ("flat", "hierarchical"))
        what = "a step of a stream" if part == "stream" else "training, forward and backward"
        rows.append([what, str(n), f"{length:,}", f"{flat:.0f}", f"{levels:.0f}", f"{flat / levels:.1f}"])
    return markdown(["what", "n", "T", "flat", "hierarchical", "flat / hierarchical"], rows)


def _grouped(records: list[Record], *names: str) -> dict[tuple[Any, ...], list[Record]]:
    """Those of the recall task that have these entries, by them."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for one in records:
        if one["part"].startswith("recall") and all(name in one for name in names):
            groups.setdefault(tuple(one[name] for name in names), []).append(one)
    return groups


def _accuracy_table(records: list[Record]) -> str:
    groups = _grouped(records, "trained", "read", "length")
    lengths = sorted({length for *_, length in groups})
    rows = []
    for trained, read in dict.fromkeys(key[:2] for key in groups):
        cells = [groups.get((trained, read, length), []) for length in lengths]
        solved = ", ".join(str(one["solved"] or "never") for one in cells[0])
        shown = [", ".join(f"{100 * one['accuracy']:.1f}" for one in some) or "–" for some in cells]
        rows.append([trained, solved, read, *shown])
    return markdown(["trained", "solved after", "read", *(f"T = {length:,}" for length in lengths)], rows)


def _found_table(records: list[Record]) -> str:
    learned = [one for one in records if one.get("solved") is not None]
    groups = _grouped(learned, "steps", "length", "block_key")
    kinds = list(dict.fromkeys(kind for *_, kind in groups))
    rows = []
    for steps, length in dict.fromkeys(key[:2] for key in groups):
        cells = [groups[steps, length, kind] for kind in kinds]
        shares = [f"{_percent(some, 'found')}, {_percent(some, 'weight')}" for some in cells]
        rows.append([steps, f"{length:,}", *shares])
    return markdown(["steps", "T", *kinds], rows)


def _copying_line(records: list[Record]) -> str:
    some = [one for one in records if one["part"].startswith("copying")]
    told = [
        f"{trained} {_percent([one for one in some if one['trained'] == trained], 'accuracy')} "
        f"(solved after {' and '.join(str(one['solved']) for one in some if one['trained'] == trained)} iterations)"
        for trained in ("flat", "hierarchical")
    ]
    return f"Copying over 100 steps, trained and tested there with 5 of 15 blocks read: {', '.join(told)}."


def _percent(records: list[Record], name: str) -> str:
    return f"{sum(one[name] for one in records) / len(records):.1%}".replace("%", " %")


if __name__ == "__main__":
    main()

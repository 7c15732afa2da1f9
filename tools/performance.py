"""Renews the tables and figures on speed in docs/ from benchmarks/results: `python -m tools.performance`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sab.lab.experiments.bench import CASES, DEFAULT
from sab.lab.experiments.timing import BOTH, STREAM
from sab.lab.report.figures import save_in_every_format, scaling
from sab.lab.report.numbers import NONE
from sab.lab.report.performance import (
    HEADER,
    SWEPT,
    Record,
    fastest,
    line,
    lines,
    load,
    ratio_in_float32,
    row_label,
    show_time,
    speedup,
    summary,
    swept_records,
)
from tools import floors
from tools.pages import IMAGES, ROOT, machines, markdown, replace_part

PICTURE = "time-of-a-step.png"
IN_SHORT = ("A", "n-512", "C", "E-4000", "F", "H-200", "stream-cell")
"""The cases that the README shows."""
IN_A_SENTENCE = ("index.md", "performance.md", "when.md")
"""The pages of docs/ that have the costs of a training step in a sentence."""
LONG = 3000
"""Costs of longer sequences are named one by one."""


def main() -> None:
    records = load(sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")))
    if any(swept_records(records, axis) for axis in SWEPT):
        save_in_every_format(scaling(records), IMAGES / PICTURE)
    replace_part(ROOT / "docs" / "performance.md", "benchmark", page_part(records))
    replace_part(ROOT / "docs" / "engine.md", "floors", floors_part(records))
    replace_part(ROOT / "docs" / "engine-appendix.md", "earlier", earlier_part(records))
    replace_part(ROOT / "docs" / "from-torch.md", "cost", cost_part(records))
    replace_part(ROOT / "README.md", "speed", speed_part(records))
    for page in IN_A_SENTENCE:
        replace_part(ROOT / "docs" / page, "latency", latency_part(records))


def page_part(records: Sequence[Record]) -> str:
    """What the benchmark's cases cost."""
    required = [record for record in records if record["kind"] == "required"]
    if not required:
        return "Nothing has been measured yet."
    sentences = summary(records, names_missed=False)  # the table has them
    rows = ([_unbroken(cell) for cell in one] for record in required for one in lines(record, judged=True))
    parts = [*sentences, markdown(HEADER, rows)]
    if clauses := _in_float32(required):
        parts.append(f"With both sides in float32, as without autocast: {'. '.join(clauses)}.")
    drawn = [record for axis in SWEPT for record in swept_records(records, axis)]
    if drawn:
        parts.append(f"![Time of a step against T, n and B](images/{PICTURE})")
    if any(record["kind"] == "sweep" for record in drawn):
        parts.append('(An earlier measurement on an H200: the scorers of the legend with `incorporate="add"`.)')
    failed = [f"- {line(record)}" for record in required if "error" in record]
    if failed:
        parts.append("\n".join(["What could not be measured:", "", *failed]))
    return "\n\n".join([*parts, _about(required)])


def _in_float32(records: Sequence[Record]) -> list[str]:
    """The ratios of each place where there are two precisions, with both sides in float32."""
    found: dict[str, list[str]] = {}
    for record in records:
        if "error" not in record and len(record["precisions"]) > 1:
            ratios = {row_label(record["case"], one): ratio_in_float32(record, one) for one in record["ratio"]["eager"]}
            clauses = [f"{name} {ratio:.2f}" for name, ratio in ratios.items() if ratio is not None]
            found.setdefault(_place(record), []).extend(clauses)
    return [f"{place}: {'; '.join(clauses)}" for place, clauses in found.items() if clauses]


def _unbroken(cell: str) -> str:
    """A cell of numbers that stays on its line, such as 1.29 ≤ 1.3."""
    return cell.replace(" ", "\u00a0") if cell[0].isdigit() else cell


def latency_part(records: Sequence[Record]) -> str:
    """What a training step of the default LSTM costs on each device, in two sentences."""
    chosen = [record for record in records if _is_of_the_default(record)]
    fastest = _ranges(chosen, lambda record: record["ratio"]["eager"][BOTH])
    if not fastest:
        return "Nothing has been measured yet."
    fastest[0] = fastest[0].replace("times", "times as long as `nn.LSTM`'s", 1)
    in_float32 = _ranges(chosen, lambda record: ratio_in_float32(record, BOTH))
    sentences = [f"A training step with default options takes {', '.join(fastest)}, each side in its faster precision."]
    sentences += [f"Without autocast, both in float32, it takes {', '.join(in_float32)}."] if in_float32 else []
    return " ".join(sentences)


def _is_of_the_default(record: Record) -> bool:
    """Whether it is of training steps of the default LSTM on sequences of one length."""
    is_required = record["kind"] == "required" and "error" not in record and record["case"] != "packed"
    is_default = record["scorer"] == DEFAULT and record.get("cell", "lstm") == "lstm"
    return is_required and is_default and BOTH in record["ratio"].get("eager", {})


def _ranges(records: Sequence[Record], ratio_of: Callable[[Record], float | None]) -> list[str]:
    """The range of the ratios in each place, in words."""
    found: dict[str, dict[int, list[float]]] = {}
    for record in records:
        if (ratio := ratio_of(record)) is not None:
            found.setdefault(_place(record), {}).setdefault(record["steps"], []).append(ratio)
    return [_range(place, by_steps) for place, by_steps in found.items() if min(by_steps) <= LONG]


def _range(place: str, by_steps: Mapping[int, Sequence[float]]) -> str:
    usual = [ratio for steps, ratios in by_steps.items() if steps <= LONG for ratio in ratios]
    longest = max(steps for steps in by_steps if steps <= LONG)
    more = [f"{max(ratios):.1f} for {steps:,}" for steps, ratios in sorted(by_steps.items()) if steps > LONG]
    within = "; ".join([f"up to {longest:,} steps", *more])
    return f"**{min(usual):.1f} to {max(usual):.1f} times** on {place} ({within})"


def speed_part(records: Sequence[Record]) -> str:
    """A few of the cases, in words, for who sees the project for the first time."""
    found = {record["case"]: record for record in records if record["kind"] == "required" and "error" not in record}
    rows: list[list[str]] = []
    for name in IN_SHORT:
        if (record := found.get(name)) is not None:
            chosen = next(iter(record["ratio"]["eager"]))
            cell = record.get("cell", "lstm").upper()  # records of the first version have none
            what = "a stream, step by step" if chosen == STREAM else f"training, {cell}"
            sizes = (str(record[entry]) for entry in ("hidden_size", "batch_size", "steps"))
            ratios = record["ratio"]["eager"][chosen], ratio_in_float32(record, chosen)
            shown = (NONE if ratio is None else f"{ratio:.2f}" for ratio in ratios)
            rows.append([_place(record), what, *sizes, *shown])
    if not rows:
        return "Nothing has been measured yet."
    header = ("where", "what", "hidden size", "batch", "steps", "times", "without autocast")
    return markdown(header, rows)


def _place(record: Record) -> str:
    device, _, model = record["device"].partition(" ")
    return f"{record['threads']} CPU threads" if device == "cpu" else model.strip("()")


def floors_part(records: Sequence[Record]) -> str:
    """The least that each case could take, compared with what it takes."""
    by_case = {record["case"]: record for record in records if record["kind"] == "required" and "error" not in record}
    gpu: list[list[str]] = []
    cpu: list[list[str]] = []
    for case in CASES.values():
        record = by_case.get(case.case)
        if case.device == "cuda":
            floor = floors.of_gpu(case)
            ours = None if record is None else _device_time(record)
            shown = [show_time(1e3 * seconds) for seconds in (*floor, floor.most)]
            times = [NONE] * 2 if ours is None else [show_time(ours), f"{ours / (1e3 * floor.most):.1f}"]
            gpu.append([case.case, *shown, *times])
        else:
            chosen = next(iter(case.limits["eager"]))
            ratio = NONE if record is None else f"{record['ratio']['eager'][chosen]:.2f}"
            cpu.append([case.case, f"{floors.multiply_adds(case):.2f}", ratio])
    header = ("case", "products, ms", "memory, ms", "chain, ms", "floor, ms", "ours, ms", "ours / floor")
    on_cpu = markdown(("case", "products / torch.nn's", "time / torch.nn's"), cpu)
    return f"On an H200:\n\n{markdown(header, gpu)}\n\nOn a CPU:\n\n{on_cpu}"


def _device_time(record: Record) -> float:
    """Milliseconds of ours, forward and backward, as near to the device's own time as was measured."""
    way = "graph" if BOTH in record["ratio"].get("graph", {}) else "eager"
    return fastest(record, way, BOTH, "ours")["median"]


def earlier_part(records: Sequence[Record]) -> str:
    """What the first version of the benchmark measured, of other memories and of the reference backend."""
    earlier = [record for record in records if record["kind"] == "earlier"]
    context = [record for record in records if record["kind"] == "context"]
    parts: list[str] = []
    if earlier:
        parts.append(markdown(HEADER, (lines(record)[0] for record in earlier)))
    rows = [
        [record["case"], record["scorer"], str(record["steps"]), show_time(beside), show_time(ours), f"{times:.1f}"]
        for record in context
        if "error" not in record
        for beside, ours, times in [speedup(record)]
    ]
    if rows:
        header = ("case", "scorer", "T", "reference, ms", "ours, ms", "times as fast")
        parts.append("This layer compared with the reference backend:\n\n" + markdown(header, rows))
    return "\n\n".join([*parts, _about([*earlier, *context])]) if parts else "Nothing has been measured yet."


def cost_part(records: Sequence[Record]) -> str:
    """What the default memory costs on a CPU, against the length of a sequence."""
    found = [record for record in records if record["case"].startswith("H-") and "error" not in record]
    if not found:
        return "Nothing has been measured yet."
    names = ("hidden_size", "batch_size", "input_size", "threads")
    sizes = "hidden size {}, batches of {}, {} inputs, {} threads".format(*(found[0][name] for name in names))
    passes = [one for one in (BOTH, "forward") if all(one in record["ratio"]["eager"] for record in found)]
    titles = {BOTH: "training step, ms", "forward": "forward alone, ms"}
    rows = [
        [f"{record['steps']:,}", *(cell for one in passes for cell in _times(record, one))]
        for record in sorted(found, key=lambda record: record["steps"])
    ]
    header = ("T", *(cell for one in passes for cell in (titles[one], "`nn.LSTM`, ms", "times")))
    return f"{markdown(header, rows)}\n\n{sizes[0].upper()}{sizes[1:]}."


def _times(record: Record, chosen: str) -> list[str]:
    ours, torchs = (fastest(record, "eager", chosen, side)["median"] for side in ("ours", "torch.nn"))
    return [show_time(ours), show_time(torchs), f"{record['ratio']['eager'][chosen]:.2f}"]


def _about(records: Sequence[Record]) -> str:
    def describe(device: str, group: list[Record]) -> str:
        newest = max(group, key=lambda record: record["date"])
        return f"{device}, {newest['threads']} threads:" if device.startswith("cpu") else f"{device}:"

    return "\n".join(["Measured on", "", *machines(records, describe)])


if __name__ == "__main__":
    main()

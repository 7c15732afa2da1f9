"""Renews the tables and figures on speed in docs/ from benchmarks/results: `python -m tools.performance`."""

from __future__ import annotations

from collections.abc import Sequence

from sab.lab.experiments.bench import CASES, DEFAULT
from sab.lab.experiments.timing import BOTH, STREAM
from sab.lab.report.figures import save_in_every_format, scaling
from sab.lab.report.numbers import NONE
from sab.lab.report.performance import (
    HEADER,
    SWEPT,
    Record,
    fair_ratio,
    fastest,
    line,
    lines,
    load,
    ratio_in_float32,
    show_ratio,
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
IN_A_LIST = ("index.md", "performance.md", "when.md")
"""The pages of docs/ that list what a training step costs on each device."""
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
    for page in IN_A_LIST:
        replace_part(ROOT / "docs" / page, "latency", latency_part(records))


def page_part(records: Sequence[Record]) -> str:
    """What the benchmark's cases cost."""
    required = [record for record in records if record["kind"] == "required"]
    if not required:
        return "Nothing has been measured yet."
    sentences = summary(records, names_missed=False)  # the table has them
    rows = ([_unbroken(cell) for cell in one] for record in required for one in lines(record, judged=True))
    parts = [*sentences, markdown(HEADER, rows)]
    drawn = [record for axis in SWEPT for record in swept_records(records, axis)]
    if drawn:
        parts.append(f"![Time of a step against T, n and B](images/{PICTURE})")
    if any(record["kind"] == "sweep" for record in drawn):
        parts.append('(An earlier measurement on an H200: the scorers of the legend with `incorporate="add"`.)')
    failed = [f"- {line(record)}" for record in required if "error" in record]
    if failed:
        parts.append("\n".join(["What could not be measured:", "", *failed]))
    return "\n\n".join([*parts, _about(required)])


def _unbroken(cell: str) -> str:
    """A cell of numbers that stays on its line, such as 1.29 ≤ 1.3."""
    return cell.replace(" ", "\u00a0") if cell[0].isdigit() else cell


def latency_part(records: Sequence[Record]) -> str:
    """What a training step of the default LSTM costs: a line for each device, and what the numbers are."""
    by_place: dict[str, list[Record]] = {}
    for record in records:
        if _is_default_training(record):
            by_place.setdefault(_place(record), []).append(record)
    found = {place: group for place, group in by_place.items() if min(one["steps"] for one in group) <= LONG}
    if not found:
        return "Nothing has been measured yet."
    items = "\n".join(f"- {place}: {_costs_by_length(group)}." for place, group in found.items())
    notes = ["Each side has its faster precision, bfloat16 autocast or float32."]
    if any(_in_float32(group) for group in found.values()):
        notes.append("In parentheses both are in float32, as without autocast.")
    begin = "A training step with default options takes this many times as long as `nn.LSTM`'s:"
    return "\n\n".join([begin, items, " ".join(notes)])


def _is_default_training(record: Record) -> bool:
    """Whether a record times training steps of the default LSTM, all sequences of one length."""
    is_required = record["kind"] == "required" and "error" not in record and record["case"] != "packed"
    is_default = record["scorer"] == DEFAULT and record.get("cell", "lstm") == "lstm"
    return is_required and is_default and fair_ratio(record, BOTH) is not None


def _costs_by_length(records: Sequence[Record]) -> str:
    """The costs up to LONG steps, and those of each longer sequence."""
    short = [record for record in records if record["steps"] <= LONG]
    longer: dict[int, list[Record]] = {}
    for record in records:
        if record["steps"] > LONG:
            longer.setdefault(record["steps"], []).append(record)
    parts = [f"{_costs(short)} up to {max(record['steps'] for record in short):,} steps"]
    parts += [f"{_costs(group)} at {steps:,}" for steps, group in sorted(longer.items())]
    return ", ".join(parts)


def _costs(records: Sequence[Record]) -> str:
    """The range of the ratios, and in parentheses of those in float32."""
    text = f"**{_range([record['ratio']['eager'][BOTH] for record in records])}**"
    in_float32 = _in_float32(records)
    return f"{text} ({_range(in_float32)})" if in_float32 else text


def _in_float32(records: Sequence[Record]) -> list[float]:
    return [ratio for record in records if (ratio := ratio_in_float32(record, BOTH)) is not None]


def _range(ratios: Sequence[float]) -> str:
    low, high = f"{min(ratios):.1f}", f"{max(ratios):.1f}"
    return low if low == high else f"{low} to {high}"


def speed_part(records: Sequence[Record]) -> str:
    """A few of the cases, in words, for who sees the project for the first time."""
    found = {record["case"]: record for record in records if record["kind"] == "required" and "error" not in record}
    rows: list[list[str]] = []
    for name in IN_SHORT:
        if (record := found.get(name)) is not None and (passes := record["ratio"].get("eager")):
            chosen = next(iter(passes))
            cell = record.get("cell", "lstm").upper()  # records of the first version have none
            what = "a stream, step by step" if chosen == STREAM else f"training, {cell}"
            sizes = (str(record[entry]) for entry in ("hidden_size", "batch_size", "steps"))
            ratios = fair_ratio(record, chosen), ratio_in_float32(record, chosen)
            rows.append([_place(record), what, *sizes, *map(show_ratio, ratios)])
    if not rows:
        return "Nothing has been measured yet."
    header = ("where", "what", "hidden size", "batch", "steps", "ratio", "without autocast")
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
            ratio = None if record is None else fair_ratio(record, chosen)
            cpu.append([case.case, f"{floors.multiply_adds(case):.2f}", show_ratio(ratio)])
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
    whole = [record for record in records if record["case"].startswith("H-") and "error" not in record]
    found = [record for record in whole if BOTH in record["ratio"].get("eager", {})]
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
    return [show_time(ours), show_time(torchs), show_ratio(fair_ratio(record, chosen))]


def _about(records: Sequence[Record]) -> str:
    def describe(device: str, group: list[Record]) -> str:
        newest = max(group, key=lambda record: record["date"])
        return f"{device}, {newest['threads']} threads:" if device.startswith("cpu") else f"{device}:"

    return "\n".join(["Measured on", "", *machines(records, describe)])


if __name__ == "__main__":
    main()

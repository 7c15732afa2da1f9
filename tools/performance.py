"""Renews the tables and figures of docs/performance.md from benchmarks/results: `python -m tools.performance`."""

from __future__ import annotations

from collections.abc import Sequence

from sab.lab.report.figures import save
from sab.lab.report.numbers import NONE
from sab.lab.report.performance import (
    BOTH,
    FORWARD,
    HEADER,
    SWEPT,
    Record,
    cells,
    common_way,
    line,
    load,
    microseconds_a_step,
    show_time,
    summary,
    swept_records,
    torch_milliseconds,
    verdict,
)
from tools.figures import step_times
from tools.pages import IMAGES, ROOT, machines, markdown, replace_part


def main() -> None:
    records = load(sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")))
    for case in SWEPT:
        if swept := swept_records(records, case):
            save(step_times(swept, case), IMAGES / sweep_picture(case))
    replace_part(ROOT / "docs" / "performance.md", "benchmark", page_part(records))
    replace_part(ROOT / "docs" / "from-torch.md", "cost", cost_part(records))


def page_part(records: Sequence[Record]) -> str:
    """The generated part of the page."""
    if not records:
        return "Nothing has been measured yet."
    parts = [_about(records)]
    required = [record for record in records if record["kind"] == "required"]
    if required:
        parts += [_configurations(required), *summary(records), markdown(HEADER, map(cells, required))]
    failed = [f"- {line(record)}" for record in records if "error" in record]
    if failed:
        parts.append("\n".join(["What could not be measured:", "", *failed]))
    parts += [part for part in (_context(records), *(_sweep(records, case) for case in SWEPT)) if part]
    return "\n\n".join(parts)


def cost_part(records: Sequence[Record]) -> str:
    """What the default memory costs on a CPU, against the length of a sequence."""
    found = [record for record in records if record["case"] == "H" and "error" not in record]
    if not found:
        return "Nothing has been measured yet."
    names = ("hidden_size", "batch_size", "input_size", "threads")
    sizes = "hidden size {}, batches of {}, {} inputs, {} threads".format(*(found[0][name] for name in names))
    rows = [
        [f"{record['steps']:,}", *_times(record, BOTH), *_times(record, FORWARD)]
        for record in sorted(found, key=lambda record: record["steps"])
    ]
    header = ("T", "training step, ms", "`nn.LSTM`, ms", "times", "forward alone, ms", "`nn.LSTM`, ms", "times")
    return f"{markdown(header, rows)}\n\n{sizes[0].upper()}{sizes[1:]}."


def _times(record: Record, chosen: str) -> list[str]:
    ours = record["milliseconds"]["ours"]["eager"][chosen]["median"]
    return [
        show_time(ours),
        show_time(torch_milliseconds(record, "eager", chosen)),
        f"{record['ratio']['eager'][chosen]:.2f}",
    ]


def _about(records: Sequence[Record]) -> str:
    def describe(device: str, group: list[Record]) -> str:
        newest = max(group, key=lambda record: record["date"])
        return f"{device}, {newest['threads']} threads:" if device.startswith("cpu") else f"{device}:"

    return "\n".join(["Measured on", "", *machines(records, describe)])


def _configurations(records: Sequence[Record]) -> str:
    names = ("hidden_size", "batch_size", "steps", "k_top", "k_att", "k_trunc", "input_size")
    header = ("case", "where", "n", "B", "T", "k_top", "k_att", "k_trunc", "input")
    rows = {(record["case"], record["device"], *(str(record[name]) for name in names)): None for record in records}
    return markdown(header, rows)


def _context(records: Sequence[Record]) -> str | None:
    rows: list[list[str]] = []
    for record in records:
        if record["kind"] == "context" and "error" not in record:
            beside = record["milliseconds"][record["beside"]]["eager"][BOTH]["median"]
            ours = record["milliseconds"]["ours"]["eager"][BOTH]["median"]
            target = NONE if record["target"] is None else f"{record['target']:g}"
            start = [record["case"], record["beside"], record["scorer"], str(record["steps"])]
            end = [f"{record['speedup'][BOTH]:.1f}", target, verdict(record)]
            rows.append([*start, show_time(beside), show_time(ours), *end])
    if not rows:
        return None
    header = ("case", "beside", "scorer", "T", "its time, ms", "ours, ms", "times as fast", "at least", "met")
    return "For context, this layer beside the definition it is held to:\n\n" + markdown(header, rows)


def _sweep(records: Sequence[Record], case: str) -> str | None:
    swept = swept_records(records, case)
    if not swept:
        return None
    entry, symbol = SWEPT[case]
    way = common_way(swept)
    scorers = list(dict.fromkeys(record["scorer"] for record in swept))
    points: dict[int, dict[str, Record]] = {}
    for record in swept:
        points.setdefault(record[entry], {})[record["scorer"]] = record
    rows: list[list[str]] = []
    for point, by_scorer in sorted(points.items()):
        torchs = min(microseconds_a_step(record, way, BOTH, "nn.LSTM") for record in by_scorer.values())
        ours = [microseconds_a_step(by_scorer[one], way, BOTH) if one in by_scorer else None for one in scorers]
        rows.append([str(point), *(NONE if one is None else show_time(one) for one in ours), show_time(torchs)])
    how = "from a CUDA graph" if way == "graph" else "as called"
    title = f"Microseconds a step against {symbol}, forward and backward, {how}:"
    picture = f"![Time a step against {symbol}](images/{sweep_picture(case)})"
    return f"{title}\n\n{markdown((symbol, *scorers, 'nn.LSTM'), rows)}\n\n{picture}"


def sweep_picture(case: str) -> str:
    """The file of a sweep's figure."""
    return f"time-against-{SWEPT[case][1]}.png"


if __name__ == "__main__":
    main()

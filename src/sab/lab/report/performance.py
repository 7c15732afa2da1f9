"""The benchmark's records: how they are read, judged and shown as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.table import Table

from sab.errors import UserValueError
from sab.lab.experiments.bench import MEMORY, SCHEMA, TORCH, TORCH_AUTOCAST, case_label
from sab.lab.report.numbers import NONE
from sab.lab.stored import first_mismatch, read_json_lines

Record = dict[str, Any]
BOTH, FORWARD = "forward+backward", "forward"
SWEPT = {"T": ("steps", "T"), "n": ("hidden_size", "n")}
"""The sweeps: which entry of a record they vary, and what the mathematics calls it."""
HEADER = tuple(
    "case|scorer|precision|backend|ours, ms|nn.LSTM, ms|ratio|graph: ours, ms|nn.LSTM, ms|ratio|forward alone|memory|"
    "target|met".split("|")
)
NEEDED = {
    **dict.fromkeys(("device", "case", "scorer", "precision", "date"), str),
    **dict.fromkeys(("hidden_size", "batch_size", "steps", "k_top", "k_att", "input_size"), int),
    "kind": Literal["required", "context", "sweep"],
    "k_trunc": int | None,
    "beside": str | None,
    "quick": bool,
    "target": float | None,
    "commit": str | None,
    "versions": dict[str, str],
    "threads": int,
}
OPTIONAL = {
    **dict.fromkeys(("backend", "error", "incorporate"), str),
    "milliseconds": dict[str, dict[str, dict[str, dict[Literal["median", "min", "repeats"], float]]]],
    "ratio": dict[Literal["eager", "graph"], dict[str, float]],
    "speedup": dict[str, float],
    "memory_ratio": float,
}
"""What a record has, in whatever way it was measured, and what else it may have that is looked at."""
DISTURBED = 1.5
"""How far the median may be above the fastest call."""


def load(paths: Sequence[Path]) -> list[Record]:
    """The records of files of JSON lines; of several about the same thing the newest, in the order of the cases."""
    records: dict[tuple[Any, ...], Record] = {}
    for path in paths:
        wanted = f"records {str(path)!r} must be a file of JSON lines that `sab bench --output` wrote"
        try:
            read = read_json_lines(path)
        except (OSError, ValueError) as error:
            raise UserValueError(f"{wanted}; it cannot be read: {error}.") from error
        if not read or any(not isinstance(record, dict) or record.get("schema") != SCHEMA for record in read):
            raise UserValueError(f"{wanted}; its lines are none of this version.")
        for number, record in enumerate(read, start=1):
            if not record.keys() >= NEEDED.keys() or first_mismatch(record, NEEDED | OPTIONAL) or not _is_whole(record):
                raise UserValueError(f"{wanted}; line {number} is not as it writes one.")
        for record in read:
            key = _key(record)
            if not record["quick"] and (key not in records or records[key]["date"] <= record["date"]):
                records[key] = record
    kinds = ("required", "context", "sweep")
    return sorted(records.values(), key=lambda record: (kinds.index(record["kind"]), record["case"]))


def _is_whole(record: Record) -> bool:
    """Whether a record has all that the tables and figures take from it, given that its entries are of their types."""
    try:
        line(record)
        is_disturbed(record)
        if "error" not in record:
            ways = record["ratio"] | ({"eager": (BOTH, FORWARD)} if record["case"] in SWEPT else {})
            for way, passes in ways.items():
                for one in passes:
                    microseconds_a_step(record, way, one)
                    microseconds_a_step(record, way, one, "nn.LSTM")
    except (KeyError, ValueError, ZeroDivisionError):
        return False
    return True


def _key(record: Record) -> tuple[Any, ...]:
    names = ("device", "case", "kind", "hidden_size", "steps", "scorer", "precision", "beside")
    return tuple(record[name] for name in names)


# Targets


def is_disturbed(record: Record) -> bool:
    """Whether a median is so far above the fastest call that something else must have kept the device busy."""
    times = (ways.get("eager", {}).get(BOTH) for ways in record.get("milliseconds", {}).values())
    return any(one["median"] > DISTURBED * one["min"] for one in times if one is not None)


def met(record: Record) -> dict[str, bool]:
    """Whether a record meets its target, by the way it was called; empty without a target or a fair measurement."""
    target = record["target"]
    if target is None or "error" in record or is_disturbed(record):
        return {}
    if record["kind"] == "context":
        return {"eager": record["speedup"][BOTH] >= target}
    return {way: ratio[BOTH] <= target for way, ratio in record["ratio"].items() if BOTH in ratio}


class Verdict(NamedTuple):
    """A case and scorer with a target, and the lowest ratio of our precisions by the way of calling."""

    case: str
    scorer: str
    target: float
    ratio: dict[str, float]


def verdicts(records: Iterable[Record]) -> list[Verdict]:
    """A verdict for each case and scorer with a target and a fair measurement."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        if record["kind"] == "required" and met(record):
            groups.setdefault((record["device"], _case(record), record["scorer"]), []).append(record)
    made: list[Verdict] = []
    for (_, case, scorer), group in groups.items():
        ratios = [(way, ratio[BOTH]) for record in group for way, ratio in record["ratio"].items() if BOTH in ratio]
        ratio = {way: min(value for other, value in ratios if other == way) for way, _ in ratios}
        made.append(Verdict(case, scorer, group[0]["target"], ratio))
    return made


def summary(records: Sequence[Record]) -> list[str]:
    """Sentences on how many targets are met, on disturbed rows and on memory."""
    sentences: list[str] = []
    found = verdicts(records)
    ways = dict.fromkeys(way for one in found for way in one.ratio)
    names = {"eager": "called as a user does", "graph": "replayed from a CUDA graph"}
    for way in ways:
        judged = [one for one in found if way in one.ratio]
        missed = [one for one in judged if one.ratio[way] > one.target]
        at_most_one = sum(one.ratio[way] <= 1.0 for one in judged)
        sentence = f"{len(judged) - len(missed)} of {len(judged)} targets are met {names[way]}"
        sentence += f", {at_most_one} with a ratio of at most 1"
        if missed:
            which = (f"{one.case} {one.scorer} {one.ratio[way]:.2f} (at most {one.target:g})" for one in missed)
            sentence += f"; not met: {', '.join(which)}"
        sentences.append(sentence + ".")
    disturbed = sum(map(is_disturbed, records))
    if disturbed:
        sentences.append(
            f"{disturbed} of {len(records)} rows were disturbed, with medians above {DISTURBED:g} times the fastest "
            "call, and are not judged: measure them again when nothing else runs."
        )
    memory = [record for record in records if record["kind"] == "required" and "memory_ratio" in record]
    if memory:
        most = max(memory, key=lambda record: record["memory_ratio"])
        within = sum(record["memory_ratio"] <= MEMORY for record in memory)
        sentences.append(
            f"A training step takes at most {MEMORY:g} times nn.LSTM's memory in {within} of {len(memory)} rows; "
            f"the most is {most['memory_ratio']:.2f} (case {_case(most)}, {most['scorer']}, {most['precision']})."
        )
    return sentences


# Cells


def _case(record: Record) -> str:
    return case_label(record["case"], record["steps"], record["hidden_size"])


def cells(record: Record) -> list[str]:
    """A record as a row below HEADER."""
    start = [_case(record), memory_of(record), record["precision"], record.get("backend", NONE)]
    target = NONE if record["target"] is None else f"{record['target']:g}"
    if "error" in record:
        return [*start, "failed", *[NONE] * (len(HEADER) - 7), target, NONE]
    memory = record.get("memory_ratio")
    forward = record["ratio"].get("eager", {}).get(FORWARD)
    return [
        *start,
        *_times(record, "eager"),
        *_times(record, "graph"),
        NONE if forward is None else f"{forward:.2f}",
        NONE if memory is None else f"{memory:.2f}",
        target,
        verdict(record),
    ]


def memory_of(record: Record) -> str:
    """The scorer of a record, with the incorporation where it is not `add`, which older records do not name."""
    incorporate = record.get("incorporate", "add")
    return record["scorer"] if incorporate == "add" else f"{record['scorer']}, {incorporate}"


def _times(record: Record, way: str) -> list[str]:
    if BOTH not in record["ratio"].get(way, {}):
        return [NONE] * 3
    ours = record["milliseconds"]["ours"][way][BOTH]["median"]
    return [show_time(ours), show_time(torch_milliseconds(record, way, BOTH)), f"{record['ratio'][way][BOTH]:.2f}"]


def torch_milliseconds(record: Record, way: str, chosen: str) -> float:
    """The fastest that nn.LSTM was in a record."""
    milliseconds = record["milliseconds"]
    return min(
        milliseconds[name][way][chosen]["median"]
        for name in (TORCH, TORCH_AUTOCAST)
        if chosen in milliseconds.get(name, {}).get(way, {})
    )


def verdict(record: Record) -> str:
    ways = met(record)
    if not ways:
        return "disturbed" if is_disturbed(record) and record["target"] is not None else NONE
    if len(set(ways.values())) == 1:
        return "yes" if all(ways.values()) else "no"
    return f"{next(way for way, is_met in ways.items() if is_met)} only"


def show_time(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def line(record: Record) -> str:
    """A record in one line."""
    sizes = f"n={record['hidden_size']} T={record['steps']}"
    label = f"{record['case']}  {sizes}  {memory_of(record)} {record['precision']}"
    if record["beside"] is not None:
        label += f", {record['beside']}"
    if "error" in record:
        return f"{label}: failed: {record['error']}"
    parts: list[str] = []
    for way, ratio in record["ratio"].items():
        if BOTH in ratio:
            ours, torchs, ratio_shown = _times(record, way)
            parts.append(f"{way} {ours} ms / nn.LSTM {torchs} ms = {ratio_shown}")
    if record["kind"] == "context":
        beside = record["milliseconds"][record["beside"]]["eager"][BOTH]["median"]
        parts.append(f"{record['beside']} {show_time(beside)} ms, {record['speedup'][BOTH]:.1f} times slower than ours")
    if record["target"] is not None:
        bound = "at least" if record["kind"] == "context" else "at most"
        parts.append(f"target {bound} {record['target']:g}: {verdict(record)}")
    return f"{label}: {'; '.join(parts)}"


def table(records: Sequence[Record]) -> Table:
    """The records but for the context, for a terminal; a column that would be empty is left out."""
    header = "case|scorer|precision|ours / nn.LSTM, ms|from a graph, ms|forward|memory|target|met".split("|")
    rows: list[list[str]] = []
    for record in records:
        if record["kind"] == "context":
            continue
        case, scorer, precision, _, *rest = cells(record)
        if record["case"] in SWEPT:
            entry, symbol = SWEPT[record["case"]]
            case = f"{symbol}={record[entry]}"
        rows.append([case, scorer, precision, _compact(rest[:3]), _compact(rest[3:6]), *rest[6:]])
    shown = [place for place in range(len(header)) if place < 4 or any(row[place] != NONE for row in rows)]
    made = Table(title="forward and backward: ours / torch.nn.LSTM with full backpropagation = ratio")
    for place in shown:
        made.add_column(header[place], justify="left" if place < 3 else "right", no_wrap=True)
    for row in rows:
        made.add_row(*(row[place] for place in shown))
    return made


def _compact(times: Sequence[str]) -> str:
    ours, torchs, ratio = times
    return ours if torchs == NONE else f"{ours} / {torchs} = {ratio}"


def swept_records(records: Sequence[Record], case: str) -> list[Record]:
    """The records of a sweep."""
    return [record for record in records if record["case"] == case and "error" not in record]


def common_way(records: Sequence[Record]) -> str:
    """The way of calling that is closest to the device's own time and that all records have."""
    return "graph" if all({BOTH, FORWARD} <= record["ratio"].get("graph", {}).keys() for record in records) else "eager"


def microseconds_a_step(record: Record, way: str, chosen: str, of: str = "ours") -> float:
    """Time of a pass over its number of steps."""
    if of == "nn.LSTM":
        milliseconds = torch_milliseconds(record, way, chosen)
    else:
        milliseconds = record["milliseconds"][of][way][chosen]["median"]
    return milliseconds * 1e3 / record["steps"]

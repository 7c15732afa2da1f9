"""The benchmark's records: how they are read, judged and shown as a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.table import Table

from sab.config import SABConfig
from sab.errors import UserValueError
from sab.lab.experiments.bench import CASES, DEFAULT, MEMORY, OURS, SCHEMA
from sab.lab.experiments.timing import BOTH
from sab.lab.report.numbers import NONE
from sab.lab.stored import first_mismatch, read_json_lines

Record = dict[str, Any]
IN_FLOAT32 = "float32"
HEADER = ("case", "n", "B", "T", "ours, ms", "torch.nn, ms", "ratio", IN_FLOAT32, "from a graph", "memory")
KINDS = ("required", "earlier", "context", "sweep")
"""`required` are the rows that `sab bench` measures. Records of its first version may be of other memories (`earlier`),
have the reference backend beside (`context`), or belong to a sweep of their own (`sweep`)."""
WAYS = {"eager": "in eager mode", "graph": "from a CUDA graph"}
SWEPT = {
    "T": ("steps", "steps T", ("A", "B", "E-4000", "E-20000", "E-4000-affine", "E-20000-affine")),
    "n": ("hidden_size", "hidden size n", ("n-32", "n-64", "A", "n-200", "n-256", "n-512", "C", "n-1500")),
    "B": ("batch_size", "batch size B", ("B-1", "B-8", "A", "B-512")),
}
"""The sweeps: which entry of a record they vary, what an axis calls it, and the cases along it."""
NEEDED = {
    **dict.fromkeys(("device", "case", "scorer", "date"), str),
    **dict.fromkeys(("hidden_size", "batch_size", "steps", "k_top", "k_att", "input_size"), int),
    "kind": Literal[KINDS],
    "k_trunc": int | None,
    "precisions": list[str],
    "quick": bool,
    "targets": dict[Literal["eager", "graph"], dict[str, float]],
    "commit": str | None,
    "versions": dict[str, str],
    "threads": int,
}
OPTIONAL = {
    **dict.fromkeys(("backend", "error", "incorporate"), str),
    "beside": str | None,
    "milliseconds": dict[str, dict[str, dict[str, dict[Literal["median", "min", "repeats"], float]]]],
    "ratio": dict[Literal["eager", "graph"], dict[str, float]],
    "speedup": dict[str, float],
    "memory_ratio": dict[str, float],
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
        if not read or any(not isinstance(one, dict) or one.get("schema") not in (1, SCHEMA) for one in read):
            raise UserValueError(f"{wanted}; its lines are none of this version.")
        for number, one in enumerate(read, start=1):
            record = _upgraded(one)
            if record is None or not record.keys() >= NEEDED.keys() or first_mismatch(record, NEEDED | OPTIONAL):
                raise UserValueError(f"{wanted}; line {number} is not as it writes one.")
            if not _is_whole(record):
                raise UserValueError(f"{wanted}; line {number} is not as it writes one.")
            key = _key(record)
            if not record["quick"]:
                records[key] = _counting(records[key], record) if key in records else record
    order = [*CASES]

    def place(record: Record) -> tuple[int, int, str]:
        case = record["case"]
        return KINDS.index(record["kind"]), order.index(case) if case in order else len(order), case

    return sorted(records.values(), key=place)


def _upgraded(record: Record) -> Record | None:
    """A record in this version's form; None where it has not the form of its own.

    In version 1 a record was of one precision, its target held for both ways of calling, and case H had all lengths.
    Where a row is still measured, its targets are today's.
    """
    if record["schema"] == SCHEMA:
        return record
    precision, target, kind = record.get("precision"), record.get("target"), record.get("kind")
    if not isinstance(precision, str) or not isinstance(target, float | int | None):
        return None
    if not isinstance(record.get("case"), str):
        return None
    name = OURS.format(precision)
    made = {**record, "schema": SCHEMA, "precisions": [precision], "targets": {}}
    for entry in ("milliseconds", "types", "memory"):
        if isinstance(made.get(entry), dict):
            made[entry] = {name if one == "ours" else one: value for one, value in made[entry].items()}
    if "memory_ratio" in made:
        made["memory_ratio"] = {precision: made["memory_ratio"]}
    if record.get("case") == "H":
        made["case"] = f"H-{record.get('steps')}"
    if kind == "required" and (record.get("scorer") != DEFAULT or made.get("case") not in CASES):
        made["kind"] = "earlier"
    if made.get("kind") == "required":
        limits = CASES[made["case"]].limits
        made["targets"] = {way: {one: most for one, most in limits[way].items() if most} for way in limits}
    elif kind != "context" and target is not None:
        made["targets"] = {way: {BOTH: target} for way in WAYS}
    return made


def _is_whole(record: Record) -> bool:
    """Whether a record has all that the tables and figures take from it, given that its entries are of their types."""
    try:
        line(record)
        if "error" not in record:
            lines(record)
            for way, passes in record["ratio"].items():
                for chosen in passes:
                    for side in ("ours", "torch.nn"):
                        microseconds_a_step(record, way, chosen, side)
                    is_disturbed(record, way, chosen)
            if record["kind"] == "context":
                speedup(record)
            if record["kind"] == "sweep":
                record["ratio"]["eager"][BOTH]
    except (KeyError, IndexError, ValueError, ZeroDivisionError):
        return False
    return True


def _key(record: Record) -> tuple[Any, ...]:
    """What a record is about; a required one is about its case in all precisions."""
    names = ("device", "case", "kind", "hidden_size", "steps", "scorer", "beside")
    precisions = None if record["kind"] == "required" else tuple(record["precisions"])
    return *(record.get(name) for name in names), precisions


def _counting(first: Record, second: Record) -> Record:
    """Which of two records about the same thing counts: the newer, or where each is of a precision of its own, as in
    version 1, the one with the lower ratio, for both."""
    old, new = sorted((first, second), key=lambda record: record["date"])
    apart = [record for record in (old, new) if len(record["precisions"]) == 1 and "error" not in record]
    if len(apart) < 2 or old["precisions"] == new["precisions"]:
        return new
    best = min(apart, key=lambda record: record["ratio"].get("eager", {}).get(BOTH, math.inf))
    memory = {**old.get("memory_ratio", {}), **new.get("memory_ratio", {})}
    joined = sorted([*old["precisions"], *new["precisions"]], reverse=True)  # float32 first
    return {**best, "precisions": joined, "memory_ratio": {one: memory[one] for one in joined if one in memory}}


# Times


def fastest(record: Record, way: str, chosen: str, side: str) -> dict[str, float]:
    """The times of the fastest of one side, `ours` or `torch.nn`, over its precisions."""
    is_ours = OURS.format("")
    found = [
        times[way][chosen]
        for name, times in record["milliseconds"].items()
        if _side(name, is_ours, record) == side and chosen in times.get(way, {})
    ]
    return min(found, key=lambda times: times["median"])


def fair_ratio(record: Record, chosen: str, way: str = "eager") -> float | None:
    """Our time over torch.nn's, each side in its faster precision; None if it was not measured or was disturbed."""
    ratio = record["ratio"].get(way, {}).get(chosen)
    return None if ratio is None or is_disturbed(record, way, chosen) else ratio


def ratio_in_float32(record: Record, chosen: str) -> float | None:
    """Our time over torch.nn's in eager mode, both in float32 as without autocast; TF32 as PyTorch allows it.

    None if a side was not measured so or was disturbed.
    """
    is_ours = OURS.format("")
    sides = {
        _side(name, is_ours, record): ways["eager"][chosen]
        for name, ways in record["milliseconds"].items()
        if name.endswith("float32") and chosen in ways.get("eager", {})
    }
    if sides.keys() != {"ours", "torch.nn"} or any(_is_slowed(times) for times in sides.values()):
        return None
    return sides["ours"]["median"] / sides["torch.nn"]["median"]


def _side(name: str, is_ours: str, record: Record) -> str:
    if name == record.get("beside"):
        return name
    return "ours" if name.startswith(is_ours) else "torch.nn"


def microseconds_a_step(record: Record, way: str, chosen: str, side: str = "ours") -> float:
    """Time of a pass over its number of steps."""
    return fastest(record, way, chosen, side)["median"] * 1e3 / record["steps"]


def speedup(record: Record) -> tuple[float, float, float]:
    """Of a context record: milliseconds of what is beside, of ours, and how many times ours is faster."""
    beside = record["milliseconds"][record["beside"]]["eager"][BOTH]["median"]
    return beside, fastest(record, "eager", BOTH, "ours")["median"], record["speedup"][BOTH]


def is_disturbed(record: Record, way: str, chosen: str) -> bool:
    """Whether a median is so far above the fastest call that something else must have kept the device busy."""
    return any(_is_slowed(fastest(record, way, chosen, side)) for side in ("ours", "torch.nn"))


def _is_slowed(times: Mapping[str, float]) -> bool:
    return times["median"] > DISTURBED * times["min"]


# Targets


class Verdict(NamedTuple):
    """A pass of a case with a target, and its ratio and target by the way of calling."""

    case: str
    ratio: dict[str, float]
    target: dict[str, float]


def _judged(record: Record) -> Iterator[tuple[str, str]]:
    """The pass and the way of what has a target and a fair measurement."""
    for way, passes in record["targets"].items():
        for chosen in passes:
            if fair_ratio(record, chosen, way) is not None:
                yield chosen, way


def verdicts(records: Iterable[Record]) -> list[Verdict]:
    """A verdict for each pass of a required case with a target and a fair measurement."""
    made: dict[tuple[str, ...], Verdict] = {}
    for record in records:
        if record["kind"] != "required" or "error" in record:
            continue
        for chosen, way in _judged(record):
            one = made.setdefault(
                (record["device"], record["case"], chosen), Verdict(row_label(record["case"], chosen), {}, {})
            )
            one.ratio[way], one.target[way] = record["ratio"][way][chosen], record["targets"][way][chosen]
    return list(made.values())


def summary(records: Sequence[Record], *, names_missed: bool = True) -> list[str]:
    """Sentences on how many targets are met, and which are not, on disturbed rows and on memory."""
    sentences: list[str] = []
    found = verdicts(records)
    for way in dict.fromkeys(way for one in found for way in one.ratio):
        judged = [one for one in found if way in one.ratio]
        missed = [one for one in judged if one.ratio[way] > one.target[way]]
        at_most_one = sum(one.ratio[way] <= 1.0 for one in judged)
        where = WAYS[way]
        sentence = f"{where[0].upper()}{where[1:]} {len(judged) - len(missed)} of {len(judged)} targets are met"
        sentence += f", {at_most_one} with a ratio of at most 1"
        if missed and names_missed:
            which = (f"{one.case} {one.ratio[way]:.2f} (at most {one.target[way]:g})" for one in missed)
            sentence += f"; not met: {', '.join(which)}"
        sentences.append(sentence + ".")
    required = [record for record in records if record["kind"] == "required" and "error" not in record]
    disturbed = [
        row_label(record["case"], chosen)
        for record in required
        for way, passes in record["ratio"].items()
        for chosen in passes
        if is_disturbed(record, way, chosen)
    ]
    if disturbed:
        sentences.append(
            f"Something disturbed {', '.join(dict.fromkeys(disturbed))}: a median is above {DISTURBED:g} times the "
            "fastest call. It is not judged: measure it again when nothing else runs."
        )
    memory = [(ratio, record, one) for record in required for one, ratio in record.get("memory_ratio", {}).items()]
    if memory:
        most, where, precision = max(memory, key=lambda one: one[0])
        within = sum(ratio <= MEMORY for ratio, *_ in memory)
        sentences.append(
            f"A training step takes at most {MEMORY:g} times torch.nn's memory in {within} of {len(memory)} "
            f"measurements; the most is {most:.2f} (case {where['case']}, {precision})."
        )
    return sentences


# Cells


def row_label(case: str, chosen: str) -> str:
    """The name of a line of the table."""
    return case if chosen == BOTH or case.startswith("stream") else f"{case}, {chosen}"


def _label(record: Record, chosen: str) -> str:
    label = row_label(record["case"], chosen)
    options = tuple(record[name] for name in ("k_top", "k_att", "k_trunc"))
    if record["kind"] == "required" and options != (SABConfig.k_top, SABConfig.k_att, SABConfig.k_trunc):
        return f"{label} (k = {', '.join(map(str, options))})"  # of version 1
    return label if record["kind"] == "required" else f"{label}, {memory_of(record)} {record['precisions'][0]}"


def lines(record: Record, *, judged: bool = False) -> list[list[str]]:
    """A record as lines below HEADER, one for each pass, or for each that has a target."""
    sizes = [str(record[name]) for name in ("hidden_size", "batch_size", "steps")]
    if "error" in record:
        return [[_label(record, BOTH), *sizes, "failed", *[NONE] * (len(HEADER) - 5)]]
    memory = ", ".join(f"{ratio:.2f}" for ratio in record.get("memory_ratio", {}).values()) or NONE
    wanted = record["targets" if judged else "ratio"]
    passes = dict.fromkeys(one for way in wanted for one in wanted[way] if one in record["ratio"].get(way, {}))
    return [
        [
            _label(record, chosen),
            *sizes,
            *_times(record, chosen),
            _ratio(record, "eager", chosen),
            show_ratio(ratio_in_float32(record, chosen)),
            _ratio(record, "graph", chosen),
            memory if chosen == BOTH else NONE,
        ]
        for chosen in passes
    ]


def _times(record: Record, chosen: str) -> list[str]:
    way = "eager" if chosen in record["ratio"].get("eager", {}) else "graph"
    return [show_time(fastest(record, way, chosen, side)["median"]) for side in ("ours", "torch.nn")]


def _ratio(record: Record, way: str, chosen: str) -> str:
    """A ratio, and how it compares with its target where it has one."""
    ratio = record["ratio"].get(way, {}).get(chosen)
    target = record["targets"].get(way, {}).get(chosen)
    if ratio is None:
        return NONE
    if is_disturbed(record, way, chosen):
        return f"{ratio:.2f} disturbed"
    return f"{ratio:.2f}" if target is None else f"{ratio:.2f} {'≤' if ratio <= target else '>'} {target:g}"


def memory_of(record: Record) -> str:
    """The scorer of a record, with the incorporation where it is not `add`, which older records do not name."""
    incorporate = record.get("incorporate", "add")
    return record["scorer"] if incorporate == "add" else f"{record['scorer']}, {incorporate}"


def show_time(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def show_ratio(ratio: float | None) -> str:
    return NONE if ratio is None else f"{ratio:.2f}"


def line(record: Record) -> str:
    """A record in one line."""
    label = f"{record['case']}  n={record['hidden_size']} B={record['batch_size']} T={record['steps']}"
    if record["kind"] != "required":
        label += f"  {memory_of(record)} {record['precisions'][0]}"
        label += f", {record['beside']}" if record.get("beside") else ""
    if "error" in record:
        return f"{label}: failed: {record['error']}"
    parts: list[str] = []
    for way, passes in record["ratio"].items():
        for chosen in passes:
            mine, other = (show_time(fastest(record, way, chosen, side)["median"]) for side in ("ours", "torch.nn"))
            parts.append(f"{chosen} {way} {mine} / {other} ms = {_ratio(record, way, chosen)}")
    if record["kind"] == "context":
        beside, _, times = speedup(record)
        parts.append(f"{record['beside']} {show_time(beside)} ms, {times:.1f} times slower than ours")
    return f"{label}: {'; '.join(parts)}"


def table(records: Sequence[Record]) -> Table:
    """The required records, for a terminal, without the column for float32 and without empty ones."""
    rows = [one for record in records if record["kind"] == "required" for one in lines(record)]
    shown = [
        place
        for place, name in enumerate(HEADER)
        if name != IN_FLOAT32 and (place < 7 or any(row[place] != NONE for row in rows))
    ]
    made = Table(title="this layer / torch.nn's with full backpropagation = ratio, and its target")
    for place in shown:
        made.add_column(HEADER[place], justify="left" if place == 0 else "right", no_wrap=True)
    for row in rows:
        made.add_row(*(row[place] for place in shown))
    return made


# Sweeps


def swept_records(records: Sequence[Record], axis: str) -> list[Record]:
    """The records along an axis of SWEPT: those of the table's cases, or else of a sweep of the first version."""
    whole = [record for record in records if "error" not in record]
    found = [record for record in whole if record["kind"] == "required" and record["case"] in SWEPT[axis][2]]
    found = [record for record in found if BOTH in record["ratio"].get("eager", {})]
    if len({record[SWEPT[axis][0]] for record in found}) > 1:
        return found
    return [record for record in whole if record["kind"] == "sweep" and record["case"] == axis]


def common_way(records: Sequence[Record]) -> str:
    """The way of calling that is closest to the device's own time and that all records have."""
    return "graph" if all(BOTH in record["ratio"].get("graph", {}) for record in records) else "eager"

"""The page's figures, as plotly.js takes them. Colours are names, which the page turns into those of its theme."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import cycle
from math import ceil, floor, log10
from statistics import median
from typing import Any, NamedTuple

from sab import palette
from sab.lab.experiments.timing import BOTH
from sab.lab.report import performance
from sab.lab.report.numbers import NONE
from sab.lab.report.page.elements import Drawn, Figure, label
from sab.lab.tasks import Headline

COLOURS = [f"@c{place}" for place in range(1, len(palette.SERIES) + 1)]
"""The page's colours for lines that are not those of methods."""
FAINT = "~26"
"""Ends the name of a colour that lets what is behind it be seen: how opaque it is, of ff."""
DASHES = ("solid", "dash", "dot", "dashdot")
SHADES = ("", "~a6", "~73")
"""Lines of one method differ in their dashes and then in these."""


class Curve(NamedTuple):
    """A metric over the iterations."""

    steps: Sequence[int]
    values: Sequence[float | None]


def axis(title: str, **options: Any) -> dict[str, Any]:
    """An axis, with its title."""
    return {"title": {"text": label(title)}, **options}


def logarithmic(values: Iterable[float | None]) -> dict[str, Any]:
    """Options of a logarithmic axis for these values: few ticks, each with a whole number of its own, where plotly.js
    writes single digits between powers of ten, and one over the other."""
    found = [value for value in values if value is not None and value > 0]
    if not found:
        return {"type": "log"}
    low, high = log10(min(found)), log10(max(found))
    steps = (1, 2, 5) if high - low < 1.4 else (1, 3) if high - low < 2.6 else (1,)
    ticks = [step * 10.0**power for power in range(floor(low) - 1, ceil(high) + 1) for step in steps]
    return {"type": "log", "tickvals": ticks, "ticktext": list(map(_tick, ticks))}


def _tick(value: float) -> str:
    if 1e-3 <= value < 1e6:
        return f"{value:,.12g}"
    power = floor(log10(value) + 1e-9)
    factor = round(value / 10.0**power)
    return f"{'' if factor == 1 else f'{factor} × '}10<sup>{str(power).replace('-', chr(0x2212))}</sup>"


def value_axis(headline: Headline, values: Sequence[float | None]) -> dict[str, Any]:
    """The axis of a task's metric: a logarithmic one where it is shown by its leading digits, as errors are; of numbers
    that never come near chance or 0, as bits per character, as long as the values need."""
    found = [value for value in values if value is not None]
    if headline.spec.endswith("%"):
        return axis(headline.label, tickformat=".0%", range=[-0.02, 1.03])
    if headline.spec.endswith("g") or not found:
        return axis(headline.label, **logarithmic([*found, headline.chance]))
    room = 0.06 * (max(found) - min(found)) or 0.1
    return axis(headline.label, range=[min(found) - room, max(found) + room])


# Learning curves


def curves(
    groups: Mapping[str, Sequence[Curve]],
    headline: Headline,
    caption: str,
    over_decades: bool = False,
    methods: Mapping[str, str] | None = None,
    hidden: Collection[str] = (),
) -> Drawn:
    """A line for each group, the median of its seeds, in a band that reaches from the lowest to the highest.

    With `over_decades` the axis of iterations is logarithmic, for runs of very different lengths. `methods` are those
    of the groups, which have their colours; lines that are `hidden` are shown once a reader asks for them.
    """
    data: list[dict[str, Any]] = []
    for place, (name, (colour, dash)) in enumerate(_looks(groups, methods or {}).items()):
        seeds = groups[name]
        steps, low, middle, high = band(seeds)
        common: dict[str, Any] = {"x": steps, "legendgroup": str(place), "visible": name not in hidden}
        if len(seeds) > 1:
            edge = {**common, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
            fill = colour.partition("~")[0] + FAINT
            data += [{**edge, "y": low}, {**edge, "y": high, "fill": "tonexty", "fillcolor": fill}]
        legend = f"{name} ({len(seeds)} seeds)" if len(seeds) > 1 else name
        line = {"color": colour, "width": 2.5, "dash": dash}
        mode = "lines+markers" if len(steps) < 10 else "lines"
        data.append({**common, "y": middle, "mode": mode, "name": label(legend), "line": line})
        data[-1]["marker"] = {"color": colour}
    steps = [step for seeds in groups.values() for curve in seeds for step in curve.steps]
    values = [value for seeds in groups.values() for curve in seeds for value in curve.values]
    layout: Figure = {
        "xaxis": axis("iteration", **(logarithmic(steps) if over_decades else {"rangemode": "tozero"})),
        "yaxis": value_axis(headline, values),
    }
    low, high = layout["yaxis"].get("range", (headline.chance, headline.chance))
    is_in_sight = low <= headline.chance <= high
    if is_in_sight:
        layout |= _chance(headline, layout["yaxis"].get("type") == "log")
    layout["hovermode"] = "x unified"
    lines = [_last_line(name, seeds, headline) for name, seeds in groups.items()]
    where = "the dotted line is" if is_in_sight else "outside of the figure is"
    summary = f"{headline.label} over the iterations; {where} chance, {headline.show(headline.chance)}. "
    summary += " ".join(
        f"{name}: {value} after {steps} iterations, {count}." for name, count, steps, value, *_ in lines
    )
    header = ("model", "runs", "last evaluation", f"{headline.label}, median", "lowest", "highest")
    return Drawn({"data": data, "layout": layout}, caption, summary, header, lines)


def _looks(groups: Iterable[str], methods: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Colour and dashes of each line: the colour of its method, or else one after the other."""
    looks: dict[str, tuple[str, str]] = {}
    used: Counter[str] = Counter()
    for place, name in enumerate(groups):
        method = methods.get(name)
        if method is None:
            looks[name] = COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)]
        else:
            shade = SHADES[used[method] // len(DASHES) % len(SHADES)]
            looks[name] = f"@{method}{shade}", DASHES[used[method] % len(DASHES)]
            used[method] += 1
    return looks


def _chance(headline: Headline, is_log: bool) -> Figure:
    """A dotted line at chance, with its name and value."""
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": headline.chance, "y1": headline.chance}
    line["line"] = {"color": "@muted", "dash": "dot", "width": 1.5}
    name = {"xref": "paper", "x": 1, "y": log10(headline.chance) if is_log else headline.chance}
    name |= {"text": f"chance {headline.show(headline.chance)}", "xanchor": "right", "yanchor": "bottom"}
    name |= {"showarrow": False, "font": {"color": "@muted", "size": 12}}
    return {"shapes": [line], "annotations": [name]}


def band(seeds: Sequence[Curve]) -> tuple[list[int], list[float | None], list[float | None], list[float | None]]:
    """The steps at which any seed was evaluated, and the lowest value, the median and the highest value there."""
    by_step: dict[int, list[float]] = {}
    for curve in seeds:
        for step, value in zip(curve.steps, curve.values, strict=True):
            by_step.setdefault(step, []).extend([] if value is None else [value])
    steps = sorted(by_step)
    found = [by_step[step] for step in steps]
    low, middle, high = ([shown(how(values)) if values else None for values in found] for how in (min, median, max))
    return steps, low, middle, high


def shown(value: float) -> float:
    """A number with as many digits as a figure needs."""
    return float(f"{value:.5g}")


def _last_line(name: str, seeds: Sequence[Curve], headline: Headline) -> list[str]:
    steps, low, middle, high = band(seeds)
    values = [NONE if not one or one[-1] is None else headline.show(one[-1]) for one in (middle, low, high)]
    return [name, f"{len(seeds)} run{'s' * (len(seeds) > 1)}", f"{steps[-1]:,}" if steps else NONE, *values]


# The benchmark


def sweep(records: Sequence[performance.Record], case: str) -> Drawn:
    """What a step costs in a sweep of the benchmark, ours with each scorer and torch.nn's, over what is swept."""
    entry, called, _ = performance.SWEPT[case]
    way = performance.common_way(records)
    points: dict[str, dict[int, float]] = {}
    for record in records:
        for name, of in ((f"SAB, {record['scorer']}", "ours"), ("torch.nn.LSTM", "torch.nn")):
            time = shown(performance.microseconds_a_step(record, way, BOTH, of))
            known = points.setdefault(name, {})
            known[record[entry]] = min(time, known.get(record[entry], time))
    data = [
        {"x": sorted(known), "y": [known[one] for one in sorted(known)], "mode": "lines+markers", "name": label(name)}
        | {"line": {"color": "@torch", "dash": "dash"} if name == "torch.nn.LSTM" else {"color": colour}}
        for (name, known), colour in zip(points.items(), cycle(COLOURS), strict=False)
    ]
    swept = sorted({record[entry] for record in records})
    ticks = swept[:1]
    for one in swept[1:]:
        ticks += [one] if one >= 1.4 * ticks[-1] else []  # nearer ones would be written over each other
    layout: Figure = {"xaxis": axis(called, type="log", tickvals=ticks, ticktext=[f"{one:,}" for one in ticks])}
    layout["yaxis"] = axis(
        "microseconds a step", **logarithmic(time for known in points.values() for time in known.values())
    )
    caption = f"What a step costs against {called}, forward and backward, {_way(way)}"
    lines = [[f"{one:,}", *(_microseconds(known.get(one)) for known in points.values())] for one in swept]
    ends = ", ".join(
        f"{name} {_microseconds(known[min(known)])} to {_microseconds(known[max(known)])}"
        for name, known in points.items()
    )
    summary = f"Microseconds a step from {called} = {swept[0]:,} to {swept[-1]:,}: {ends}."
    return Drawn({"data": data, "layout": layout}, caption, summary, (case, *points), lines)


def ratios(records: Sequence[performance.Record]) -> Drawn:
    """How long the cases with a target take compared with torch.nn, each side in its faster precision."""
    found = performance.verdicts(records)
    data: list[dict[str, Any]] = []
    cases = [one.case for one in found]
    places = list(range(len(cases)))
    ways = list(dict.fromkeys(way for one in found for way in one.ratio))
    columns: dict[str, list[float | None]] = {}
    ends: list[float | None] = []
    heights: list[float | None] = []
    for number, (way, colour) in enumerate(zip(ways, COLOURS, strict=False)):
        values = columns[_way(way)] = [shown(one.ratio[way]) if way in one.ratio else None for one in found]
        columns[f"{_way(way)}, at most"] = [one.target.get(way) for one in found]
        bars = {"type": "bar", "x": places, "y": values, "name": _way(way), "marker": {"color": colour}}
        data.append({**bars, "hovertext": cases, "hovertemplate": "%{hovertext}: %{y}"})
        for place, one in zip(places, found, strict=True):  # a line over each bar that has a target, as wide as it is
            left = place - 0.4 + 0.8 * number / len(ways)
            ends += [left, left + 0.8 / len(ways), None]
            heights += [one.target.get(way), one.target.get(way), None]
    data.append({"x": ends, "y": heights, "mode": "lines", "name": "at most, by the target"})
    data[-1] |= {"line": {"color": "@ink", "width": 2}, "hoverinfo": "skip"}
    layout: Figure = {"xaxis": axis("case", tickvals=places, ticktext=list(map(label, cases)), showgrid=False)}
    layout["xaxis"]["range"] = [-0.6, len(cases) - 0.4]
    layout |= {"yaxis": axis("time over torch.nn's", rangemode="tozero"), "barmode": "group"}
    lines = [
        [case, *(NONE if value is None else f"{value:.2f}" for value in values)]
        for case, *values in zip(cases, *columns.values(), strict=True)
    ]
    summary = " ".join(performance.summary(records))
    caption = "Time over that of torch.nn's layer of the same cell"
    return Drawn({"data": data, "layout": layout}, caption, summary, ("case", *columns), lines)


def _way(way: str) -> str:
    return performance.WAYS[way]


def _microseconds(value: float | None) -> str:
    return NONE if value is None else f"{value:.3g}"

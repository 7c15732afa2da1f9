"""A task's sequence as the explorer draws it along time: what each step sees, and the answers that are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sab.lab.tasks import CIFAR10, MNIST, Adding, CharacterTask, Copying, Recall, Task
from sab.lab.tasks.cifar10 import NAMES
from sab.lab.tasks.copying import BLANK, DIGITS, MARKER
from sab.lab.tasks.mnist import PIXELS, permutation

SIGNS = {" ": "·", "\n": "↵"}
"""How characters are shown that would not be seen."""
NOTHING = "·"
NARROWEST = 0.04
"""Of an ordinary step's width, that of one at which nothing happens in a long sequence."""

SHORTEST_STRETCH = 8
"""How many narrow steps in a row are named as such."""
MOST_TICKS = 11


@dataclass(frozen=True)
class Scene:
    """A sequence. Steps are counted from 1."""

    seen: list[str]
    """What each step sees, in a few characters."""
    right: dict[int, str] = field(default_factory=dict)
    """The right answer at the steps where one counts."""
    values: list[float] | None = None
    """What each step sees as a number, where that is more than a symbol."""
    marked: list[int] = field(default_factory=list)
    """Steps that stand out."""
    places: list[int] | None = None
    """The place of each step's pixel in an image, counted along its lines."""
    quiet: frozenset[int] = frozenset()
    """Steps at which nothing happens, which need little room."""
    names: dict[str, str] = field(default_factory=dict)
    """What signs are called in a sentence."""
    is_text: bool = False
    """Whether the steps see the characters of a text, which is read in lines."""

    @property
    def steps(self) -> int:
        return len(self.seen)

    @property
    def widths(self) -> list[float]:
        """The room of each step: quiet ones together have no more than the others, since there may be thousands."""
        loud = self.steps - len(self.quiet)
        narrow = max(min(0.25, loud / max(len(self.quiet), 1)), NARROWEST) if loud else 1.0
        return [narrow if step in self.quiet else 1.0 for step in range(1, self.steps + 1)]

    @property
    def narrowed(self) -> list[tuple[int, int]]:
        """The stretches of quiet steps that are drawn narrower than others: the first and the last step of each."""
        found: list[tuple[int, int]] = []
        for step in sorted(self.quiet) if self.quiet and min(self.widths) < 1.0 else ():
            if found and found[-1][1] == step - 1:
                found[-1] = (found[-1][0], step)
            else:
                found.append((step, step))
        return [(first, last) for first, last in found if last - first >= SHORTEST_STRETCH - 1]

    @property
    def positions(self) -> list[float]:
        """Where the middle of each step is."""
        ends, end = [], 0.0
        for width in self.widths:
            end += width
            ends.append(round(end - width / 2, 4))
        return ends


def scene_of(task: Task, inputs: Tensor, targets: Tensor, row: int = 0) -> Scene:
    """The sequence in a row of a batch."""
    if isinstance(task, Copying):
        return _digits(inputs[:, row].tolist(), targets[:, row].tolist())
    if isinstance(task, Recall):
        return _pairs(task, inputs[:, row].tolist(), targets[:, row].tolist())
    if isinstance(task, CharacterTask):
        seen, right = (_signs(task.decode(symbols[:, row].tolist())) for symbols in (inputs, targets))
        names = {SIGNS[" "]: "space", SIGNS["\n"]: "line end"}
        return Scene(seen, dict(enumerate(right, start=1)), names=names, is_text=True)
    if isinstance(task, Adding):
        values, marks = inputs[:, row].t().tolist()
        marked = [step for step, mark in enumerate(marks, start=1) if mark]
        return Scene([f"{value:.2f}" for value in values], {len(values): f"{targets[row]:.2f}"}, values, marked)
    if isinstance(task, MNIST):
        pixels = inputs[:, row, 0].tolist()
        places = permutation().tolist() if task.permuted else list(range(PIXELS))
        return Scene([f"{pixel:.2f}" for pixel in pixels], {PIXELS: str(int(targets[row]))}, pixels, places=places)
    if isinstance(task, CIFAR10):
        brightness, right = inputs[:, row].mean(-1).tolist(), {task.steps: NAMES[int(targets[row])]}
        return Scene([f"{one:.2f}" for one in brightness], right, brightness, places=list(range(task.steps)))
    return Scene([NOTHING] * len(inputs), {len(inputs): "?"})


def unknown_scene(task: Task) -> Scene:
    """A sequence whose data are not here."""
    return Scene([NOTHING] * task.steps)


def predictions_of(task: Task, outputs: Tensor) -> dict[int, str]:
    """What a model answers with its outputs for one sequence, [T, output_size], at the steps where it counts."""
    steps = len(outputs)
    if isinstance(task, Copying):
        return {step: _digit(int(outputs[step - 1].argmax())) for step in range(steps - DIGITS + 1, steps + 1)}
    if isinstance(task, Recall):
        answers = outputs[-task.pairs :].argmax(-1).tolist()
        return {step: str(value) for step, value in zip(task.attending_steps, answers, strict=True)}
    if isinstance(task, CharacterTask):
        return dict(enumerate(_signs(task.decode(outputs.argmax(-1).tolist())), start=1))
    if isinstance(task, Adding):
        return {steps: f"{outputs[-1, 0]:.2f}"}
    if isinstance(task, MNIST):
        return {steps: str(int(outputs[-1].argmax()))}
    if isinstance(task, CIFAR10):
        return {steps: NAMES[int(outputs[-1].argmax())]}
    return {}


def _digits(inputs: Sequence[int], targets: Sequence[int]) -> Scene:
    answers = range(len(inputs) - DIGITS + 1, len(inputs) + 1)
    seen = ["?" if symbol == MARKER else _digit(symbol) for symbol in inputs]
    quiet = {step for step, symbol in enumerate(inputs, start=1) if symbol == BLANK} - set(answers)
    names = {NOTHING: "blank", "?": "marker"}
    return Scene(seen, {step: _digit(targets[step - 1]) for step in answers}, quiet=frozenset(quiet), names=names)


def _digit(symbol: int) -> str:
    return NOTHING if symbol == BLANK else str(symbol)


def _pairs(task: Recall, inputs: Sequence[int], targets: Sequence[int]) -> Scene:
    """Keys as k3, values as numbers, questions as 3?."""
    right = {step: str(value) for step, value in zip(task.attending_steps, targets, strict=True)}
    quiet = frozenset(step for step, symbol in enumerate(inputs, start=1) if symbol == BLANK)
    return Scene([_symbol(task, symbol) for symbol in inputs], right, quiet=quiet, names={NOTHING: "blank"})


def _symbol(task: Recall, symbol: int) -> str:
    if symbol == BLANK:
        return NOTHING
    if symbol < task.first_value:
        return f"k{symbol - 1}"
    if symbol < task.first_question:
        return str(symbol - task.first_value)
    return f"{symbol - task.first_question}?"


def _signs(characters: str) -> list[str]:
    return [SIGNS.get(one, one) for one in characters]


def ticks(scene: Scene) -> dict[str, Any]:
    """The steps that a time axis names, as many as have room, and where they are."""
    positions, steps = scene.positions, scene.steps
    edges = [step for step in range(2, steps) if (step in scene.quiet) != (step + 1 in scene.quiet)]
    round_ones = [step for every in (100, 50, 20, 10, 5) for step in range(every, steps, every)]
    room = (positions[-1] + scene.widths[-1] / 2) / MOST_TICKS
    chosen: list[int] = []
    for step in (steps, 1, *scene.marked, *edges, *round_ones):
        if all(abs(positions[step - 1] - positions[other - 1]) >= room for other in chosen):
            chosen.append(step)
    chosen.sort()
    return {"tickvals": [positions[step - 1] for step in chosen], "ticktext": [f"{step:,}" for step in chosen]}

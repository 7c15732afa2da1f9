"""The runs of docs/streams.md: SAB, truncated backpropagation, SnAp-1 and UORO learn from the same stream.

    python -m tools.stream_runs cues sab --seed 100 --rate 0.003 --steps 100000    # a trial of a rate
    python -m tools.stream_runs cues sab --seed 0 --steps 100000    # with the best rate of the trials

`cues` is the stream of examples/online.py, the others are the recordings of tools/recordings.py. Every run is a process
of its own, so that the memory that it needs can be told. Records are added to a file in benchmarks/.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

import sab
from sab.lab.rivals.online import CREDITS, Carried, OnlineLayer
from sab.online import Learner
from tools import recordings
from tools.pages import ROOT

_FOLDER = ROOT / "benchmarks"
CUES, RECORDINGS, TRIALS = (_FOLDER / f"streams{name}.jsonl" for name in ("", "-recordings", "-trials"))
HIDDEN, CLIP = 32, 1.0
METHODS = ("sab", "truncated", "snap1", "uoro")
Loss = Callable[[Tensor, Any], Tensor]


class Readout(nn.Module):
    """A prediction from hidden states [T, B, n] and inputs [T, B, size]."""

    def __init__(self, outputs: int | None):
        """With `outputs` that many after the last step of a piece; without, one a step, added to the input."""
        super().__init__()
        self.linear, self.is_of_last = nn.Linear(HIDDEN, outputs or 1), outputs is not None

    def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
        return self.linear(hidden[-1]) if self.is_of_last else x + self.linear(hidden)


class Model(nn.Module):
    """A SAB layer and a readout."""

    def __init__(self, rnn: nn.Module, readout: Readout):
        super().__init__()
        self.rnn, self.readout = rnn, readout

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.rnn(x)[0], x)


class Predicted(NamedTuple):
    """What a step of `ForwardLearner` gives."""

    prediction: Tensor


class Learns(Protocol):
    """What learns from a stream, a piece at a time: `sab.online.Learner`, `ForwardLearner`."""

    @property
    def nbytes(self) -> int: ...

    def step(self, x: Tensor, y: Any = None) -> Any: ...


class ForwardLearner:
    """Learns by a method that carries the influence of the weights forward in time: SnAp-1, UORO.

    Weights are constant within a piece. What is carried goes on over updates, as in the papers.
    """

    def __init__(self, layer: OnlineLayer, readout: Readout, optimizer: torch.optim.Optimizer, loss: Loss):
        self.layer, self.readout, self.optimizer, self.loss = layer, readout, optimizer, loss
        self._state: Tensor | None = None
        self._carried: Carried | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of what is carried."""
        kept = () if self._state is None or self._carried is None else (self._state, *self._carried)
        return sum(tensor.nbytes for tensor in kept)

    def step(self, x: Tensor, y: Any = None) -> Predicted:
        """Predict, and learn from it where there is a y."""
        with torch.no_grad():
            state = x.new_zeros(x.shape[1], 1, HIDDEN) if self._state is None else self._state
            states = self.layer.run(x, state)
        hidden = states[1:, :, 0].clone().requires_grad_()
        prediction, of_hidden = self.readout(hidden, x), torch.zeros_like(hidden)
        if y is not None:
            self.loss(prediction, y).backward()
            assert hidden.grad is not None
            of_hidden = hidden.grad
        with torch.no_grad():
            steps = self.layer.steps(x, states)
            total, self._carried = CREDITS[self.layer.method](steps, of_hidden, self._carried)
        self._state = states[-1]
        if y is not None:
            for parameter, gradient in zip(self.layer.parameters(), self.layer.by_parameter(total), strict=True):
                parameter.grad = gradient
            nn.utils.clip_grad_norm_([*self.layer.parameters(), *self.readout.parameters()], CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return Predicted(prediction.detach())


class Problem(NamedTuple):
    """What a stream asks of a learner, and the memory of SAB for it."""

    input_size: int
    outputs: int | None
    loss: Loss
    k_top: int
    k_att: int
    k_trunc: int
    max_memory: int
    max_chunks: int | None


def make(problem: Problem, options: argparse.Namespace) -> Learns:
    """The learner of a method, with the same optimizer for all. `options.cut` becomes where its chain is cut."""
    torch.manual_seed(options.seed)
    options.cut = {"sab": problem.k_trunc, "truncated": options.cut}.get(options.method)
    readout = Readout(problem.outputs)

    def optimizer(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam([*module.parameters()], options.rate, amsgrad=True)

    if options.method in CREDITS:
        layer = OnlineLayer(options.method, "gru", problem.input_size, HIDDEN, None)
        return ForwardLearner(layer, readout, optimizer(nn.ModuleList([layer, readout])), problem.loss)
    k_top = problem.k_top if options.method == "sab" else 0
    rnn = sab.SABGRU(problem.input_size, HIDDEN, k_top=k_top, k_att=problem.k_att, k_trunc=options.cut)
    model = Model(rnn, readout)
    kept = {"max_memory": problem.max_memory, "max_chunks": problem.max_chunks}
    return Learner(model, optimizer(model), problem.loss, weights=options.weights, clip=CLIP, **kept)


class Meter:
    """The time and the memory of a run, and the file that its records go to."""

    def __init__(self, options: argparse.Namespace):
        self._given = {name: getattr(options, name) for name in ("stream", "method", "seed", "rate", "weights", "cut")}
        self._path = options.out
        self._before, self._began = resident(), time.process_time()
        self._told = 0

    def tell(self, learner: Learns, seen: int, **found: float | None) -> None:
        """Adds a record of the steps since the last one."""
        spent = (time.process_time() - self._began) / (seen - self._told)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - self._before
        record = self._given | {"steps": seen} | found
        record |= {"kept_bytes": learner.nbytes, "process_bytes": resident(), "peak_bytes": peak}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record | {"cpu_us_a_step": round(spent * 1e6, 2)}) + "\n")
        self._began, self._told = time.process_time(), seen


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def follow_cues(options: argparse.Namespace) -> None:
    """A record for each symbol that was shown, and at least every 10,000 steps: the share of right answers."""
    sys.path.insert(0, str(ROOT / "examples"))
    example: Any = importlib.import_module("online")
    distance = options.distance
    problem = Problem(
        input_size=example.SYMBOLS + 2,
        outputs=example.SYMBOLS,
        loss=nn.functional.cross_entropy,
        k_top=10,
        k_att=distance // example.MICROSTATES,
        k_trunc=example.CUT,
        max_memory=example.MICROSTATES,
        max_chunks=4,
    )
    learner, meter, seen = make(problem, options), Meter(options), 0
    near: list[float] = []
    far: list[float] = []
    for x, y, shown in example.stream(distance, options.seed):
        step, seen = learner.step(x, y), seen + len(x)
        if y is not None:
            right = (step.prediction.argmax(-1) == y).float().mean().item()
            (near if seen - shown <= distance // 2 else far).append(right)
        if seen % min(distance, 10_000) == 0:
            counts = {"near_count": len(near), "far_count": len(far)}
            meter.tell(learner, seen, distance=distance, near=mean(near), far=mean(far), **counts)
            near, far = [], []
        if seen >= options.steps:
            return


def follow_recording(options: argparse.Namespace) -> None:
    """A record for each period of the recording: the mean absolute error, and that of forecasts without learning.

    A piece is as long as the forecast is ahead. So what a piece is forecast from is over when it begins, and so is what
    the weights have learned from.
    """
    recording = recordings.RECORDINGS[options.stream]
    values = recordings.load(options.stream, options.file)
    ahead, first = recording.ahead, int(len(values) * recordings.CHOOSING)
    centre, size = values[:first].mean(), values[:first].std()
    x = ((values - centre) / size).reshape(-1, 1, 1)
    problem = Problem(
        input_size=1,
        outputs=None,
        loss=nn.functional.l1_loss,
        k_top=5,
        k_att=recording.k_att,
        k_trunc=recording.k_trunc,
        max_memory=recording.reach // recording.k_att,
        max_chunks=4,
    )
    learner, meter = make(problem, options), Meter(options)
    errors: dict[str, list[float]] = {}
    steps = min(options.steps, len(x) - ahead)
    for begin in range(0, steps - ahead + 1, ahead):
        end = begin + ahead
        target = x[end : end + ahead]
        forecasts = {"learned": learner.step(x[begin:end], target).prediction}
        forecasts |= {
            name: x[end - back : end - back + ahead] for name, back in recording.baselines.items() if end >= back
        }
        for name, forecast in forecasts.items():
            errors.setdefault(name, []).append((forecast - target).abs().mean().item() * size.item())
        if end // recording.period > begin // recording.period:
            is_reported = end - recording.period >= first
            meter.tell(learner, end, is_reported=is_reported, **{name: mean(found) for name, found in errors.items()})
            errors = {}


def best_rate(stream: str, method: str) -> float:
    """The rate with the best trials, over the steps that all of them have."""
    runs: dict[float, list[Any]] = {}
    for record in map(json.loads, TRIALS.read_text(encoding="utf-8").splitlines()):
        if (record["stream"], record["method"]) == (stream, method):
            runs.setdefault(record["rate"], []).append(record)
    if not runs:
        raise SystemExit(f"{TRIALS.name} has no trial of {method} on {stream}: give --rate.")
    steps = min(run[-1]["steps"] for run in runs.values())
    return max(runs, key=lambda rate: score([record for record in runs[rate] if record["steps"] <= steps]))


def score(records: list[Any]) -> float:
    """How good a run was: the share of right answers, or its error with the sign changed."""
    if "learned" in records[0]:
        return -sum(record["learned"] for record in records) / len(records)
    counts = [record[f"{which}_count"] for record in records for which in ("near", "far")]
    right = [record[which] or 0.0 for record in records for which in ("near", "far")]
    return sum(share * count for share, count in zip(right, counts, strict=True)) / sum(counts)


def mean(values: list[float]) -> float | None:
    """None where there are none."""
    return sum(values) / len(values) if values else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stream", choices=("cues", *recordings.RECORDINGS))
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, help="learning rate of Adam; with it, the run is a trial")
    parser.add_argument("--cut", type=int, default=12_000, help="where truncated backpropagation cuts the chain")
    parser.add_argument("--weights", default="now", help="the weights that earlier steps are run again with: now, then")
    parser.add_argument("--steps", type=int, default=sys.maxsize, help="where to stop")
    parser.add_argument("--distance", type=int, default=10_000, help="of cues: how far back a question reaches at most")
    parser.add_argument("--file", type=Path, help="a recording as a file of numbers, instead of the package's")
    parser.add_argument("--out", type=Path, help="where records are added, instead of benchmarks/")
    options = parser.parse_args()
    if options.out is None:
        options.out = TRIALS if options.rate is not None else CUES if options.stream == "cues" else RECORDINGS
    if options.rate is None:
        options.rate = best_rate(options.stream, options.method)
    torch.set_num_threads(1)
    (follow_cues if options.stream == "cues" else follow_recording)(options)


if __name__ == "__main__":
    main()

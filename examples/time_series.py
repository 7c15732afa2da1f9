"""Time series: SAB in a model of your own, beside `torch.nn.LSTM` of the same size, on real measurements.

GunPoint: where a hand was over 150 steps of a video, and whether it drew a gun or only pointed (Ratanamahatana and
Keogh; 50 series to train on, 150 to test). The model says which it was after the last step. The data come with sktime
(BSD licence) in its wheel; nothing is downloaded.

    python examples/time_series.py

It needs `pip install 'sab-torch[examples]'`. Three models of one size from the same seeds, in the same training:

    LSTM                torch.nn.LSTM, full backpropagation through all steps
    LSTM, truncated     the same, its chain cut every 10 steps
    SAB                 its chain cut every 10 steps too, every 5th hidden state kept, 5 of them read at each step

It took 56 s of CPU time, with one thread. Median of three seeds on test series: LSTM 52.0 %, truncated 68.7 %, SAB
91.3 %. Each may do better in a training of its own; this one was tuned for none of them.

A longer problem: one axis of the acceleration of a remote control that is picked up, over 361 steps, and who of ten
people did that (PickupGestureWiimoteZ; Guna, Humar and Pogačnik; 50 series to train on, 50 to test). Recordings are as
long as the gesture was, half of them shorter than 136 steps, and the version of equal length goes on with their mean
and a little noise. So the answer is asked for long after there was anything to see. These data come in the wheel of
aeon (BSD licence), of which only the files are read:

    pip install --no-deps aeon
    python examples/time_series.py --data pickup

With every 10th hidden state kept it took 89 s of CPU time with one thread. Median of three seeds: LSTM 20.0 %,
truncated 30.0 %, SAB 52.0 %; chance is 10 %.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from importlib import resources
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import sab

HIDDEN, BATCH, LEARNING_RATE = 32, 32, 1e-2


class Series(NamedTuple):
    """Time series, [series, T, 1], and the class of each."""

    x: Tensor
    y: Tensor


class Problem(NamedTuple):
    load: Callable[[], tuple[Series, Series]]
    """Gives what to train on and what to test on."""
    iterations: int
    k_att: int


def load_gunpoint() -> tuple[Series, Series]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sktime's own
        from sktime.datasets import load_gunpoint

        parts: list[Any] = [load_gunpoint(split, return_type="numpy3d") for split in ("train", "test")]
    train, test = (
        Series(torch.tensor(x, dtype=torch.float32).transpose(1, 2), torch.tensor(y.astype(int)) - 1) for x, y in parts
    )
    return train, test


def load_pickup() -> tuple[Series, Series]:
    folder = resources.files("aeon").joinpath("datasets", "data", "PickupGestureWiimoteZ")
    train, test = (_read(folder.joinpath(f"PickupGestureWiimoteZ_eq_{split}.ts")) for split in ("TRAIN", "TEST"))
    return train, test


def _read(file: Any) -> Series:
    """The file of a set: after a head of lines with @, a line for each series, numbers and then, after a colon, what it
    is."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line and line[0] not in "#@"]
    numbers, classes = zip(*(line.split(":") for line in lines), strict=True)
    x = torch.tensor([[float(number) for number in line.split(",")] for line in numbers])
    return Series(x.unsqueeze(-1), torch.tensor(list(map(int, classes))) - 1)


PROBLEMS = {"gunpoint": Problem(load_gunpoint, 500, 5), "pickup": Problem(load_pickup, 300, 10)}


class Classifier(nn.Module):
    """Reads a series to its end, then says what it was."""

    def __init__(self, rnn: nn.Module, classes: int) -> None:
        super().__init__()
        self.rnn = rnn  # torch.nn.LSTM or sab.SABLSTM: they are called alike
        self.out = nn.Linear(HIDDEN, classes)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.rnn(x)
        return self.out(hidden[:, -1])


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "LSTM": lambda k_att: nn.LSTM(1, HIDDEN, batch_first=True),
    "LSTM, truncated": lambda k_att: sab.SABLSTM(1, HIDDEN, batch_first=True, k_top=0, k_trunc=10),
    "SAB": lambda k_att: sab.SABLSTM(1, HIDDEN, batch_first=True, k_top=5, k_att=k_att, k_trunc=10),
}


def train(model: Classifier, data: Series, iterations: int, seed: int) -> None:
    optimiser = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=iterations, pct_start=0.1)
    order = torch.Generator().manual_seed(seed)
    for _ in range(iterations):
        rows = torch.randperm(len(data.y), generator=order)[:BATCH]
        loss = nn.functional.cross_entropy(model(data.x[rows]), data.y[rows])
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()


@torch.no_grad()
def accuracy(model: Classifier, data: Series) -> float:
    return (model(data.x).argmax(-1) == data.y).float().mean().item()


def compare(name: str, k_att: int, seeds: int, iterations: int, training: Series, test: Series) -> str:
    """What models of one kind come to: a line of the table."""
    found, known, sizes, began = [], [], [], time.perf_counter()
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = Classifier(LAYERS[name](k_att), int(training.y.max()) + 1)
        train(model, training, iterations, seed)
        found.append(accuracy(model, test))
        known.append(accuracy(model, training))
        sizes.append(sum(parameter.numel() for parameter in model.parameters()))
    each = ", ".join(f"{one:.1%}" for one in found)
    median, seconds = statistics.median(found), time.perf_counter() - began
    return f"{name:16} {sizes[0]:10,}  {median:6.1%} ({each}; {statistics.median(known):.1%})  {seconds:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=PROBLEMS, default="gunpoint", help="gunpoint: 150 steps; pickup: 361 steps")
    parser.add_argument("--iterations", type=int, help="batches to train each model on; by default 500, for pickup 300")
    parser.add_argument("--seeds", type=int, default=3, help="how many models of each kind")
    parser.add_argument("--quick", action="store_true", help="hardly any training, to see that it works")
    options = parser.parse_args()
    torch.set_num_threads(1)  # so small a model gains little from more, and loses much where others want the cores
    problem = PROBLEMS[options.data]
    iterations, seeds = (5, 1) if options.quick else (options.iterations or problem.iterations, options.seeds)
    try:
        training, test = problem.load()
    except ModuleNotFoundError as missing:
        parser.error(f"the data of {options.data} come with {missing.name}, which is not installed")
    told = f"{len(training.y)} series to train on, {len(test.y)} to test, {training.x.shape[1]} steps"
    print(f"{told}; {iterations} iterations\n")
    print(f"{'':16} parameters  accuracy on test series, median (each seed; median on those trained on)")
    for name in LAYERS:
        print(compare(name, problem.k_att, seeds, iterations, training, test), flush=True)


if __name__ == "__main__":
    main()

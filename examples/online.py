"""Learning while a stream runs: what matters was shown up to 10,000 steps ago, and the chain is cut every 50.

Now and then one of four symbols is shown for a while, under a flag. Then comes noise of the same symbols, and again and
again the question which one it was. `sab.online.Learner` gets the stream 50 steps at a time and learns from each
answer: its gradient goes through what the question read into the moment that it was shown, at a constant cost.
Truncated backpropagation learns from the same stream, with a chain 240 times as long, which takes as much time.

    python examples/online.py                       # 200,000 steps of eight streams at once
    python examples/online.py --distance 100000 --steps 1000000
    python examples/online.py --out online.jsonl    # what is printed, as records

It needs `pip install sab-torch` alone. The first takes 45 s of CPU time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

import sab
from sab.online import Learner

SYMBOLS, ROWS, HIDDEN, CUT, MICROSTATES, ASKED = 4, 8, 32, 50, 200, 24


class Piece(NamedTuple):
    """Some steps of the stream."""

    x: Tensor
    """Symbol, whether it is shown, whether it is asked for: [steps, ROWS, SYMBOLS + 2]."""
    y: Tensor | None
    """The answer after the last step, [ROWS], where there is a question."""
    shown: int
    """The step at which the answer began to be shown, counted from 1."""


def stream(distance: int, seed: int) -> Iterator[Piece]:
    """Every `distance` steps a symbol is shown; after it come `ASKED` questions at most, the last one at the end."""
    generator = torch.Generator().manual_seed(seed)
    steps, seen = distance // MICROSTATES, 0
    while True:
        answer = torch.randperm(ROWS, generator=generator) % SYMBOLS  # each as often: no guess is right more often
        far = MICROSTATES ** torch.rand(ASKED, generator=generator)  # as many from 10 to 100 back as from 100 to 1,000
        asked = {MICROSTATES - 1, *far.long().clamp(1, MICROSTATES - 1).tolist()}
        for place in range(MICROSTATES):
            symbols = torch.randint(SYMBOLS, (steps, ROWS), generator=generator)
            x = torch.zeros(steps, ROWS, SYMBOLS + 2)
            x[..., :SYMBOLS] = nn.functional.one_hot(answer.expand(steps, -1) if place == 0 else symbols, SYMBOLS)
            x[..., SYMBOLS] = place == 0
            if place in asked:
                x[-1] = nn.functional.one_hot(torch.tensor(SYMBOLS + 1), SYMBOLS + 2)
            yield Piece(x, answer if place in asked else None, seen + 1)
        seen += distance


class Answerer(nn.Module):
    """Answers after the last step of a piece. The learner hands the layer its state."""

    def __init__(self, distance: int, k_top: int, k_trunc: int):
        super().__init__()
        self.rnn = sab.SABGRU(SYMBOLS + 2, HIDDEN, k_top=k_top, k_att=distance // MICROSTATES, k_trunc=k_trunc)
        self.readout = nn.Linear(HIDDEN, SYMBOLS)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.rnn(x)
        return self.readout(hidden[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000, help="where to stop")
    parser.add_argument("--distance", type=int, default=10_000, help="how far back a question reaches at most")
    parser.add_argument("--weights", default="now", help="the weights that earlier steps are run again with: now, then")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="a file to which records are added")
    parser.add_argument("--quick", action="store_true", help="a few thousand steps, to see that it works")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.distance = 3_000, 1_000
    torch.set_num_threads(1)
    long = options.distance * 6 // 5
    methods = {
        f"SAB, chain cut every {CUT} steps": (10, CUT),
        f"truncated backpropagation, chain cut every {long} steps": (0, long),
    }
    for name, (k_top, k_trunc) in methods.items():
        print(f"\n{name}", flush=True)
        torch.manual_seed(options.seed)
        model = Answerer(options.distance, k_top, k_trunc)
        learner = Learner(
            model,
            # amsgrad: once all answers are right, gradients vanish, and Adam's steps would grow for want of them
            torch.optim.Adam(model.parameters(), 0.003, amsgrad=True),
            nn.functional.cross_entropy,
            weights=options.weights,
            clip=1.0,
            max_memory=MICROSTATES,
            max_chunks=4,
        )
        follow(learner, name, options)


def follow(learner: Learner, name: str, options: argparse.Namespace) -> None:
    """Learns from so many steps and prints how it goes, ten times."""
    print(f"{'steps':>10}  {'near':>6}  {'far':>6}  {'chunks':>6}  {'kept':>9}  {'process':>8}  {'a step':>8}")
    near, far, told, began, receipt = [], [], 0, time.process_time(), ""
    for x, y, shown in stream(options.distance, options.seed):
        step = learner.step(x, y)
        if y is not None:
            back = learner.seen - shown
            right = (step.prediction.argmax(-1) == y).float().mean().item()
            (near if back <= options.distance // 2 else far).append(right)
            is_last = learner.seen % options.distance == 0
            receipt = tell(learner, shown, shown + len(x)) if is_last else receipt
        if learner.seen - told >= options.steps / 10:
            spent = (time.process_time() - began) / (learner.seen - told) * 1e6
            line = {"steps": learner.seen, "near": mean(near), "far": mean(far), "chunks": learner.chunks}
            line |= {"kept_bytes": learner.nbytes, "process_bytes": memory(), "cpu_us_a_step": spent}
            print(
                f"{line['steps']:10,}  {line['near']:6.1%}  {line['far']:6.1%}  {line['chunks']:6}  "
                f"{line['kept_bytes'] / 1024:6,.0f} KB  {line['process_bytes'] / 2**20:5,.0f} MB  {spent:5.0f} µs",
                flush=True,
            )
            if options.out:
                with open(options.out, "a", encoding="utf-8") as file:
                    given = {"method": name, **{key: getattr(options, key) for key in ("distance", "seed", "weights")}}
                    file.write(json.dumps(given | line) + "\n")
            near, far, told, began = [], [], learner.seen, time.process_time()
        if learner.seen >= options.steps:
            print(receipt)
            return


def tell(learner: Learner, first: int, end: int) -> str:
    """What the last answer goes back to."""
    receipt = learner.explain()
    there = (receipt.steps >= first) & (receipt.steps < end)
    share = (receipt.credit[there].sum() / receipt.credit.sum()).item()
    return (
        f"the answer after step {receipt.step:,} is credited to {len(receipt.steps):,} steps; steps {first:,} to "
        f"{end - 1:,}, where it was shown, have {share:.1%} of the credit"
    )


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def memory() -> float:
    """Bytes of memory that this process has; NaN where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return float("nan")
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


if __name__ == "__main__":
    main()

"""Why did the model say that? Train a small one, ask `sab.trace`, print the steps that were credited, save a picture.

Ten digits come in, then up to 30 blanks and a marker; then the model has to say the digits again, one a step. Its
recurrent chain is cut every 5 steps, so that what it learns comes over skips. We know where each digit was, so we can
tell whether the explanation is right.

    python examples/why.py --out why.png

It needs `pip install 'sab-torch[report]'` for the picture.

Its 700 iterations took 18 s of CPU time: all digits are right, and every answer read most of the very microstate that
holds its digit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import sab

DIGITS, BLANKS, K_ATT = 10, 30, 2
BLANK, MARKER, SYMBOLS = 0, 9, 10
"""Symbols are a blank, the digits from 1 to 8, and a marker."""


class Repeater(nn.Module):
    """Reads symbols, [T, B], and says a symbol at each step, [T, B, symbols]."""

    def __init__(self, hidden_size: int = 128) -> None:
        super().__init__()
        self.rnn = sab.SABLSTM(SYMBOLS, hidden_size, k_top=5, k_att=K_ATT, k_trunc=5)
        self.out = nn.Linear(hidden_size, SYMBOLS)

    def forward(self, symbols: Tensor) -> Tensor:
        hidden, _ = self.rnn(8.0 * nn.functional.one_hot(symbols, SYMBOLS).float())
        return self.out(hidden)


def draw(batch: int, blanks: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """What goes in and what is to come out, [2 * DIGITS + blanks, B] both."""
    digits = torch.randint(1, MARKER, (DIGITS, batch), generator=generator)
    symbols = torch.full((2 * DIGITS + blanks, batch), BLANK)
    answers = symbols.clone()
    symbols[:DIGITS], symbols[-DIGITS - 1], answers[-DIGITS:] = digits, MARKER, digits
    return symbols, answers


def train(model: Repeater, iterations: int) -> None:
    """Lengths are drawn too: in short sequences nearly every microstate is selected, so all of them learn."""
    generator = torch.Generator().manual_seed(0)
    optimiser = torch.optim.Adam(model.parameters(), lr=8e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.02, iterations)
    for iteration in range(1, iterations + 1):
        symbols, answers = draw(32, int(torch.randint(1, BLANKS + 1, (), generator=generator)), generator)
        loss = nn.functional.cross_entropy(model(symbols).flatten(0, 1), answers.flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimiser.step()
        schedule.step()
        if iteration % 100 == 0:
            print(f"iteration {iteration}: loss {loss.item():.4f}", flush=True)


def explain(model: Repeater, symbols: Tensor, step: int) -> None:
    """Prints what the answer of a step of the first sequence goes back to."""
    traced = sab.trace(model, symbols, step, max_paths=16)
    past = traced.credit.total[:DIGITS]
    print("it read")
    for kept_at, weight in zip(traced.kept_at[step - 1].tolist(), traced.weights[step - 1].tolist(), strict=True):
        if weight > 0.01:
            print(f"  the microstate of step {kept_at:2}, weight {weight:.2f}")
    print("of the credit that came back to the digits")
    for index in past.topk(4).indices.tolist():
        print(f"  {past[index] / past.sum():4.0%} is with step {index + 1:2}, digit {symbols[index, 0]}")
    print("by these paths")
    for path in traced.paths[:3]:
        print(f"  {path.share:4.0%}", ", ".join(f"step {skip.step} read step {skip.kept_at}" for skip in path.skips))


def steps_read_most(model: Repeater, symbols: Tensor) -> Tensor:
    """The step of the microstate that each step of each sequence gave the largest weight, [T, B]."""
    with torch.no_grad():
        attention = model.rnn(8.0 * nn.functional.one_hot(symbols, SYMBOLS).float(), return_attention=True)[2]
    best = attention.weights.argmax(-1, keepdim=True)
    return (attention.numbers.gather(-1, best).squeeze(-1) + 1) * K_ATT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("why.png"), help="the picture: .png, .pdf or .svg")
    parser.add_argument("--quick", action="store_true", help="hardly any training, to see that it works")
    options = parser.parse_args()
    torch.set_num_threads(1)  # so small a model gains little from more, and loses much where others want the cores
    torch.manual_seed(0)
    model = Repeater()
    train(model, 10 if options.quick else 700)

    symbols, answers = draw(100, BLANKS, torch.Generator().manual_seed(1))
    with torch.no_grad():
        said = model(symbols).argmax(-1)
    right = (said == answers)[-DIGITS:].float().mean().item()
    print(f"\n{right:.1%} of the digits of 100 unseen sequences are right")

    step = len(symbols) - 3  # it has to say the seventh digit
    print(f"\nstep {step} says {said[step - 1, 0]}; the digit of step 7 was {symbols[6, 0]}")
    explain(model, symbols, step)

    # Every second hidden state is kept: a digit is in that of its own step or, if that is odd, in the next.
    holds = (torch.arange(1, DIGITS + 1) + 1) // K_ATT * K_ATT
    found = (steps_read_most(model, symbols)[-DIGITS:] == holds.unsqueeze(-1)).float().mean().item()
    print(f"\n{found:.1%} of all answers read most of the very microstate that holds their digit")

    figure = sab.plot.credit_paths(sab.trace(model, symbols, step))
    figure.savefig(options.out)
    print(f"picture: {options.out}")


if __name__ == "__main__":
    main()

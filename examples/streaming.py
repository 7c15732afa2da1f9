"""Streaming: an input without an end, read piece by piece at constant memory.

With the scorers `affine` and `affine_tanh` a microstate's rank never changes, so `layer.compact(state)` throws away
all but k_top of them, and the layer goes on exactly as if it had kept every one. `mlp` and `dot`, which may come back
to any moment, keep every k_att-th hidden state; this script shows what that costs.

    python examples/streaming.py                     # a million steps
    python examples/streaming.py --steps 100000000   # or stop it with Ctrl-C

It needs `pip install sab-torch` alone. The million steps took 44 s of CPU time, on a machine that had much else to do.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

import torch

import sab

CHANNELS, HIDDEN, PIECE = 4, 64, 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000, help="where to stop")
    parser.add_argument("--quick", action="store_true", help="a few thousand steps, to see that it works")
    options = parser.parse_args()
    steps = 6_000 if options.quick else options.steps
    torch.manual_seed(0)
    # Weights of yours would come from load_state_dict; memory and time do not depend on them.
    layer = sab.SABLSTM(CHANNELS, HIDDEN, scorer="affine", k_top=5).eval()
    check_exact(layer)
    print("\naffine, compacted after each piece: constant")
    follow(layer, steps, compact=True)
    print("\nmlp, which keeps every 2nd hidden state: grows")
    follow(sab.SABLSTM(CHANNELS, HIDDEN, scorer="mlp", k_top=5).eval(), min(steps, 10_000), compact=False)


def sensor() -> Iterator[torch.Tensor]:
    """What never ends: noisy channels, PIECE steps at a time, [PIECE, CHANNELS]."""
    generator = torch.Generator().manual_seed(1)
    first = 0
    while True:
        clock = torch.arange(first, first + PIECE).unsqueeze(-1) / torch.tensor([25.0, 60.0, 100.0, 1000.0])
        yield clock.sin() + 0.1 * torch.randn(PIECE, CHANNELS, generator=generator)
        first += PIECE


@torch.inference_mode()
def follow(layer: sab.SABLSTM, steps: int, compact: bool) -> None:
    """Reads so many steps and tells of the memory as it goes."""
    print(f"{'steps':>12}  {'microstates':>11}  {'state':>9}  {'process, peak':>13}  {'a step':>8}")
    state, seen, told = None, 0, PIECE
    began = time.perf_counter()
    for piece in sensor():
        output, state = layer(piece, state)  # output[-1] is what a readout would look at now
        assert output.isfinite().all()
        if compact:
            state = layer.compact(state)
        seen += len(piece)
        if seen >= min(told, steps):
            told *= 10 if compact else 2
            microseconds = (time.perf_counter() - began) / seen * 1e6
            numbers = f"{seen:12,}  {state.microstates.shape[-2]:11,}  {size_of(state) / 1024:6,.1f} KB"
            print(f"{numbers}  {peak_memory() / 2**20:10,.1f} MB  {microseconds:5.1f} µs", flush=True)
        if seen >= steps:
            return


@torch.inference_mode()
def check_exact(layer: sab.SABLSTM, pieces: int = 4) -> None:
    """In pieces and compacted, the outputs are those of the whole sequence."""
    stream = sensor()
    parts = [next(stream) for _ in range(pieces)]
    whole, _ = layer(torch.cat(parts))
    state, outputs = None, []
    for part in parts:
        output, state = layer(part, state)
        state = layer.compact(state)
        outputs.append(output)
    difference = (torch.cat(outputs) - whole).abs().max().item()
    assert difference < 1e-4, difference
    print(
        f"{len(whole):,} steps in {pieces} pieces, compacted, against all at once: largest difference {difference:.1e}"
    )


def size_of(state: sab.SABState) -> int:
    """Bytes of what is carried from piece to piece."""
    tensors = (state.h, state.c, state.microstates, state.keys, state.numbers, state.steps)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def peak_memory() -> float:
    """Bytes of memory that this process has had at most; NaN where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return float("nan")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main()

"""Launching kernels without asking anew, at each launch, which of the compiled ones its arguments take.

Triton looks at each argument for that, which for kernels with as many as ours takes longer than a short loop itself.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from sab import torch_private

logger = logging.getLogger("sab")

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, which takes tensors on the CPU."""
PATIENCE = 2.0
"""Seconds after which a compilation that still goes on is told."""


class Compiled(NamedTuple):
    """A kernel that has run, as it is launched again without Triton's own look at its arguments."""

    run: Callable[..., None]
    before: tuple[Any, ...]
    """Its arguments between the stream and the tensors."""
    last: list[Any]
    """Those after the sizes: the constants that are parameters, in the kernel's order."""


class Constants:
    """What a kernel is compiled for besides the types of its arguments. Whoever launches makes one for each kernel and
    configuration, once."""

    def __init__(self, values: dict[str, Any]):
        self.values = values
        self.compiled: dict[tuple[Any, ...], Compiled] = {}
        """By device and types of the tensors."""


_made: list[float] = []
"""Seconds of each first launch in this process."""


def launch(
    kernel: Any,
    programs: int,
    tensors: Sequence[Tensor | None],
    sizes: Sequence[int],
    constants: Constants,
    is_aligned: bool = True,
) -> None:
    """Launch a kernel whose parameters are tensors, then sizes that it is not specialised on, then constants.

    The first tensor is there; None for another one is a constant. is_aligned: whether the kernel is specialised on
    where tensors lie, as by default.
    """
    assert tensors[0] is not None
    index = tensors[0].device.index
    if index is not None and index != torch.cuda.current_device():
        with torch.cuda.device(index):  # Triton launches on the current device, wherever the tensors are
            return launch(kernel, programs, tensors, sizes, constants, is_aligned)
    # As numbers, which Triton takes as they are: a tensor it asks again where it is, and the driver whose it is.
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    bits = 0
    for pointer in pointers:
        bits |= pointer or 0
    is_special = is_aligned and bits % 16 != 0  # compiled anew; only a parameter that is part of another lies so
    if INTERPRETED or is_special:
        kernel[(programs,)](*tensors, *sizes, **constants.values)
        return None
    key = (index, *[None if tensor is None else tensor.dtype for tensor in tensors])
    known = constants.compiled.get(key)
    if known is None or _is_watched():
        with told_when_slow(kernel.__name__.replace("_", " ")) if known is None else contextlib.nullcontext():
            compiled = kernel[(programs,)](*tensors, *sizes, **constants.values)
        names = kernel.arg_names[len(tensors) + len(sizes) :]
        before = (compiled.function, compiled.packed_metadata, None, None, None)
        constants.compiled[key] = Compiled(compiled.run, before, [constants.values[name] for name in names])
        return None
    known.run(programs, 1, 1, torch_private.raw_stream(index), *known.before, *pointers, *sizes, *known.last)
    return None


def _is_watched() -> bool:
    """Whether a profiler wants Triton to tell it of each launch."""
    hook = knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook is not None))


@contextlib.contextmanager
def told_when_slow(what: str) -> Iterator[None]:
    """Says what is going on where a first launch takes long, since Triton compiles without a word."""

    def tell() -> None:
        logger.warning(
            "compiling the %s of a SAB layer for this GPU, once for each configuration; `sab warm-up` does it ahead",
            what,
        )

    timer = threading.Timer(PATIENCE, tell)
    timer.daemon = True
    timer.start()
    started = time.perf_counter()
    try:
        yield
    finally:
        timer.cancel()
    seconds = time.perf_counter() - started
    _made.append(seconds)
    if seconds > PATIENCE:
        logger.info("compiled the %s in %.1f s", what, seconds)


def first_launches() -> list[float]:
    """Seconds of each first launch of a kernel in this process, with its compilation where no cache had it."""
    return list(_made)


def cache_folder() -> str:
    """Where Triton keeps what it has compiled."""
    return knobs.cache.dir

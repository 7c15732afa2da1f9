"""One run by several processes, as torchrun starts them: each computes its slice of every batch.

All processes have the same weights and make the same updates, with the sum of their gradients, so that the run is the
one that a single process makes, up to rounding. The first of them alone has the run's folder: it reads, writes and
tells, and gives the others what it has read. What is decided from a clock or a signal is decided together. What they
send each other are tensors and JSON. In a process that was started alone every function here is as good as nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as group
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from sab.errors import UserError, UserValueError

T = TypeVar("T")
NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun puts into the environment."""
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""And how often it has started the processes anew."""

_parents: list[int] = []
"""The process that has started this one, as long as it is part of a run."""


class Lost(UserError):
    """Another process of the run has ended before its time."""


def count() -> int:
    """How many processes make the run."""
    return group.get_world_size() if group.is_initialized() else 1


def number() -> int:
    """Which of them this one is, from 0."""
    return group.get_rank() if group.is_initialized() else 0


def is_first() -> bool:
    """Whether this is the process that has the folder."""
    return number() == 0


def started_together() -> int:
    """How many processes torchrun has started for the run."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in NEEDED) else 1


def speaks() -> bool:
    """Whether this process is the one to print what the run came to, also while there is no run."""
    return started_together() == 1 or os.environ["RANK"] == "0"


def is_orphan() -> bool:
    """Whether torchrun, which has started this process, is gone: killed, or ended by a signal that it does not know."""
    return bool(_parents) and os.getppid() != _parents[-1]


def was_restarted() -> bool:
    """Whether torchrun has started the run anew, after a process of it was lost."""
    return os.environ.get(RESTARTS, "0") != "0"


@contextmanager
def joined(device: torch.device, batch_size: int) -> Iterator[torch.device]:
    """The processes that were started together are one run for a while; gives this one's device."""
    processes = started_together()
    if processes == 1:
        yield device
        return
    if batch_size < processes:
        raise UserValueError(
            f"batch_size must be at least {processes}, the number of processes; got {batch_size}.", "batch_size"
        )
    if device.type == "cuda":
        local, devices = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= devices:
            advice = "--nproc-per-node must be no more than that"
            raise UserValueError(f"device must have a GPU for every process; there are {devices}: {advice}.", "device")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    with _all_there():
        store, rank, size = next(rendezvous("env://"))
        # torchrun may keep its store when it restarts the processes, with the addresses of those that are gone.
        fresh = group.PrefixStore(f"sab/{os.environ.get(RESTARTS, '0')}", store)  # pyright: ignore[reportPrivateImportUsage]
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        group.init_process_group(backend, store=fresh, rank=rank, world_size=size)
    _parents.append(os.getppid())
    try:
        yield device
    finally:
        _parents.clear()
    group.destroy_process_group()  # after an error the others may wait for this one, until torchrun ends them


@contextmanager
def _all_there() -> Iterator[None]:
    """Turns what torch raises where another process is gone into one sentence."""
    try:
        yield
    except RuntimeError as error:
        told = "a run by several processes must keep all of them; one was lost"
        raise Lost(f"{told}: with --max-restarts torchrun goes on from the last checkpoint.") from error


# A batch and its gradients


def part_of(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, float]:
    """This process's slice of a batch, time first, and what fraction of the batch it is."""
    if count() == 1:
        return inputs, targets, 1.0
    size = inputs.shape[1]
    rows = _own(size)
    return inputs[:, rows].contiguous(), targets[..., rows].contiguous(), (rows.stop - rows.start) / size


def rows_of(batch: Tensor) -> Tensor:
    """The same slice of something that has the sequences first."""
    return batch[_own(len(batch))]


def _own(size: int) -> slice:
    return slice(size * number() // count(), size * (number() + 1) // count())


def add_up(gradients: Iterable[Tensor | None], loss: Tensor) -> Tensor:
    """Puts the sums over all processes in the place of the gradients, and gives that of the loss."""
    if count() == 1:
        return loss
    summed = [gradient for gradient in gradients if gradient is not None]
    flat = torch.cat([*(gradient.flatten() for gradient in summed), loss.reshape(1).to(summed[0].dtype)])
    with _all_there():
        group.all_reduce(flat)
    *parts, total = flat.split([*(gradient.numel() for gradient in summed), 1])
    for gradient, part in zip(summed, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
    return total.squeeze(0)


# What is agreed on


def any_of(condition: bool) -> bool:
    """Whether it holds in some process."""
    if count() == 1:
        return condition
    flag = torch.tensor(int(condition))
    with _all_there():
        group.all_reduce(flag, group.ReduceOp.MAX)
    return bool(flag.item())


def take_turns(items: Iterable[T]) -> Iterator[T]:
    """Those items that this process is to look at."""
    return (item for index, item in enumerate(items) if index % count() == number())


def gathered(mine: list[T]) -> list[T]:
    """What all processes made of their turns, in the order of the items; it must be fit for JSON."""
    if count() == 1:
        return mine
    everyones = [json.loads(text) for text in _exchange(json.dumps(mine))]
    return [everyones[index % count()][index // count()] for index in range(sum(map(len, everyones)))]


def firsts(made: T) -> T:
    """What the first process has; it must be fit for JSON."""
    return made if count() == 1 else json.loads(_exchange(json.dumps(made if is_first() else None))[0])


def by_first(action: Callable[[], Any]) -> None:
    """Has something done by the first process, on which the others wait; where it fails, all end."""
    if count() == 1:
        action()
        return
    error: Exception | None = None
    if is_first():
        try:
            action()
        except Exception as caught:
            error = caught
    failed = any_of(error is not None)
    if error is not None:
        raise error
    if failed:
        raise Lost("the first process must be able to begin; it tells why it is not.")


def spread(tensors: Iterable[Tensor]) -> None:
    """Puts the first process's numbers into the others' tensors."""
    if count() == 1:
        return
    with _all_there():
        for tensor in tensors:
            group.broadcast(tensor, 0)


def _exchange(text: str) -> list[str]:
    """What every process says, in their order."""
    mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    with _all_there():
        lengths = [torch.zeros((), dtype=torch.int64) for _ in range(count())]
        group.all_gather(lengths, torch.tensor(len(mine)))
        longest = max(int(length) for length in lengths)
        padded = torch.cat([mine, mine.new_zeros(longest - len(mine))])
        said = [torch.empty_like(padded) for _ in lengths]
        group.all_gather(said, padded)
    texts = zip(said, lengths, strict=True)
    return [bytes(one[: int(length)].tolist()).decode() for one, length in texts]

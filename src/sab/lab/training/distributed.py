"""One run by several processes, as torchrun starts them: each computes its slice of every batch.

All processes hold the same weights and make the same updates, with the sum of their gradients, so the run equals that
of a single process up to rounding. Only the first process uses the run's folder: it reads, writes, prints, and sends
the others what it has read. Decisions that depend on a clock or a signal are made together. The processes exchange
tensors and JSON. In a process that was started alone the functions here change nothing.
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

from sab.errors import LARGEST_INT, UserError, UserValueError

T = TypeVar("T")
NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""The environment variables that torchrun sets."""
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""The environment variable in which torchrun counts restarts."""

_parents: list[int] = []
"""The id of the process that started this one, while it is part of a run."""


class ProcessLost(UserError):
    """Another process of the run ended early."""


def count() -> int:
    """How many processes make the run."""
    return group.get_world_size() if group.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return group.get_rank() if group.is_initialized() else 0


def is_first() -> bool:
    """Whether this is the process that uses the folder."""
    return rank() == 0


def processes_started() -> int:
    """How many processes torchrun started for the run."""
    if not all(name in os.environ for name in NEEDED):
        return 1
    processes = _from_environment("WORLD_SIZE", 1)
    _from_environment("RANK", 0, processes - 1)
    _from_environment("LOCAL_RANK", 0, processes - 1)
    _from_environment("MASTER_PORT", 0, 65535)
    return processes


def _from_environment(name: str, minimum: int, maximum: int = LARGEST_INT) -> int:
    """The number in an environment variable of torchrun's, which whoever starts processes without it sets by hand."""
    given = os.environ[name]
    if not given.isdecimal() or not minimum <= int(given) <= maximum:
        most = "" if maximum == LARGEST_INT else f" and at most {maximum}"
        raise UserValueError(f"{name} must be a whole number of at least {minimum}{most}; got {given!r}.")
    return int(given)


def is_main() -> bool:
    """Whether this process prints the result of the run; it can be called outside a run."""
    return processes_started() == 1 or os.environ["RANK"] == "0"


def is_orphan() -> bool:
    """Whether torchrun, which started this process, has ended, killed or by a signal that it does not handle."""
    return bool(_parents) and os.getppid() != _parents[-1]


def was_restarted() -> bool:
    """Whether torchrun restarted the run after one of its processes was lost."""
    return os.environ.get(RESTARTS, "0") != "0"


@contextmanager
def process_group(device: torch.device, batch_size: int) -> Iterator[torch.device]:
    """Joins the processes that were started together into one run; yields the device of this one."""
    processes = processes_started()
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
    with _sentence_if_lost():
        store, rank, size = _rendezvous()
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


def _rendezvous() -> tuple[Any, int, int]:
    """The store through which the processes find each other, which the first one opens, with the rank and the size."""
    try:
        return next(rendezvous("env://"))
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise
        advice = "choose another, as with torchrun --master-port, or let torchrun --standalone choose one"
        port = os.environ["MASTER_PORT"]
        raise UserValueError(f"MASTER_PORT must be a port that is free; {port} is in use: {advice}.") from error


@contextmanager
def _sentence_if_lost() -> Iterator[None]:
    """Turns the error that torch raises where another process has ended into one sentence."""
    try:
        yield
    except RuntimeError as error:
        sentence = "a run by several processes must keep all of them; one was lost"
        raise ProcessLost(f"{sentence}: with --max-restarts torchrun goes on from the last checkpoint.") from error


# A batch and its gradients


def slice_of_batch(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, float]:
    """The slice of a batch, time first, that this process computes, and what fraction of the batch that is."""
    if count() == 1:
        return inputs, targets, 1.0
    size = inputs.shape[1]
    rows = _own_rows(size)
    return inputs[:, rows].contiguous(), targets[..., rows].contiguous(), (rows.stop - rows.start) / size


def own_rows_of(batch: Tensor) -> Tensor:
    """The same slice of a tensor whose first dimension is the batch."""
    return batch[_own_rows(len(batch))]


def _own_rows(size: int) -> slice:
    return slice(size * rank() // count(), size * (rank() + 1) // count())


def sum_gradients(gradients: Iterable[Tensor | None], loss: Tensor) -> Tensor:
    """Replaces the gradients by their sums over all processes; returns the sum of the losses."""
    if count() == 1:
        return loss
    summed = [gradient for gradient in gradients if gradient is not None]
    flat = torch.cat([*(gradient.flatten() for gradient in summed), loss.reshape(1).to(summed[0].dtype)])
    with _sentence_if_lost():
        group.all_reduce(flat)
    *parts, total = flat.split([*(gradient.numel() for gradient in summed), 1])
    for gradient, part in zip(summed, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
    return total.squeeze(0)


# Decisions made together


def any_of(condition: bool) -> bool:
    """Whether a condition holds in at least one process."""
    if count() == 1:
        return condition
    flag = torch.tensor(int(condition))
    with _sentence_if_lost():
        group.all_reduce(flag, group.ReduceOp.MAX)
    return bool(flag.item())


def own_items(items: Iterable[T]) -> Iterator[T]:
    """The items that this process handles: every `count`-th one."""
    return (item for index, item in enumerate(items) if index % count() == rank())


def gather(mine: list[T]) -> list[T]:
    """The results of all processes for their `own_items`, in the order of the items; they must be fit for JSON."""
    if count() == 1:
        return mine
    everyones = [json.loads(text) for text in _all_gather_texts(json.dumps(mine))]
    return [everyones[index % count()][index // count()] for index in range(sum(map(len, everyones)))]


def from_first(made: T) -> T:
    """The first process's value; it must be fit for JSON."""
    return made if count() == 1 else json.loads(_all_gather_texts(json.dumps(made if is_first() else None))[0])


def run_on_first(action: Callable[[], Any]) -> None:
    """Runs a function in the first process while the others wait; where it fails, all of them raise."""
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
        raise ProcessLost("the first process must be able to begin; it tells why it is not.")


def broadcast(tensors: Iterable[Tensor]) -> None:
    """Copies the first process's tensors into those of the others."""
    if count() == 1:
        return
    with _sentence_if_lost():
        for tensor in tensors:
            group.broadcast(tensor, 0)


def _all_gather_texts(text: str) -> list[str]:
    """The texts of all processes, in the order of their ranks."""
    mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    with _sentence_if_lost():
        lengths = [torch.zeros((), dtype=torch.int64) for _ in range(count())]
        group.all_gather(lengths, torch.tensor(len(mine)))
        longest = max(int(length) for length in lengths)
        padded = torch.cat([mine, mine.new_zeros(longest - len(mine))])
        received = [torch.empty_like(padded) for _ in lengths]
        group.all_gather(received, padded)
    texts = zip(received, lengths, strict=True)
    return [bytes(one[: int(length)].tolist()).decode() for one, length in texts]

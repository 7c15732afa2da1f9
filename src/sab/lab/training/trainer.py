"""A run while it trains."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from sab.errors import printable
from sab.lab.models import SequenceModel
from sab.lab.tasks import Split
from sab.lab.training import checkpoint, distributed
from sab.lab.training.checkpoint import TrainingState
from sab.lab.training.config import TrainConfig
from sab.lab.training.evaluation import evaluate, evaluate_fully, mean_attention
from sab.lab.training.events import Events
from sab.lab.training.lock import RunLock
from sab.lab.training.progress import Progress
from sab.lab.training.run import LoggedEvaluation, Result, Run, RunConfig, Status, finite, provenance
from sab.lab.training.updates import Updates, build_optimizer, build_updates
from sab.state import SABState

logger = logging.getLogger("sab")
T = TypeVar("T")
MOST_ROLLBACKS = 10
"""How many rollbacks in a row a run may make without reaching its next checkpoint on schedule."""


class Ending(NamedTuple):
    """How training ended."""

    status: Status
    message: str
    """The same in a sentence."""


class Trainer:
    """A run: `begin` prepares it, `advance` makes an iteration until there is an `ending`, `finish` writes the result.

    Calls to several trainers may alternate: each keeps its own random state of torch and, on a GPU, its own stream.
    """

    def __init__(self, config: RunConfig, out: Path, resume: bool, progress: Progress, device: torch.device):
        """Makes the run's folder, or opens it to resume; a run that has ended has its `result` already."""
        self.config, self.progress, self.device = config, progress, device
        self.ending: Ending | None = None
        self.result: Result | None = None
        torch.manual_seed(config.training.seed)
        self.model = config.build_model(device)
        self.optimizer = build_optimizer(config.training, self.model, device)
        self._carried: SABState | None = None  # that of the checkpoint that was loaded
        self._is_new = not resume
        self._lock = RunLock(out)
        self.run, self.state = Run(out, config), TrainingState()
        distributed.run_on_first(lambda: self._lock_folder(out, resume))
        self._broadcast_state()
        self._random = torch.get_rng_state()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.made = self.state.step
        """How many updates were made; on a GPU the newest may be in flight, and their losses unread."""
        self._saved_at = time.monotonic()
        self._updates: Updates | None = None
        self._events: Events | None = None

    def _lock_folder(self, out: Path, resume: bool) -> None:
        """Locks the run's folder, and makes the run there or loads it."""
        if resume:
            Run.open(out, "out").check_resumable(self.config)
        else:
            self._check_data()
            if not self._lock.exists:
                Run.check_empty(out)
        self._lock.take()
        try:
            self.run, self.state = self._open(out) if resume else self._create(out)
        except BaseException:
            self._lock.release()
            raise

    def _broadcast_state(self) -> None:
        """Sends what the first process of the run has read to all."""
        if distributed.count() > 1:
            checkpoint.share(self.model, self.optimizer)
            self.state = TrainingState(**distributed.from_first(asdict(self.state)))
            result = distributed.from_first(None if self.result is None else asdict(self.result))
            self.result = None if result is None else Result(**result)

    def _create(self, out: Path) -> tuple[Run, TrainingState]:
        run, state = Run.create(out, self.config), TrainingState()
        checkpoint.save(run.checkpoints, self.config, self.model, self.optimizer, state)
        return run, state

    def _open(self, out: Path) -> tuple[Run, TrainingState]:
        """The run in a folder and the state of its newest checkpoint; sets `result` if the run has ended."""
        run, config = Run.open(out, "out"), self.config
        if run.is_untouched():  # it was killed before its first checkpoint
            checkpoint.save(run.checkpoints, config, self.model, self.optimizer, TrainingState())
        state = self._load(run)
        result = run.result()
        if result is not None and (result.status != "finished" or state.step == config.training.iterations):
            self.result = result
        else:
            self._check_data()
            run.rewind(state.step, config)
            checkpoint.remove_old(run.checkpoints, config, state.step)
            checkpoint.remove_old_best(run, state.best_at)
        return run, state

    def _load(self, run: Run, every: int = 1, before: float = math.inf) -> TrainingState:
        """Loads the newest checkpoint, of those after a multiple of `every` iterations, into model and optimizer."""
        best = run.best if self._keeps_best else None
        state = checkpoint.load(run.checkpoints, self.config, self.model, self.optimizer, best, every, before)
        self._carried = checkpoint.load_carried(run.checkpoints, self.config, state.step, self.device)
        return state

    def begin(self) -> None:
        """Prepares the first iteration."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._torch_context():
            self._updates = self._begin_updates()
        if distributed.is_first():
            self._events = self._build_events()
        where = f" on {self.device}, into {printable(self.run.path)}"
        self.progress.begin(self.config.task.headline, self.state.step, self.config.training.iterations, where)

    def is_ready(self) -> bool:
        """Whether an iteration can start without waiting for the device."""
        assert self._updates is not None
        return self._updates.have_room(self.made)

    def look(self, what: Callable[[SequenceModel], T]) -> T:
        """The result of a read-only function on the model after the updates made so far."""
        with self._torch_context():
            return what(self.model)

    def advance(self, interrupted: bool = False) -> None:
        """Makes an iteration and what is due after it, or sets the `ending` where none is to follow."""
        assert self._updates is not None
        interrupted = distributed.any_of(interrupted or distributed.is_orphan())
        with self._torch_context():
            if interrupted:
                self._read(self._updates)
            if self.ending is None and self._ends_off_schedule():
                self._evaluate()
            self.ending = self.ending or self._find_ending(interrupted)
            if self.ending is None:
                self._iterate(self._updates)

    def finish(self) -> None:
        """Writes the result of a run that has an ending."""
        assert self.ending is not None
        status, message = self.ending
        state = self.state
        self.progress.end()
        result = Result(status, message, state.step, state.solved_at, {}, state.elapsed, *provenance(self.device))
        if distributed.count() > 1:
            result = replace(result, device=f"{result.device}, {distributed.count()} processes")
        with self._torch_context():
            if status != "diverged":
                self._save()
            if status != "interrupted":
                if self._keeps_best and state.best_at is not None:
                    self._take_best(state.best_at)
                    result = replace(result, best_at=state.best_at)
                valid, test = (finite(self._evaluate_fully(split)) for split in ("valid", "test"))
                result = replace(result, metrics=test, valid=valid)
                if distributed.is_first():
                    self.run.finish(result)
                    if self._events is not None:
                        self._events.end(result, self._attention())
        self.result = result

    def close(self) -> None:
        """Releases all that the run holds, whether or not it ended; removes the folder of one without an iteration."""
        try:
            if self._updates is not None:
                self._updates.close()
                if self.result is None:
                    self.progress.end()
            if self._events is not None:
                with contextlib.suppress(OSError):  # its evaluation reported what it could not write
                    self._events.close()
            if self._stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(self._stream)
            if self._is_new and self.state.step == 0 and self.result is None and distributed.is_first():
                self.run.discard()
        finally:
            if distributed.is_first():
                self._lock.release()

    def _attention(self) -> Tensor | None:
        """The mean weights of the last layer over a batch, where there is a memory to read."""
        memory, task = self.config.model.layer_config(), self.config.task
        if memory.k_top == 0 or task.steps <= memory.k_att or distributed.count() > 1:
            return None
        return mean_attention(self.model, task, self.config.training, "valid")[-1].cpu()

    def _take_best(self, step: int) -> None:
        """Loads the best weights, those of `step`, into the model."""
        distributed.run_on_first(lambda: checkpoint.load_best(self.run.best, self.config, self.model, step))
        if distributed.count() > 1:
            checkpoint.share(self.model, self.optimizer)

    @property
    def _keeps_best(self) -> bool:
        return self.config.training.keep == "best"

    def _check_data(self) -> None:
        self.config.task.check_data(self.config.training.batch_size)

    def _begin_updates(self) -> Updates:
        """The updates from the checkpoint on that was loaded, if one was."""
        updates = self._build_updates()
        updates.carried = self._carried
        return updates

    def _build_updates(self) -> Updates:
        return build_updates(self.config, self.model, self.optimizer, self.state, self._stream)

    def _build_events(self) -> Events:
        return Events(self.run.path, self.config, self.state.step)

    def _iterate(self, updates: Updates) -> None:
        training = self.config.training
        updates.make(self.made)
        self.made += 1
        is_evaluated = self.made % training.eval_every == 0
        is_on_schedule = self.made % training.checkpoint_every == 0
        is_saved = is_on_schedule or self.made == training.iterations or self._is_time()
        is_moment = training.moments_every is not None and self.made % training.moments_every == 0
        if not (is_evaluated or is_saved or is_moment or updates.wants_reading()) or not self._read(updates):
            return
        if is_evaluated:
            self._evaluate()
        if is_moment and distributed.is_first():
            checkpoint.save_moment(self.run.moments, self.config, self.model, self.state)
        if is_on_schedule and self.made >= self.state.trouble_at:
            self.state.rollbacks_here = 0
        if is_saved:
            self._save()

    def _is_time(self) -> bool:
        """Whether `checkpoint_minutes` have passed since the newest checkpoint, by the monotonic clock."""
        minutes = self.config.training.checkpoint_minutes
        return minutes is not None and distributed.any_of(time.monotonic() - self._saved_at >= 60 * minutes)

    def _read(self, updates: Updates) -> bool:
        """Reads the updates made so far; returns whether all of them were finite.

        Otherwise the run has its ending or has rolled back.
        """
        before = self.state.step
        trouble = updates.read(self.state)
        if self.state.step > before:
            self.progress.iteration(self.state.step, updates.loss)
            if self._events is not None:
                self._events.loss(self.state.step, updates.loss)
        if trouble is None:
            return True
        if self.config.training.on_nan == "rollback":
            if self.state.rollbacks_here < MOST_ROLLBACKS:
                self._roll_back(updates, trouble)
                return False
            trouble += f", after {MOST_ROLLBACKS} rollbacks"
        left = "the weights were left as they were before it"
        if self._keeps_best and self.state.best_at is not None:
            left += f", and the metrics are of the best ones, those of iteration {self.state.best_at}"
        self.ending = Ending("diverged", f"{trouble}; {left}.")
        return False

    def _roll_back(self, updates: Updates, trouble: str) -> None:
        """Goes back to the last checkpoint on schedule and continues with half the learning rate.

        Checkpoints off schedule, which an uninterrupted run does not have, are removed first: a run that is killed here
        meets the same trouble again and rolls back again.
        """
        before = self.state
        self._is_new = False  # its folder is kept, even if it goes back to its beginning
        updates.close()
        distributed.run_on_first(self._load_on_schedule)
        self._broadcast_state()
        self.state.elapsed = before.elapsed
        self.state.rollbacks = before.rollbacks + 1
        self.state.rollbacks_here = before.rollbacks_here + 1
        self.state.trouble_at = before.step + 1
        self.state.lr_factor = before.lr_factor / 2
        self.made = self.state.step
        if distributed.is_first():
            checkpoint.remove_old(self.run.checkpoints, self.config, self.made)
            self.run.rewind(self.made, self.config)
            checkpoint.remove_old_best(self.run, self.state.best_at)
            checkpoint.remove_later_moments(self.run.moments, self.made)
        self._updates = self._begin_updates()
        if self._events is not None:
            self._events.close()
            self._events = self._build_events()
        factor = f"1/{round(1 / self.state.lr_factor)} of the learning rate"
        logger.warning(f"{trouble}; the run goes back to iteration {self.made}, and on with {factor}.")

    def _load_on_schedule(self) -> None:
        """Loads the last checkpoint on schedule before this step; from this step the same trouble would follow."""
        self.state = self._load(self.run, self.config.training.checkpoint_every, before=self.state.step)

    def _ends_off_schedule(self) -> bool:
        """Whether the last iteration was made and needs an evaluation off schedule.

        A longer run has no evaluation there and must not differ: no checkpoint records it, and a run that is resumed
        here repeats it.
        """
        training = self.config.training
        return self.made == training.iterations and self.made % training.eval_every != 0

    def _find_ending(self, interrupted: bool) -> Ending | None:
        """Why no further iteration follows; None if one does."""
        headline, training, step = self.config.task.headline, self.config.training, self.made
        if training.stop_at is not None and self.state.solved_at is not None:
            reached = f"{headline.label} {headline.show(training.stop_at)}"
            return Ending("solved", f"reached {reached} after {step} iterations{self._describe_trouble()}.")
        if step >= training.iterations:
            return Ending("finished", f"finished all {step} iterations{self._describe_trouble()}.")
        if training.patience is not None and self.state.since_best >= training.patience:
            return Ending(
                "stopped", f"stopped after {step} iterations{self._describe_trouble()}: {self._describe_patience()}."
            )
        if interrupted:
            return Ending("interrupted", f"interrupted after {step} iterations{self._describe_trouble()}.")
        return None

    def _describe_trouble(self) -> str:
        """How many iterations were skipped or rolled back, where any were."""
        if self.state.skipped:
            return f" ({self.state.skipped} skipped)"
        rollbacks = self.state.rollbacks
        return f" ({rollbacks} rollback{'s' if rollbacks > 1 else ''})" if rollbacks else ""

    def _describe_patience(self) -> str:
        """The evaluations without a better one, in words."""
        headline, state = self.config.task.headline, self.state
        evaluations = "1 evaluation" if state.since_best == 1 else f"{state.since_best} evaluations"
        if state.best is None:
            return f"no finite {headline.label} in {evaluations}"
        best = f"iteration {state.best_at} ({headline.show(state.best)})"
        return f"no better {headline.label} in {evaluations} since {best}"

    def _evaluate(self) -> None:
        """Evaluates and logs; updates `solved_at` and the best weights so far."""
        task, training, state = self.config.task, self.config.training, self.state
        started = time.perf_counter()
        metrics = evaluate(self.model, task, training, "valid")
        state.elapsed += time.perf_counter() - started
        threshold = task.headline.solved if training.stop_at is None else training.stop_at
        if state.solved_at is None and task.headline.reaches(metrics[task.headline.metric], threshold):
            state.solved_at = state.step
        if state.compare(task.headline, metrics[task.headline.metric]) and self._keeps_best and distributed.is_first():
            checkpoint.save_best(self.run.best, self.config, self.model, state)
            checkpoint.remove_old_best(self.run, state.best_at)
        self._log(finite(metrics))
        # The end of a run may lie between two evaluations of a longer one, which must not differ.
        if state.step % training.eval_every == 0:
            state.start_window()

    def _log(self, metrics: dict[str, float | None]) -> None:
        """Writes an evaluation to metrics.jsonl and TensorBoard, and shows it."""
        if not distributed.is_first():
            return
        assert self._events is not None
        state = self.state
        counted = state.window - state.window_skipped
        line: LoggedEvaluation = {
            "step": state.step,
            "loss": state.loss_sum / counted if counted else None,
            "metrics": metrics,
            "grad_norm": state.grad_norm_sum / counted if counted else None,
            "grad_norm_max": state.grad_norm_max if counted else None,
            "skipped": state.skipped,
            "rollbacks": state.rollbacks,
            "iterations_per_second": state.window / state.seconds,
            "elapsed": state.elapsed,
        }
        self.run.log(line)
        self._events.evaluation(line, self.config.training.lr_at(state.step) * state.lr_factor)
        self.progress.evaluation({**line, "best": state.best, "best_at": state.best_at})

    def _evaluate_fully(self, split: Split) -> dict[str, float]:
        return evaluate_fully(self.model, self.config.task, self.config.training, split)

    def _save(self) -> None:
        """Writes a checkpoint, where this step has none, and removes best weights that no checkpoint needs."""
        if distributed.is_first():
            self.run.check_there()
            carried = None if self._updates is None else self._updates.carried
            if checkpoint.save(self.run.checkpoints, self.config, self.model, self.optimizer, self.state, carried):
                checkpoint.remove_old_best(self.run, self.state.best_at)
        self._saved_at = time.monotonic()

    @contextmanager
    def _torch_context(self) -> Iterator[None]:
        """Sets torch's random state and current stream to this run's."""
        torch.set_rng_state(self._random)
        with torch.cuda.stream(self._stream):  # None changes nothing
            yield
        self._random = torch.get_rng_state()


@contextmanager
def torch_settings(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Sets torch's threads for the runs; restores the caller's threads and random state."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), _quiet_events():
        torch.set_num_threads(config.threads or threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


@contextmanager
def _quiet_events() -> Iterator[None]:
    """Silences errors of TensorBoard's thread, such as a full disk: the next evaluation reports them."""
    previous = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if type(arguments.thread).__name__ != "_AsyncWriterThread":
            previous(arguments)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = previous

"""`Learner`: a model that learns while its sequence runs.

The losses since the last update are backpropagated through their pieces to the state that these began with: to h, c and
the microstates that they read. What arrives there goes on into the chunks that made these, newest first. Each is run
again from the kept state of its beginning, and passes on what it gets to the microstates that it had read itself: any
number of skips, each chunk once. `docs/mathematics.md` has the definition.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from sab.config import SABConfig
from sab.errors import UserTypeError, UserValueError, check_choice, check_float, check_int
from sab.files import replacing
from sab.online.credit import Arrived, due, run_again
from sab.online.driver import Driver
from sab.online.period import Period, Runner
from sab.online.stream import Horizon, Stream
from sab.ops import schedule

WEIGHTS = ("now", "then")
FREE = ("backend", "recompute", "offload", "attention_size")
"""Options of a layer that change no number but by rounding, or that its parameters show: a state may be loaded where
they are others."""


class Step(NamedTuple):
    """What a call of `Learner.step` did."""

    prediction: Tensor
    """What the model gave for x, before it learned from it."""
    loss: float | None
    """The loss of this piece; None where there was no y."""
    gradient_norm: float | None
    """The norm of the gradient, before it was clipped, where the call ended with an update; otherwise None."""
    chunks: int
    """How many earlier chunks that update sent gradient into."""
    dropped: int
    """How many chunks `max_chunks` left out, though gradient had arrived there."""


class Credited(NamedTuple):
    """A step of the stream, counted from 1, and its credit."""

    step: int
    credit: float


@dataclass(frozen=True, eq=False)
class Receipt:
    """The steps of the stream that a prediction is credited to: those whose inputs receive gradient from it."""

    value: float
    """What is explained: the value of the target."""
    step: int
    """The step at which the prediction was made: the last one of its piece, counted from 1 over the whole stream."""
    steps: Tensor
    """The steps whose inputs receive gradient, oldest first, [K]; that of every other step is 0."""
    credit: Tensor
    """The norm of the gradient of the target with respect to the layer's input at each of these steps, [K]."""
    beyond: Tensor
    """The steps of microstates that gradient arrived at but whose chunks are no longer kept: it ends there. Empty
    where `steps` is complete."""

    def top(self, count: int = 5) -> list[Credited]:
        """The steps with the most credit, largest first."""
        order = torch.argsort(self.credit, descending=True, stable=True)[:count].tolist()
        return [Credited(int(self.steps[place]), float(self.credit[place])) for place in order]


class Learner:
    """Learns from a stream while it runs, a step or a small piece at a time, for ever, at a constant cost.

    `model` is one of the SAB layers, or a model that has one (it may be a stack) and calls it once, without a state:
    the learner hands the layer its state. What comes before the layer must treat each step by itself, as an embedding
    does, since steps are run again in other groups than they came in. What comes after it is free.

    Args:
        model: The model. `model(x)` gives a prediction, or a tuple that begins with it.
        optimizer: An optimizer of its parameters.
        loss: Maps (prediction, y) to a tensor with one entry.
        update_every: How many pieces make an update. Its gradient is that of the sum of their losses.
        weights: The weights that earlier chunks are run again with: today's (`now`), or those that they ran with
            (`then`), a copy of which is kept for every update that is remembered.
        clip: The largest norm of a gradient; None for no limit.
        max_memory: How many microstates the memory holds: the latest ones. None is the layer's own `max_memory`, or 256
            where it has none. A chunk is kept, and may receive gradient, for as long as one of its microstates is among
            them.
        max_chunks: How many earlier chunks an update may run again, besides the one that it begins in; None for all
            that are kept and receive gradient.

    Example:
        ```python
        learner = sab.online.Learner(model, torch.optim.Adam(model.parameters()), torch.nn.functional.mse_loss)
        for x, y in stream:  # [T, B, input_size] and the like, T being 1 or a few
            prediction, loss, *_ = learner.step(x, y)
        ```
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any, Any], Tensor],
        *,
        update_every: int = 1,
        weights: str = "now",
        clip: float | None = None,
        max_memory: int | None = None,
        max_chunks: int | None = None,
    ):
        self._driver = Driver(model)
        self.model = model
        self.optimizer = _check_optimizer(optimizer, model)
        if not callable(loss):
            raise UserTypeError(f"loss must be a function of prediction and y; got {type(loss).__name__}.", "loss")
        self.loss = loss
        self.update_every = check_int("update_every", update_every, 1)
        self.weights = check_choice("weights", weights, WEIGHTS)
        self.clip = None if clip is None else check_float("clip", clip, above=0)
        self.max_chunks = check_int("max_chunks", max_chunks, 0, optional=True)
        own = check_int("max_memory", max_memory, 1, optional=True)
        self._horizon = Horizon.of(self._driver.layer.config, own)
        self.max_memory = self._horizon.max_memory
        self._runner = Runner(self._driver, self._horizon, self.weights == "then")
        self._stream: Stream | None = None
        """The stream at the last update."""
        self._period: Period | None = None
        """What came since then; None where nothing did."""
        self._last: Period | None = None
        """The period of the last prediction, without its graph."""

    @property
    def seen(self) -> int:
        """How many steps have been seen."""
        if self._period is not None and self._period.begun is not None:
            return self._period.begun.seen
        return 0 if self._stream is None else self._stream.seen

    @property
    def chunks(self) -> int:
        """How many chunks were kept at the last update."""
        return 0 if self._stream is None else len(self._stream.chunks)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that were kept of the stream at the last update, copies of weights included."""
        return 0 if self._stream is None else sum(tensor.nbytes for tensor in self._stream.tensors())

    def step(self, x: Tensor, y: Any = None) -> Step:
        """Predict, and learn from it.

        `x` is what the model takes, with steps and batch as for its layer: [T, B, ...], [B, T, ...] with
        `batch_first`, or [T, ...] unbatched; T may change from call to call, the rest may not. `y` is what the loss
        takes; None where there is nothing to learn from in this piece. What is refused changes nothing.
        """
        with torch.inference_mode(False), torch.enable_grad():
            self._check(x, y)
            before = self._period
            prediction, loss, period = self._take(before, _copied(x), _copied(y))
            done = None, 0, 0
            if len(period.pieces) < self.update_every:
                self._period = period
            else:
                done = self._update(period, before)
            self._last = period.without_graph()
        return Step(prediction.detach(), None if loss is None else loss.item(), *done)

    def update(self) -> float | None:
        """Make the update of the pieces since the last one now; returns the norm of its gradient, None where there was
        nothing to learn from."""
        if self._period is None:
            return None
        with torch.inference_mode(False), torch.enable_grad():
            return self._update(self._period, self._period)[0]

    def explain(self, target: Callable[[Tensor], Tensor] | None = None, *, row: int = 0) -> Receipt:
        """The steps that the last prediction is credited to, with the weights that made it.

        `target` maps the prediction for the last piece to a scalar; None is the largest entry of its last step in `row`
        of the batch. The cost does not depend on how long the stream has been. `max_chunks` does not count here.
        """
        told = self._last
        if told is None:
            raise UserValueError("explain must be called after a step; there is no prediction yet.")
        with torch.inference_mode(False), torch.enable_grad():
            period, inputs, prediction = told._replace(pieces=()), [], None
            for x, y in told.pieces:
                prediction, period = self._runner.run(period, x, y, told.weights, inputs)
            assert period.begun is not None
            stream, leaves, _, seen, *_ = period.begun
            value = self._target(target, prediction, inputs[-1], row)
            found = torch.autograd.grad(value, [*inputs, *leaves.given()], allow_unused=True)
            arrived = Arrived.at(stream, self._horizon, **leaves.named(found[len(inputs) :]))
            credited = _by_step(stream.seen, stream.time, inputs, found[: len(inputs)])
            for chunk, _ in due(stream, self._horizon, arrived, None):
                parts = run_again(self._driver, stream, self._horizon, chunk, arrived, told.weights, of_inputs=True)
                given = [part.x for part in chunk.parts]
                credited += _by_step(chunk.first, stream.time, given, [gradient for (gradient,) in parts])
        credited.sort()
        steps = torch.tensor([one.step for one in credited], dtype=torch.int64)
        credit = torch.tensor([one.credit for one in credited], dtype=torch.float64)
        return Receipt(value.item(), seen, steps, credit, self._beyond(stream, arrived))

    def state_dict(self) -> dict[str, Any]:
        """Everything that it takes to go on, bit for bit: the model's and the optimizer's state and what is kept of
        the stream. It holds numbers, text and copies of tensors alone, and y as it was given."""
        stored = {
            "made_by": self._made_by(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "stream": None if self._stream is None else self._stream.state_dict(),
            "pieces": [] if self._period is None else list(self._period.pieces),
        }
        return copy.deepcopy(stored)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called, by a learner with the same options and a model and an optimizer of the
        same kind. What is refused changes nothing."""
        state = copy.deepcopy(state)
        stream = self._checked(state)
        own = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        fields = self._stream, self._period, self._last
        try:
            self.optimizer.load_state_dict(state["optimizer"])
            self.model.load_state_dict(state["model"])
            self._stream, self._period, self._last = stream, None, None
            with torch.inference_mode(False), torch.enable_grad():
                self._period = self._again(state["pieces"])
            self._last = None if self._period is None else self._period.without_graph()
        except Exception as error:
            self.model.load_state_dict(own[0])
            self.optimizer.load_state_dict(own[1])
            self._stream, self._period, self._last = fields
            if self._period is not None:  # its graph began at the weights, which have been written to since
                with torch.inference_mode(False), torch.enable_grad():
                    self._period = self._again(self._period.pieces)
            raise UserValueError(
                f"state must be that of a learner with such a model and optimizer; {_first_line(error)}.", "state"
            ) from error

    def save(self, path: str | Path) -> None:
        """Write `state_dict` to a file, in one move: where that fails, as on a full disk, an earlier file of that name
        stays whole, and the learner goes on. A state that `load` would refuse is not written: the optimizer's options
        and y must be numbers, text, tensors, or plain containers of these."""
        file, content = _path(path), io.BytesIO()
        try:
            torch.save(_plain(self.state_dict()), content)
            torch.load(io.BytesIO(content.getbuffer()), weights_only=True)
        except Exception as error:  # what cannot be stored makes torch raise nearly anything
            raise UserValueError(
                "the optimizer's options and y must be numbers, text and tensors in plain containers to be saved; "
                f"{_first_line(error)}."
            ) from error
        with replacing(file, "path") as temporary:
            temporary.write_bytes(content.getbuffer())

    def load(self, path: str | Path) -> None:
        """Go on from a file of `save`. What is refused changes nothing."""
        file = _path(path)
        try:
            content = io.BytesIO(file.read_bytes())
        except OSError as error:
            raise UserValueError(
                f"path {str(file)!r} must be a file that can be read; {error.strerror}.", "path"
            ) from error
        try:
            state = torch.load(content, self._driver.layer.weight_hh_l0.device, weights_only=True)
        except Exception as error:  # a damaged file makes torch raise nearly anything
            raise UserValueError(
                f"path {str(file)!r} must be a file of Learner.save; it is damaged, or another.", "path"
            ) from error
        self.load_state_dict(state)

    def _take(self, period: Period | None, x: Tensor, y: Any) -> tuple[Tensor, Tensor | None, Period]:
        """The prediction for a piece, its loss, and the period with it."""
        if period is None:
            weights = {name: one.detach().clone() for name, one in self.model.named_parameters()}
            period = Period(weights, self._stream)
        with torch.set_grad_enabled(y is not None or self.update_every > 1):  # otherwise nothing sends gradient here
            prediction, period = self._runner.run(period, x, y)
        if y is None:
            return prediction, None, period
        loss = self._loss_of(prediction, y)
        return prediction, loss, period._replace(total=loss if period.total is None else period.total + loss)

    def _again(self, pieces: Any) -> Period | None:
        """The period of these pieces, with a new graph."""
        period = None
        for x, y in pieces:
            *_, period = self._take(period, x, y)
        return period

    def _loss_of(self, prediction: Tensor, y: Any) -> Tensor:
        loss = self.loss(prediction, y)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            given = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UserValueError(f"loss must give a tensor with one entry; got {given}.", "loss")
        if not loss.requires_grad:
            raise UserValueError("loss must be made from the prediction; what it gives has no gradient.", "loss")
        if not bool(torch.isfinite(loss).all()):
            raise UserValueError(f"loss must be finite; got {loss.item()} after {self.seen} steps.", "loss")
        return loss.sum()

    def _update(self, period: Period, before: Period | None) -> tuple[float | None, int, int]:
        """Make the update of a period; where that is refused, the learner stays at `before`."""
        assert period.begun is not None
        norm, chunks, dropped = None, 0, 0
        if period.total is not None:
            try:
                gradients, norm, chunks, dropped = self._gradients(period)
            except BaseException:
                self._period = None if before is None else self._again(before.pieces)  # its graph is used up
                raise
            for parameter, gradient in zip(self._driver.parameters().values(), gradients, strict=True):
                parameter.grad = gradient
            self.optimizer.step()
            for parameter in self.model.parameters():
                parameter.grad = None
        self._stream, self._period = period.begun.end(self._horizon), None
        return norm, chunks, dropped

    def _gradients(self, period: Period) -> tuple[list[Tensor | None], float, int, int]:
        """The gradient of a period's losses, clipped; its norm before that; how many chunks it went into, and did
        not."""
        begun, parameters = period.begun, self._driver.parameters()
        assert begun is not None
        assert period.total is not None
        stream, count = begun.stream, len(parameters)
        found = torch.autograd.grad(period.total, [*parameters.values(), *begun.leaves.given()], allow_unused=True)
        sums = list(found[:count])
        arrived = Arrived.at(stream, self._horizon, **begun.leaves.named(found[count:]))
        chunks = dropped = 0
        for chunk, runs in due(stream, self._horizon, arrived, self.max_chunks):
            if not runs:
                dropped += 1
                continue
            chunks += chunk.first + self._horizon.k_trunc <= stream.seen
            for part in run_again(self._driver, stream, self._horizon, chunk, arrived):
                sums = [_sum(one, other) for one, other in zip(sums, part, strict=True)]
        norms = [torch.linalg.vector_norm(gradient) for gradient in sums if gradient is not None]
        norm = torch.linalg.vector_norm(torch.stack(norms)).item() if norms else 0.0
        if not math.isfinite(norm):
            raise UserValueError(
                f"loss must have a finite gradient; its norm is {norm} after {self.seen} steps.", "loss"
            )
        if self.clip is not None and norm > self.clip:
            sums = [None if gradient is None else gradient * (self.clip / norm) for gradient in sums]
        return sums, norm, chunks, dropped

    def _beyond(self, stream: Stream, arrived: Arrived) -> Tensor:
        """The steps of microstates that gradient arrived at and that no kept chunk made."""
        first = self._horizon.next(stream.chunks[0].first if stream.chunks else stream.seen)
        places = [slice(place, place + 1) for place in range(first - stream.number)]
        numbers = [stream.number + place for place, (has, _) in enumerate(arrived.masses(places)) if has]
        return schedule.kept_at(torch.tensor(numbers, dtype=torch.int64), self._horizon.k_att)

    def _target(self, target: Any, prediction: Any, given: Tensor, row: int) -> Tensor:
        """The value that is explained."""
        if target is not None:
            value = target(prediction)
            if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
                raise UserValueError("target must map the prediction to a tensor with one entry.", "target")
            return value.sum()
        time, is_batched = self._driver.time(given), given.dim() == 3
        rows = given.shape[1 - time] if is_batched else 1
        row = check_int("row", row, 0, maximum=rows - 1)
        if prediction.dim() > 0 and prediction.shape[:-1] == given.shape[:-1]:
            prediction = prediction.select(time, -1)
        if prediction.dim() == 0 or list(prediction.shape[:-1]) != ([rows] if is_batched else []):
            raise UserValueError(
                "target must be given where a prediction is not of the shape of the layer's output, or of its last "
                f"step; got {list(prediction.shape)}.",
                "target",
            )
        return (prediction[row] if is_batched else prediction).max()

    def _check(self, x: Any, y: Any) -> None:
        """Refuse a piece that does not belong to the stream, and a model that cannot be run again."""
        if not isinstance(x, Tensor):
            raise UserTypeError(f"x must be a tensor; got {type(x).__name__}.", "x")
        begun = None if self._period is None else self._period.begun
        stream = self._stream if begun is None else begun.stream
        if stream is not None:
            like, time = stream.like, stream.time
            form = [*x.shape[:time], 0, *x.shape[time + 1 :]]
            if form != list(like.shape) or x.dtype != like.dtype or x.device != like.device:
                raise UserValueError(
                    f"x must be like the stream's first, {_form(like, time)}; got {_form(x, time)}.", "x"
                )
        for name, given in (("x", x), ("y", y)):
            if isinstance(given, Tensor) and given.is_floating_point() and not bool(torch.isfinite(given).all()):
                raise UserValueError(f"{name} must be finite; got NaN or infinity after {self.seen} steps.", name)
        self._driver.check()

    def _made_by(self) -> dict[str, Any]:
        """What must be the same where a state is loaded, by name."""
        layer = self._driver.layer
        options = {name: value for name, value in vars(layer.config).items() if name not in FREE}
        scorer = layer.config.scorer
        return {
            **options,
            "cell": layer.cell,
            "num_layers": layer.num_layers,
            "scorer": scorer if isinstance(scorer, str) else type(scorer).__name__,
            "optimizer": type(self.optimizer).__name__,
            "update_every": self.update_every,
            "weights": self.weights,
            "max_memory": self.max_memory,
            "parameters": {name: list(one.shape) for name, one in self.model.state_dict().items()},
        }

    def _checked(self, state: Any) -> Stream | None:
        """The stream of a state that may be loaded."""
        if not isinstance(state, dict) or not {"made_by", "model", "optimizer", "stream", "pieces"} <= state.keys():
            raise UserTypeError("state must be what Learner.state_dict returned; got something else.", "state")
        given = state["made_by"] if isinstance(state["made_by"], dict) else {}
        for name, value in self._made_by().items():
            other = given.get(name, getattr(SABConfig, name, None))  # a state from before an option existed
            if other != value:
                shown = f", {value!r}; got {other!r}"
                if name == "parameters":
                    shown = _difference(value, other)
                raise UserValueError(f"state must be that of a learner with the same {name}{shown}.", "state")
        try:
            stream = None if state["stream"] is None else Stream.from_dict(state["stream"])
            if stream is not None:
                self._check_stream(stream)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise UserValueError(
                f"state must be what Learner.state_dict returned; its stream is damaged: {_first_line(error)}.", "state"
            ) from error
        return stream

    def _check_stream(self, stream: Stream) -> None:
        """Refuse a stream whose parts do not fit together, or that is elsewhere."""
        layer, weight = self._driver.layer, self._driver.layer.weight_hh_l0
        shape = (layer.num_layers, *stream.h.shape[1:-1], layer.hidden_size)
        slots = self._horizon.next(stream.seen) - stream.number
        expected = [(stream.h, shape), (stream.microstates, (*shape[:-1], slots, shape[-1]))]
        expected += [(stream.keys, (*shape[:-1], slots, layer._key_size))]
        expected += [(chunk.h, shape) for chunk in stream.chunks]
        expected += [(part.c, shape) for part in (stream, *stream.chunks) if part.c is not None]
        for tensor, wanted in expected:
            if tensor.shape != wanted or tensor.dtype != weight.dtype or tensor.device != weight.device:
                form = f"{list(tensor.shape)}, {tensor.dtype}, on {tensor.device}"
                raise ValueError(f"{form} where {list(wanted)}, {weight.dtype}, on {weight.device} belongs")


def _path(path: Any) -> Path:
    if not isinstance(path, str | Path):
        raise UserTypeError(f"path must be a str or a pathlib.Path; got {type(path).__name__}.", "path")
    return Path(path)


def _plain(value: Any) -> Any:
    """A copy in which NumPy's numbers, as in a learning rate, are Python's."""
    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, dict):
        return type(value)((name, _plain(one)) for name, one in value.items())
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def _check_optimizer(optimizer: Any, model: nn.Module) -> torch.optim.Optimizer:
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        kind = type(optimizer).__name__
        raise UserTypeError(f"optimizer must be a torch.optim.Optimizer other than LBFGS; got {kind}.", "optimizer")
    own = {id(parameter) for parameter in model.parameters()}
    if any(id(one) not in own for group in optimizer.param_groups for one in group["params"]):
        raise UserValueError("optimizer must have parameters of the model alone; it has others.", "optimizer")
    return optimizer


def _by_step(seen: int, time: int, given: list[Tensor], gradients: Any) -> list[Credited]:
    """The steps after `seen` ones at whose inputs gradient arrived."""
    credited: list[Credited] = []
    for x, gradient in zip(given, gradients, strict=True):
        if gradient is not None:
            rows = gradient.movedim(time, 0).flatten(1)
            norms, has_gradient = torch.linalg.vector_norm(rows, dim=1).tolist(), rows.any(1).tolist()
            found = enumerate(zip(norms, has_gradient, strict=True), start=seen + 1)
            credited += [Credited(step, norm) for step, (norm, has) in found if has]
        seen += x.shape[time]
    return credited


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return one + other


def _copied(value: Any) -> Any:
    """A tensor of the learner's own, since the caller may change theirs."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _form(x: Tensor, time: int) -> str:
    sizes = ["T" if place == time else str(size) for place, size in enumerate(x.shape)]
    return f"[{', '.join(sizes)}] of {x.dtype} on {x.device}"


def _difference(own: dict[str, list[int]], given: Any) -> str:
    """The first parameter that a state has of another shape, and what to do if these are keys."""
    given = given if isinstance(given, dict) else {}
    name = next((name for name in own if given.get(name) != own[name]), None)
    if name is None or given.get(name) is None:
        return ""
    shape = given[name]
    is_key = "attn_w_memory" in name and isinstance(shape, list) and len(shape) == len(own[name]) == 2
    advice = f": make the layer with attention_size={shape[0]}" if is_key else ""
    return f"; its {name} has shape {shape} and not {own[name]}{advice}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")

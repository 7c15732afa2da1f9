"""Running a model whose layer's part is played by someone else, who hands the layer its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from sab.errors import UserTypeError, UserValueError
from sab.online.stream import Weights
from sab.state import SABHidden, SABState
from sab.tracing import find_layer

Advance = Callable[[Tensor, bool], tuple[Any, ...]]
"""What takes the place of a layer: maps its input, and whether attention is asked for, to what it gives."""
_RANDOM = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_COUNTING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class _Enough(BaseException):  # no error: torch.utils.checkpoint, too, ends in this way what it runs again
    """The layer has been run, and what the model does after it is not needed."""


class Driver:
    """A model, and the SAB layer in it."""

    def __init__(self, model: nn.Module):
        if hasattr(model, "_orig_mod"):
            raise UserTypeError("model must be given as it was before torch.compile; got what that made.", "model")
        self.layer = find_layer(model, "model", "learn from a stream")
        self.model = model

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that learn."""
        return {name: one for name, one in self.model.named_parameters() if one.requires_grad}

    def time(self, given: Tensor) -> int:
        """The dimension that counts the steps of the layer's input."""
        return 1 if given.dim() == 3 and self.layer.batch_first else 0

    def forward(self, given: Tensor, state: SABState, return_attention: bool = False) -> tuple[Any, ...]:
        """What the layer itself gives."""
        return type(self.layer).forward(self.layer, given, state, return_attention=return_attention)

    def call(self, x: Tensor, weights: Weights | None, advance: Advance) -> Any:
        """What the model gives for x with these weights, or its own, and with `advance` in the place of its layer."""
        calls = 0

        def forward(
            input: Any, hx: Any = None, *, lengths: Tensor | None = None, return_attention: bool = False
        ) -> tuple[Any, ...]:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise UserValueError("model must call its layer once for a piece; it does so more often.", "model")
            for name, given in (("hx", hx), ("lengths", lengths)):
                if given is not None:
                    raise UserValueError(f"model must call its layer without {name}; it gives one.", "model")
            if not isinstance(input, Tensor):
                kind = type(input).__name__
                raise UserTypeError(f"model must call its layer with a tensor; got a {kind}.", "model")
            return advance(input, return_attention)

        with _in_place_of(self.layer, forward):
            given = self.model(x) if weights is None else torch.func.functional_call(self.model, dict(weights), (x,))
        if calls == 0:
            raise UserValueError("model must call its layer once for a piece; it did not.", "model")
        return given

    def rerun(self, x: Tensor, weights: Weights | None, state: SABState, as_leaf: bool) -> tuple[Tensor, SABState]:
        """What the layer is given for x, made a leaf where that is asked for, and its state after that."""
        found: list[tuple[Tensor, SABState]] = []

        def advance(given: Tensor, _: bool) -> tuple[Any, ...]:
            given = leaf(given) if as_leaf else given
            found.append((given, state_of(self.forward(given, state)[1])))
            raise _Enough

        with suppress(_Enough):
            self.call(x, weights, advance)
        return found[0]

    def check(self) -> None:
        """Refuse a model that gives something else when it is run again."""
        steps = "in a stream, whose steps are run again; call model.eval()"
        for module in self.model.modules():
            if module.training and isinstance(module, _RANDOM) and module.p > 0:
                raise UserValueError(f"model must have no dropout {steps}.", "model")
            if module.training and isinstance(module, _COUNTING):
                raise UserValueError(f"model must have no batch norm that counts {steps}.", "model")
        layer = self.layer
        if layer.training and (layer.recurrent_dropout > 0 or (layer.dropout > 0 and layer.num_layers > 1)):
            raise UserValueError(f"model must have no dropout {steps}.", "model")


@contextmanager
def _in_place_of(layer: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Another forward in the place of a layer's."""
    before = vars(layer).get("forward")
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward
        if before is not None:
            layer.forward = before


def state_of(end: SABState | SABHidden) -> SABState:
    """The state that a layer gives, whatever its cell."""
    return end.state if isinstance(end, SABHidden) else end


def leaf(tensor: Tensor) -> Tensor:
    """The same numbers as the beginning of a graph."""
    return tensor.detach().requires_grad_()


def last(slots: Tensor, count: int) -> Tensor:
    """The last so many slots of [..., S, size]."""
    return slots.narrow(-2, slots.shape[-2] - count, count)

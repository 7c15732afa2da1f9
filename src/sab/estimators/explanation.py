"""What a prediction goes back to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
from numpy.typing import NDArray

from sab.tracing import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Credited(NamedTuple):
    """A step of a series, counted from 1, and its share of the credit of a prediction."""

    step: int
    share: float


@dataclass(frozen=True, eq=False)
class Explanation:
    """The credit of a prediction: how much of its gradient arrived at each step of the series."""

    prediction: Any
    """What was predicted, and is explained: a class, or a number."""
    shares: NDArray[Any]
    """The share of each step, [T]: the norm of the gradient of the network's output at the step's hidden state, as a
    part of the sum over all steps."""
    skip_shares: NDArray[Any]
    """The same for what came over skips alone: of the steps that later ones read as microstates, [T]. All 0 where
    nothing did."""
    trace: Trace
    """All that is known: what each step read, and the paths by which gradient came back."""

    @classmethod
    def of(cls, prediction: Any, trace: Trace) -> Explanation:
        credit = trace.credit
        return cls(prediction, _shares(credit.total.numpy()), _shares(credit.skip.numpy()), trace)

    def top(self, count: int = 5) -> list[Credited]:
        """The steps with the largest shares, largest first."""
        order = numpy.argsort(-self.shares, kind="stable")[:count]
        return [Credited(int(step) + 1, float(self.shares[step])) for step in order]

    def plot(self, *, ax: Axes | None = None, paths: int = 24) -> Figure:
        """Draw the largest paths and the credit of each step, as `sab.plot.credit_paths` does."""
        from sab.plot import credit_paths

        return credit_paths(self.trace, ax=ax, paths=paths)


def _shares(norms: NDArray[Any]) -> NDArray[Any]:
    whole = norms.sum(dtype=numpy.float64)
    return norms.astype(numpy.float64) / (whole if whole > 0 else 1.0)

"""The gradients of the operation's inputs, from what the backward loop leaves: each weight's is one matrix product."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor

from sab.ops import schedule
from sab.ops.arguments import Given, Parameters
from sab.ops.buffers import Buffers, Work
from sab.ops.plan import Plan
from sab.ops.precision import as_type, contiguous, product
from sab.parts.registry import CELLS, SCORERS


class Gradients:
    """The gradients, each by a method with the name of its input; `compute` is the type of products.

    dtype: of all but x's; None for the layer's.
    """

    def __init__(
        self,
        plan: Plan,
        given: Given,
        parameters: Parameters,
        buffers: Buffers,
        work: Work,
        dtype: torch.dtype | None = None,
    ):
        self.plan = plan
        self.given = given
        self.parameters = parameters
        self.buffers = buffers
        self.work = work
        self.compute = buffers.gates.dtype
        self.dtype = parameters.w_hh.dtype if dtype is None else dtype
        self.db_ih: Tensor | None = None
        self._begin()

    def _begin(self) -> None:
        """What is done for all of them at once."""

    @cached_property
    def first(self) -> int:
        """The first step that has read; the loops write nothing for those before."""
        return min(self.plan.first_read, self.plan.steps)

    @cached_property
    def h_read(self) -> Tensor:
        """The provisional hidden states of the steps that read."""
        return self.buffers.h_hat[self.first :] if self.first > 0 else self.buffers.h_hat  # a view takes time

    @cached_property
    def summary(self) -> Tensor:
        """What those steps read."""
        assert self.buffers.summary is not None
        return self.buffers.summary[self.first :]

    @cached_property
    def inputs(self) -> Tensor:
        """The input of the steps."""
        return contiguous(self.given.x)

    @cached_property
    def before(self) -> Tensor:
        """The hidden states that enter the steps."""
        first = self.plan.first_slots
        return self.buffers.store[first : first + self.plan.steps]

    @cached_property
    def kept(self) -> Tensor:
        """The microstates of this pass."""
        plan = self.plan
        first = schedule.kept_row(plan.first_slots, plan.seen, plan.first_slots, plan.config.k_att)
        return self.buffers.store[first :: plan.config.k_att]

    @cached_property
    def dgates_t(self) -> Tensor:
        return self.work.dgates.t()

    def of(self, names: Iterable[str]) -> list[Tensor]:
        """The gradients of the inputs of these names."""
        return [getattr(self, name)() for name in names]

    def x(self) -> Tensor:
        x = self.given.x
        return product(self.work.dgates, as_type(self.parameters.w_ih, self.compute), x.dtype).view(x.shape)

    def h(self) -> Tensor:
        return self._dstore()[self.plan.first_slots].to(self.dtype, copy=True)

    def c(self) -> Tensor:
        assert self.work.dc is not None
        return as_type(self.work.dc, self.dtype)

    def microstates(self) -> Tensor:
        first = self._dstore()[: self.plan.first_slots].transpose(0, 1)
        return first.clone(memory_format=torch.contiguous_format).to(self.dtype)

    def keys(self) -> Tensor:
        if self.work.dkeys is None:
            return self.buffers.store.new_zeros((self.plan.batch, 0, 0), dtype=self.dtype)
        first = self.work.dkeys[:, : self.plan.first_slots]
        return first.clone(memory_format=torch.contiguous_format).to(self.dtype)

    def w_ih(self) -> Tensor:
        return self._outer(self.dgates_t, self.inputs)

    def w_hh(self) -> Tensor:
        mask = self.parameters.h_mask
        before = self.before if mask is None else self.before * mask
        found = [self._outer(part.t(), before) for part in self._dhidden()]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-2)

    def b_ih(self) -> Tensor:
        self.db_ih = self._total(self.work.dgates if self.work.db_ih is None else self.work.db_ih)
        return self.db_ih

    def b_hh(self) -> Tensor:
        if CELLS[self.plan.cell].splits_gates:
            parts = self._dhidden() if self.work.db_hh is None else [self.work.db_hh]
            return torch.cat([self._total(part) for part in parts], dim=-1)
        return self.b_ih() if self.db_ih is None else self.db_ih.clone()

    def norm_ih(self) -> Tensor:
        return self._of_rows(self.work.dnorm_ih)

    def norm_hh(self) -> Tensor:
        return self._of_rows(self.work.dnorm_hh)

    def norm_c_weight(self) -> Tensor:
        return self._of_rows(self.work.dnorm_c_weight)

    def norm_c_bias(self) -> Tensor:
        return self._of_rows(self.work.dnorm_c_bias)

    def w_memory(self) -> Tensor:
        return self._of_scorer(self._rows(self._new_dkeys().transpose(0, 1)), self.kept)

    def w_query(self) -> Tensor:
        return self._of_scorer(self._dquery(), self.h_read)

    def scorer_bias(self) -> Tensor:
        bias = self.parameters.scorer_bias
        if not self.plan.is_affine or bias is None:
            return self._total(self._dquery())
        # It is indexed by a microstate's number.
        first = schedule.next_number(self.plan.seen, self.plan.config.k_att)
        by_number = self._of_rows(self._new_dkeys().sum(2))[..., : max(len(bias) - first, 0)]
        gradient = bias.new_zeros((*by_number.shape[:-1], len(bias)))
        gradient[..., first : first + by_number.shape[-1]] = by_number
        return gradient

    def v(self) -> Tensor:
        return self._of_rows(self.work.dv)

    def w_incorporate(self) -> Tensor:
        left_t = self._dincorporated().t()
        return torch.cat([self._outer(left_t, factor) for factor in (self.h_read, self.summary)], dim=-1)

    def b_incorporate(self) -> Tensor:
        return self._total(self._dincorporated())

    def _dhidden(self) -> list[Tensor]:
        """Of h_gates, in parts [T * B, p]."""
        dgates, dhidden = self.work.dgates, self.work.dhidden
        others = dgates.shape[1] - dhidden.shape[1]
        return [dhidden] if others == 0 else [dgates[:, :others], dhidden]

    def _dstore(self) -> Tensor:
        assert self.work.dstore is not None
        return self.work.dstore

    def _new_dkeys(self) -> Tensor:
        """Of the keys of this pass, [B, S - F, d]."""
        dkeys, first = self.work.dkeys, self.plan.first_slots
        assert dkeys is not None
        return dkeys[:, first:] if first > 0 else dkeys

    def _dquery(self) -> Tensor:
        """Of the steps that read, [steps * B, d]."""
        dquery = self.work.dquery
        assert dquery is not None
        return dquery[self.first * self.plan.batch :] if self.first > 0 else dquery

    def _dincorporated(self) -> Tensor:
        """Of the steps that read, [steps * B, n]."""
        assert self.work.dincorporated is not None
        return self.work.dincorporated[self.first * self.plan.batch :]

    def _of_scorer(self, left: Tensor, states: Tensor) -> Tensor:
        gradient = self._outer(left.t(), SCORERS[str(self.plan.config.scorer)].mark(states))
        return gradient.squeeze(-2) if self.plan.is_affine else gradient

    def _outer(self, left_t: Tensor, right: Tensor) -> Tensor:
        """Sum over steps and rows of the outer products: [p, T * B] of the compute type and [T, B, q] to [p, q]."""
        rows = self._rows(right)
        if rows.is_cuda or len(left_t) <= rows.shape[1]:
            return product(left_t, rows, self.dtype)
        # MKL takes up to ten times as long where the narrower factor is the right one, as with few inputs.
        return product(rows.t(), left_t.t(), self.dtype).t().contiguous()

    def _rows(self, tensor: Tensor) -> Tensor:
        """[T, B, p] as [T * B, p] of the compute type, with at most one copy."""
        if tensor.dtype != self.compute:
            tensor = tensor.to(self.compute, memory_format=torch.contiguous_format)
        return tensor.flatten(0, 1)

    def _of_rows(self, gradient: Tensor | None) -> Tensor:
        """The sum of what each row brings, [B, p] to [p]."""
        assert gradient is not None
        return as_type(gradient.sum(0), self.dtype)

    def _total(self, gradient: Tensor) -> Tensor:
        """Sum over steps and rows, in the state type.

        Over steps first: CUDA sums a few columns of many rows in parts, which take more memory than the rows.
        """
        batch, dtype = self.plan.batch, self.buffers.store.dtype
        steps = len(gradient) // max(batch, 1)
        return as_type(gradient.unflatten(0, (steps, batch)).sum(0, dtype=dtype).sum(0), self.dtype)


class SampleGradients(Gradients):
    """The same where rows belong to samples, one after another, each with gradients of the parameters of its own.

    The gradients of parameters have one more dimension, the first; those of other inputs are the same.
    """

    def __init__(self, plan: Plan, given: Given, parameters: Parameters, buffers: Buffers, work: Work, samples: int):
        super().__init__(plan, given, parameters, buffers, work)
        self.samples = samples

    def _outer(self, left_t: Tensor, right: Tensor) -> Tensor:
        wide = torch.promote_types(self.compute, self.dtype)  # sums are not rounded to the compute type
        left, right = (as_type(self._apart(tensor), wide) for tensor in (left_t.t(), self._rows(right)))
        return as_type(left.transpose(1, 2) @ right, self.dtype)

    def _total(self, gradient: Tensor) -> Tensor:
        return as_type(self._apart(gradient).sum(1, dtype=self.buffers.store.dtype), self.dtype)

    def _of_rows(self, gradient: Tensor | None) -> Tensor:
        assert gradient is not None
        return as_type(gradient.unflatten(0, (self.samples, -1)).sum(1), self.dtype)

    def _apart(self, gradient: Tensor) -> Tensor:
        """[T * B, p] as [samples, T * (B / samples), p]."""
        batch, samples = self.plan.batch, self.samples
        sizes = len(gradient) // batch, samples, batch // samples  # there may be no step
        return gradient.unflatten(0, sizes).transpose(0, 1).flatten(1, 2)

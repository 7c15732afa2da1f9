"""Online credit assignment: gradients of a recurrent layer that are carried forward in time, not sent back.

The paper's related work, each method after its own paper:

- `rtrl`: real-time recurrent learning, exact (Williams and Zipser, 1989). For tests and tiny layers.
- `uoro`: an unbiased rank-one estimate of it (Tallec and Ollivier, 2017, arXiv 1702.05043).
- `nobacktrack`: the same with a sign for each unit (Ollivier, Tallec and Charpiat, 2015, arXiv 1507.07680).
- `snap1`: the entries that a step touches directly, the others are taken as 0 (Menick et al., 2020, arXiv 2006.07232).
- `dni`: decoupled neural interfaces: backpropagation in windows, at whose end a learned module says what gradient
  would come from later (Jaderberg et al., 2016, arXiv 1608.05343).

A layer's weights are constant during a sequence, so the estimate does not depend on when it is computed. The losses of
a task are known once all outputs are. So the layer runs over the sequence first; its backward pass then goes through
the steps *in order*, with the influence of the weights on the state as the only thing carried from step to step. The
numbers are those of an online learner that changes its weights at the end of a sequence; the memory is not, since the
states of the sequence are kept until its losses are known.

Shapes: T steps, B rows, C parts of a state (h, and c where the cell has one), G gates, n units. A row's gradient of all
parameters is one tensor [B, G, n, F], whose last dimension is that of the input and 1 (for `weight_ih` and `bias_ih`),
then that of h and 1 (for `weight_hh` and `bias_hh`): a unit's own weights alone change its next state directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sab.parts.cells import Cell
from sab.parts.registry import CELLS

TINY = 1e-7
"""What keeps the scales of the rank-one estimates above 0."""
Synthesiser = Callable[[Tensor], Tensor]
"""From states [B, C, n] to the gradients that later losses have for them, times B."""


class Steps:
    """A sequence that a cell went through, and the derivatives of its steps."""

    def __init__(self, cell: Cell, weight_hh: Tensor, x: Tensor, states: Tensor, x_gates: Tensor, h_gates: Tensor):
        """`x` [T, B, d]; `states` [T + 1, B, C, n], the initial one first; the gates' two sums [T, B, G·n]."""
        parts, n = states.shape[2:]
        self.states = states
        self.count, self.rows = x.shape[:2]
        self._weight = weight_hh.unflatten(0, (cell.gates, n))
        one = x.new_ones(*x.shape[:2], 1)
        self._x, self._h = torch.cat([x, one], -1), torch.cat([states[:-1, :, 0], one], -1)
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in (x_gates, h_gates, states[:-1])]
            after = step(cell, inputs[0], inputs[1], inputs[2])
            # Units do not mix here: the derivatives of the sum over units are those of each unit.
            sums = [after[:, :, part].sum() for part in range(parts)]
            found = [torch.autograd.grad(one, inputs, retain_graph=True, materialize_grads=True) for one in sums]
        by_x, by_h, by_state = (torch.stack(each, dim=2) for each in zip(*found, strict=True))
        self._by_x, self._by_h = (each.unflatten(-1, (cell.gates, n)) for each in (by_x, by_h))  # [T, B, C, G, n]
        self._by_state = by_state  # [T, B, C, C, n]: what does not pass through h_gates

    def carry(self, t: int, change: Tensor) -> Tensor:
        """The change of the state after step t that a change [B, C, n, ...] of the state before it makes."""
        through = torch.einsum("gij,bj...->bgi...", self._weight, change[:, 0])
        direct = torch.einsum("bcki,bki...->bci...", self._by_state[t], change)
        return torch.einsum("bcgi,bgi...->bci...", self._by_h[t], through) + direct

    def carry_back(self, t: int, gradient: Tensor) -> Tensor:
        """The gradient of the state before step t, from that of the state after it [B, C, n]."""
        of_gates = torch.einsum("bcgi,bci->bgi", self._by_h[t], gradient)
        before = torch.einsum("bcki,bci->bki", self._by_state[t], gradient)
        before[:, 0] += torch.einsum("gij,bgi->bj", self._weight, of_gates)
        return before

    def own(self, t: int) -> Tensor:
        """What a unit's state before step t does to its own state after it, [B, C, C, n]."""
        found = self._by_state[t].clone()
        found[:, :, 0] += torch.einsum("bcgi,gii->bci", self._by_h[t], self._weight)
        return found

    def direct(self, t: int) -> Tensor:
        """The derivatives of each unit's state after step t by its own weights, at this step alone: [B, C, G, n, F]."""
        parts = ((self._by_x, self._x), (self._by_h, self._h))
        return torch.cat([by[t].unsqueeze(-1) * values[t][:, None, None, None] for by, values in parts], -1)

    def weights(self, t: int, gradient: Tensor) -> Tensor:
        """The gradient of the weights at step t alone, from that of the state after it [B, C, n]: [B, G, n, F]."""
        parts = ((self._by_x, self._x), (self._by_h, self._h))
        of_gates = [((gradient.unsqueeze(2) * by[t]).sum(1), values[t]) for by, values in parts]
        return torch.cat([one.unsqueeze(-1) * values[:, None, None] for one, values in of_gates], -1)

    def direct_norms(self, t: int) -> Tensor:
        """The norms of `direct` over the weights, [B, C, n]."""
        squares = 0.0
        for by, values in ((self._by_x, self._x), (self._by_h, self._h)):
            squares = squares + by[t].square().sum(2) * values[t].square().sum(-1)[:, None, None]
        return torch.as_tensor(squares).sqrt()

    def of_hidden(self, gradient: Tensor) -> Tensor:
        """The gradient of h [B, n] as one of the state [B, C, n]."""
        return torch.cat([gradient.unsqueeze(1), torch.zeros_like(self.states[0, :, 1:])], 1)


def step(cell: Cell, x_gates: Tensor, h_gates: Tensor, state: Tensor) -> Tensor:
    """The next state [..., C, n]."""
    h, c = cell.step(x_gates, h_gates, state[..., 0, :], state[..., 1, :] if cell.has_c else None)
    return torch.stack([h] if c is None else [h, c], dim=-2)


Carried = tuple[Tensor, ...]
"""What a method carries from step to step."""
Credit = Callable[[Steps, Tensor, Carried | None], tuple[Tensor, Carried]]
"""Maps steps, the gradients of their hidden states [T, B, n] and what the steps before them carried (None: the steps
are the first) to each row's gradient of the weights [B, G, n, F] and what is carried on."""


def rtrl(steps: Steps, gradients: Tensor, carried: Carried | None = None) -> tuple[Tensor, Carried]:
    """The exact gradient: the influence of every weight on every state, [B, C, n, G, n, F]."""
    first = steps.direct(0)
    none = first.new_zeros(*first.shape[:2], first.shape[3], *first.shape[2:])
    (influence,) = (none,) if carried is None else carried
    total = torch.zeros_like(first[:, 0])
    for t in range(steps.count):
        influence = steps.carry(t, influence)
        influence.diagonal(0, 2, 4).add_(steps.direct(t).movedim(3, -1))
        total += torch.einsum("bi,bigjf->bgjf", gradients[t], influence[:, 0])
    return total, (influence,)


def snap1(steps: Steps, gradients: Tensor, carried: Carried | None = None) -> tuple[Tensor, Carried]:
    """The influence of a weight on its own unit alone, [B, C, G, n, F]."""
    (influence,) = (torch.zeros_like(steps.direct(0)),) if carried is None else carried
    total = torch.zeros_like(influence[:, 0])
    for t in range(steps.count):
        influence = torch.einsum("bcki,bkgif->bcgif", steps.own(t), influence) + steps.direct(t)
        total += gradients[t][:, None, :, None] * influence[:, 0]
    return total, (influence,)


def uoro(steps: Steps, gradients: Tensor, carried: Carried | None = None) -> tuple[Tensor, Carried]:
    """The influence as an outer product of a state and of weights, whose expectation is the influence.

    Each step adds its own, multiplied from both sides by one vector of random signs; scales of both factors keep the
    variance low.
    """
    state, weights = _nothing(steps) if carried is None else carried
    total = torch.zeros_like(weights)
    for t in range(steps.count):
        signs = random_signs(state)
        moved, added = steps.carry(t, state), steps.weights(t, signs)
        old, new = _scale(_norm(weights), _norm(moved)), _scale(_norm(added), _norm(signs))
        state = _times(old, moved) + _times(new, signs)
        weights = _times(1 / old, weights) + _times(1 / new, added)
        total += _times((gradients[t] * state[:, 0]).sum(-1), weights)
    return total, (state, weights)


def nobacktrack(steps: Steps, gradients: Tensor, carried: Carried | None = None) -> tuple[Tensor, Carried]:
    """As `uoro`, with a sign and a scale for each part of the state, and a sign for what is carried."""
    state, weights = _nothing(steps) if carried is None else carried
    total = torch.zeros_like(weights)
    for t in range(steps.count):
        signs, kept = random_signs(state), random_signs(state[:, 0, 0])
        moved = steps.carry(t, state)
        old, new = _scale(_norm(weights), _norm(moved)), _scale(steps.direct_norms(t), torch.ones_like(signs))
        state = _times(kept * old, moved) + new * signs
        weights = _times(kept / old, weights) + steps.weights(t, signs / new)
        total += _times((gradients[t] * state[:, 0]).sum(-1), weights)
    return total, (state, weights)


def _nothing(steps: Steps) -> Carried:
    """The two factors of an influence of 0."""
    state = torch.zeros_like(steps.states[0])
    return state, torch.zeros_like(steps.weights(0, state))


def random_signs(like: Tensor) -> Tensor:
    """Signs of torch's random numbers, in the shape of a tensor."""
    return torch.randint_like(like, 2).mul_(2).sub_(1)


def _norm(tensor: Tensor) -> Tensor:
    """The norm of each row, [B]."""
    return tensor.flatten(1).norm(dim=1)


def _scale(of_weights: Tensor, of_state: Tensor) -> Tensor:
    """The factor that makes two factors of an outer product equally large, and never 0."""
    return (of_weights / (of_state + TINY)).sqrt() + TINY


def _times(factors: Tensor, tensor: Tensor) -> Tensor:
    """A tensor [B, ...] with each row multiplied by its factor [B]."""
    return factors.view(-1, *[1] * (tensor.dim() - 1)) * tensor


CREDITS: dict[str, Credit] = {"rtrl": rtrl, "uoro": uoro, "nobacktrack": nobacktrack, "snap1": snap1}


def dni(steps: Steps, gradients: Tensor, window: int, synthesiser: Synthesiser) -> tuple[Tensor, Tensor, Tensor]:
    """Backpropagation in windows that end with the synthesiser's gradient.

    Returns each row's gradient of the weights, and what the synthesiser is to learn: the states between windows
    [W, B, C, n], and the gradients [W, B, C, n], times B, that the window after each of them found.
    """
    gradient = torch.zeros_like(steps.states[0])  # nothing comes after the last step
    total = torch.zeros_like(steps.weights(0, gradient))
    states: list[Tensor] = []
    found: list[Tensor] = []
    for t in reversed(range(steps.count)):
        gradient = gradient + steps.of_hidden(gradients[t])
        total += steps.weights(t, gradient)
        gradient = steps.carry_back(t, gradient)
        if t % window == 0 and t > 0:
            states.append(steps.states[t])
            found.append(steps.rows * gradient)
            gradient = synthesiser(steps.states[t]) / steps.rows
    none = steps.states[:0]
    return total, torch.stack(states) if states else none, torch.stack(found) if found else none


class OnlineLayer(nn.Module):
    """A recurrent layer, as `torch.nn`'s in outputs, states and start, that gets its gradients by a method above.

    Gradients go neither to the inputs nor to the initial state.
    """

    def __init__(self, method: str, cell: str, input_size: int, hidden_size: int, window: int | None):
        """`window` is the length of the windows of `dni`; None makes a sequence one window."""
        super().__init__()
        self.method, self.window = method, window
        self._cell = CELLS[cell]
        rows, bound = self._cell.gates * hidden_size, hidden_size**-0.5

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape).uniform_(-bound, bound))

        self.weight_ih_l0, self.weight_hh_l0 = parameter(rows, input_size), parameter(rows, hidden_size)
        self.bias_ih_l0, self.bias_hh_l0 = parameter(rows), parameter(rows)
        self.synthesiser = _Synthesiser(1 + self._cell.has_c, hidden_size) if method == "dni" else None

    def forward(self, x: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        """As `torch.nn`'s layers, for x [T, B, d]."""
        if hx is None:
            state = x.new_zeros(x.shape[1], 1 + self._cell.has_c, self.weight_hh_l0.shape[1])
        else:
            state = torch.stack([part[0] for part in (hx if self._cell.has_c else (hx,))], 1)
        with torch.autocast(x.device.type, enabled=False):  # the estimates need the weights' own precision
            run: Any = _Run.apply
            hidden, end = run(self, x.detach(), state.detach(), *self.parameters())
        ends = tuple(part.unsqueeze(0) for part in end.unbind(1))
        return hidden, ends if self._cell.has_c else ends[0]

    def run(self, x: Tensor, state: Tensor) -> Tensor:
        """The states [T + 1, B, C, n]."""
        x_gates = nn.functional.linear(x, self.weight_ih_l0, self.bias_ih_l0)
        states = [state]
        for t in range(len(x)):
            state = step(self._cell, x_gates[t], self._h_gates(state[:, 0]), state)
            states.append(state)
        return torch.stack(states)

    def _h_gates(self, h: Tensor) -> Tensor:
        return nn.functional.linear(h, self.weight_hh_l0, self.bias_hh_l0)

    def steps(self, x: Tensor, states: Tensor) -> Steps:
        """The derivatives of the steps of `run`."""
        x_gates = nn.functional.linear(x, self.weight_ih_l0, self.bias_ih_l0)
        return Steps(self._cell, self.weight_hh_l0, x, states, x_gates, self._h_gates(states[:-1, :, 0]))

    def gradients(self, x: Tensor, states: Tensor, of_hidden: Tensor) -> Sequence[Tensor]:
        """The gradients of all parameters in their order, from those of the hidden states [T, B, n]."""
        steps = self.steps(x, states)
        if self.synthesiser is None:
            (total, _), learned = CREDITS[self.method](steps, of_hidden, None), ()
        else:
            window = steps.count if self.window is None else self.window
            total, seen, found = dni(steps, of_hidden, window, self.synthesiser)
            learned = self.synthesiser.gradients(seen, found)
        return *self.by_parameter(total), *learned

    def by_parameter(self, total: Tensor) -> Sequence[Tensor]:
        """The rows' gradients of the weights [B, G, n, F], summed, as those of `weight_ih_l0`, `weight_hh_l0`,
        `bias_ih_l0` and `bias_hh_l0`."""
        total = total.sum(0).flatten(0, 1)
        d, n = self.weight_ih_l0.shape[1], self.weight_hh_l0.shape[1]
        of_weight_ih, of_bias_ih, of_weight_hh, of_bias_hh = total.split([d, 1, n, 1], -1)
        return of_weight_ih, of_weight_hh, of_bias_ih.squeeze(-1), of_bias_hh.squeeze(-1)


class _Synthesiser(nn.Module):
    """The gradient of a state, by one hidden layer; its last weights start at 0, so that `dni` starts as truncated
    backpropagation."""

    def __init__(self, parts: int, hidden_size: int):
        super().__init__()
        self.hidden = nn.Linear(parts * hidden_size, parts * hidden_size)
        self.out = nn.Linear(parts * hidden_size, parts * hidden_size)
        for parameter in self.out.parameters():
            nn.init.zeros_(parameter)

    def forward(self, states: Tensor) -> Tensor:
        return self.out(torch.relu(self.hidden(states.flatten(-2)))).view_as(states)

    def gradients(self, states: Tensor, found: Tensor) -> Sequence[Tensor]:
        """The gradients of its parameters by the mean squared error of its answers."""
        if len(states) == 0:
            return [torch.zeros_like(parameter) for parameter in self.parameters()]
        with torch.enable_grad():
            error = (self(states.detach()) - found.detach()).square().mean()
            return torch.autograd.grad(error, list(self.parameters()))


class _Run(torch.autograd.Function):
    """A layer's run, whose backward pass is the layer's `gradients`."""

    @staticmethod
    def forward(ctx: Any, layer: OnlineLayer, x: Tensor, state: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        states = layer.run(x, state)
        ctx.layer = layer
        ctx.save_for_backward(x, states)
        end = states[-1].clone()
        ctx.mark_non_differentiable(end)
        return states[1:, :, 0].contiguous(), end

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, states = ctx.saved_tensors
        return None, None, None, *ctx.layer.gradients(x, states, of_outputs[0])

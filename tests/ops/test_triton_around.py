"""What comes before and after the loops of the Triton backend: many copies in one launch, and what is made of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from sab.config import SABConfig
from sab.ops import arguments
from sab.ops.gradients import Gradients
from sab.ops.triton import around, copies, large
from sab.parts.registry import CELLS
from tests.ops.cases import randn
from tests.ops.test_triton_large import buffers_of, copied, plan_of, run_on_cpu

pytestmark = pytest.mark.skipif(
    not large.INTERPRETED, reason="TRITON_INTERPRET=1 must be set before triton is imported"
)


@st.composite
def a_copy(draw: st.DrawFn) -> tuple[tuple[int, int], tuple[int, int] | None, str]:
    """The target's and the source's shape, and how the source lies."""
    rows, columns = draw(st.integers(1, 90)), draw(st.integers(1, 90))
    source = (draw(st.integers(1, rows)), draw(st.integers(1, columns)))
    return (rows, columns), draw(st.none() | st.just(source)), draw(st.sampled_from(["whole", "transposed", "part"]))


def source_of(shape: tuple[int, int] | None, lies: str, seed: int) -> Tensor | None:
    if shape is None:
        return None
    rows, columns = shape
    if lies == "transposed":
        return randn(columns, rows, seed=seed).float().t()
    if lies == "part":  # every third row, some columns
        return randn(3 * rows, columns + 5, seed=seed).float()[::3, 2 : 2 + columns]
    return randn(rows, columns, seed=seed).float()


@given(st.lists(a_copy(), min_size=0, max_size=2 * copies.MOST))
def test_copies_are_what_they_were_made_of_and_zeros_beyond(asked: Any) -> None:
    made: list[tuple[Tensor, Tensor | None]] = []
    around_them: list[Tensor] = []
    for seed, ((rows, columns), source, lies) in enumerate(asked):
        around_them.append(torch.full((rows + 1, columns + 3), torch.nan))
        made.append((around_them[-1][:rows, :columns], source_of(source, lies, seed)))
    copies.copy_all(made)
    for (target, source), whole in zip(made, around_them, strict=True):
        expected = torch.zeros_like(target)
        if source is not None:
            expected[: len(source), : source.shape[1]] = source
        assert torch.equal(target, expected)
        assert whole[len(target) :].isnan().all()
        assert whole[:, target.shape[1] :].isnan().all()


def test_copies_are_of_the_targets_type_and_rounded_where_asked() -> None:
    source = randn(70, 65).float()
    half, whole, counter = source.new_empty(70, 65, dtype=torch.float16), source.new_empty(70, 65), torch.ones(1, 1)
    copies.copy_all([(half, source), (whole, source), (counter, None)], rounds=True)
    torch.testing.assert_close(half, source.half(), rtol=1e-3, atol=1e-6)
    assert torch.equal(whole, ((source.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32))
    assert counter.item() == 0


def parameters_of(**given: Tensor | None) -> arguments.Parameters:
    """The parameters of these names; None for the others."""
    return arguments.Parameters._make(map(given.get, arguments.Parameters._fields))


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("compute", [torch.float32, torch.float16])
def test_the_inputs_part_of_the_gates(cell: str, compute: torch.dtype) -> None:
    gates = 4 if cell == "lstm" else 3
    shapes = (5, 3, 7), (gates * 6, 7), (gates * 6,), (gates * 6,)
    x, w_ih, b_ih, b_hh = (randn(*shape, seed=seed).float() for seed, shape in enumerate(shapes))
    parameters = parameters_of(w_ih=w_ih, b_ih=b_ih, b_hh=b_hh)
    options: Any = SimpleNamespace(cell=cell, compute=compute)
    found = around.input_gates(arguments.Given(x, None), parameters, options)
    expected = x @ w_ih.t() + b_ih + (b_hh if cell == "lstm" else 0)
    assert found.dtype == compute
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("cell", "config", "first"),
    [
        ("lstm", SABConfig(3, 2, 4), 2),
        ("gru", SABConfig(3, 2, 4), 0),
        ("rnn_tanh", SABConfig(2, 1, None, "dot", incorporate="add"), 1),
        ("lstm", SABConfig(2, 1, 3, "affine", incorporate="concat"), 0),
        ("gru", SABConfig(2, 9, 3), 0),  # nothing is ever read
        ("lstm", SABConfig(0), 0),
    ],
)
def test_gradients_of_converted_factors(cell: str, config: SABConfig, first: int) -> None:
    """What is converted in few launches gives the gradients of what is converted one by one."""
    plan = plan_of(cell, 17, 8, 3, 4, first, 0, config)
    weights, buffers, work = buffers_of(plan, None)
    halves = dict.fromkeys("gates hidden_new keys mapped dgates dhidden dquery dincorporated".split(), torch.float16)
    work = run_on_cpu(plan, weights, buffers, work)
    own_buffers, own_work = (copied(tensors, others=torch.float32, **halves) for tensors in (buffers, work))
    flat = {name: getattr(own_work, name) for name in ("dgates", "dhidden", "dquery", "dincorporated")}
    own_work = own_work._replace(**{name: one.flatten(0, 1) for name, one in flat.items() if one is not None})
    single = {name: None if one is None else one.float() for name, one in weights._asdict().items()}
    x, w_ih = randn(4, 3, 5).float(), randn(CELLS[cell].gates * 17, 5).float()
    parameters = parameters_of(w_ih=w_ih, **single)
    names = [name for name in around.NAMES if getattr(parameters, name) is not None]
    args: Any = (plan, arguments.Given(x, None), parameters, own_buffers, own_work)
    expected, found = Gradients(*args).of(names), around.ConvertedGradients(*args).of(names)
    for name, one, other in zip(names, expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-2, atol=1e-2 * float(one.abs().max()) + 1e-6, msg=name)

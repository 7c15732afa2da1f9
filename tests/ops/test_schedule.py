"""The schedule is what a walk over the steps finds, for numbers and for tensors."""

from __future__ import annotations

import ast
import inspect

import pytest
import torch

from sab.config import SABConfig
from sab.ops import schedule
from sab.ops.plan import Plan

FUNCTIONS = [one for _, one in inspect.getmembers(schedule, inspect.isfunction)]


@pytest.mark.parametrize("k_att", [1, 2, 3, 7])
@pytest.mark.parametrize("first_seen", [0, 1, 2, 5, 14])
@pytest.mark.parametrize("first_slots", [0, 2])
def test_it_is_what_a_walk_over_the_steps_finds(k_att: int, first_seen: int, first_slots: int) -> None:
    plan = Plan("lstm", SABConfig(3, k_att, 4), first_seen, 20, 1, 2, 1, first_slots, 0)
    slots, number = first_slots, sum(1 for step in range(1, first_seen + 1) if step % k_att == 0)
    first_kept = None
    for t in range(20):
        seen, step = first_seen + t, first_seen + t + 1
        assert schedule.slots_at(seen, first_seen, first_slots, k_att) == plan.slots_at(t) == slots
        assert schedule.next_number(seen, k_att) == number
        assert schedule.keeps(seen, k_att) == plan.keeps(t) == (step % k_att == 0)
        assert schedule.cuts(seen, 4) == plan.cut_before(t) == (step > 1 and (step - 1) % 4 == 0)
        if step % k_att == 0:
            first_kept = t if first_kept is None else first_kept
            assert schedule.kept_row(slots, first_seen, first_slots, k_att) == first_slots + 1 + t
            assert schedule.kept_at(number, k_att) == step
            slots, number = slots + 1, number + 1
    assert schedule.first_kept(first_seen, k_att) == plan.first_kept == first_kept


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_tensors_give_what_numbers_give(function) -> None:
    count = len(inspect.signature(function).parameters)
    numbers = [[*[7 + 3 * row, 5, 2][: count - 1], 3] for row in range(6)]
    found = function(*(torch.tensor(column) for column in zip(*numbers, strict=True)))
    assert found.tolist() == [function(*row) for row in numbers]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_triton_can_compile_it(function) -> None:
    """One expression without a branch, a call, a global name or an annotation."""
    definition = ast.parse(inspect.getsource(function)).body[0]
    assert isinstance(definition, ast.FunctionDef)
    assert isinstance(definition.body[-1], ast.Return)
    assert len(definition.body) == 2  # after the docstring
    assert function.__annotations__ == {}
    for node in ast.walk(definition.body[-1]):
        assert not isinstance(node, ast.Call | ast.IfExp | ast.BoolOp)
        assert not isinstance(node, ast.Name) or node.id in inspect.signature(function).parameters

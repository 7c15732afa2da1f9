"""Rows of different lengths, and the other forms that a batch may come in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from hypothesis import assume, given
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.comparing import selects_surely
from tests.ops.cases import BACKENDS, BOUNDS, Case, assert_close, cases, gradients, make_layer, randn, randomize, run


@given(cases(max_steps=7, max_memory=BOUNDS))
def test_lengths_equal_running_each_row_alone(case: Case) -> None:
    layer, lengths = case.layer(), torch.tensor(case.lengths)
    x = case.x().requires_grad_()
    leaves = [x, *layer.parameters()]
    assume(selects_surely(layer, x, lengths=lengths))
    output, state, attention = run(layer, x, lengths=lengths, return_attention=True)
    rows = []
    for row, length in enumerate(case.lengths):
        alone, alone_state, alone_attention = run(layer, x[:length, row], return_attention=True)
        rows.append(torch.cat([alone, alone.new_zeros(case.steps - length, alone.shape[-1])]))
        for one, other in zip(state, alone_state, strict=True):
            assert_close(one[:, row], other, "final state of the last real step")
        assert torch.equal(attention.numbers[..., :length, row, :], alone_attention.numbers)
        assert_close(attention.weights[..., :length, row, :], alone_attention.weights)
        assert_close(attention.summary[..., :length, row, :], alone_attention.summary)
        assert (attention.numbers[..., length:, row, :] == -1).all()
        assert not attention.weights[..., length:, row, :].any()
        assert not attention.summary[..., length:, row, :].any()
        assert int(state.steps[row]) == length
        kept = length // case.options["k_att"] if case.options["k_top"] else 0
        kept = min(kept, case.options["max_memory"] or kept)
        assert (state.numbers[:, row] >= 0).sum(-1).tolist() == [kept] * len(state.h)
    expected = torch.stack(rows, dim=1)
    assert_close(output, expected)
    for one, other in zip(gradients([output], leaves), gradients([expected], leaves), strict=True):
        assert_close(one, other, "gradient")


@given(cases(max_steps=7, max_batch=3))
def test_padding_is_never_read(case: Case) -> None:
    """NaN in the padding changes neither outputs nor gradients, and gets the gradient 0."""
    layer, lengths = case.layer(), torch.tensor(case.lengths)
    x = case.x()
    padding = torch.arange(case.steps)[:, None] >= lengths
    poisoned = x.masked_fill(padding[..., None], torch.nan).requires_grad_()
    x = x.requires_grad_()
    output, state, attention = run(layer, x, lengths=lengths, return_attention=True)
    output_2, state_2, attention_2 = run(layer, poisoned, lengths=lengths, return_attention=True)
    assert torch.equal(output_2, output)
    assert torch.equal(attention_2.weights, attention.weights)
    for one, other in zip((*state, state.microstates), (*state_2, state_2.microstates), strict=True):
        assert torch.equal(one, other)
    wanted = gradients([output, state.h, state.microstates], [x, *layer.parameters()])
    got = gradients([output_2, state_2.h, state_2.microstates], [poisoned, *layer.parameters()])
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()
    assert not got[0][padding].any()


@pytest.mark.parametrize("enforce_sorted", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_packed_equals_lengths(bidirectional: bool, batch_first: bool, enforce_sorted: bool) -> None:
    layer = make_layer("lstm", 3, 4, 2, bidirectional=bidirectional, batch_first=batch_first, k_top=2)
    randomize(layer)
    lengths = torch.tensor([7, 5, 5, 1] if enforce_sorted else [5, 1, 7, 5])
    x = randn(4, 7, 3) if batch_first else randn(7, 4, 3)
    assert selects_surely(layer, x, lengths=lengths)
    output, state, attention = run(layer, x, lengths=lengths, return_attention=True)
    packed = pack_padded_sequence(x, lengths, batch_first, enforce_sorted)
    packed_output, packed_state, packed_attention = run(layer, packed, return_attention=True)
    unpacked, unpacked_lengths = pad_packed_sequence(packed_output, batch_first)
    assert_close(unpacked, output)
    assert torch.equal(unpacked_lengths, lengths)
    assert_close(packed_state.h, state.h)
    assert torch.equal(packed_state.steps, lengths)
    for one, other in zip(packed_attention, attention, strict=True):
        assert_close(one, other)
    again, _ = layer(packed, packed_state)
    assert selects_surely(layer, x, state, lengths=lengths)
    assert_close(pad_packed_sequence(again, batch_first)[0], layer(x, state, lengths=lengths)[0])


def test_lengths_may_be_a_list_or_any_whole_numbers() -> None:
    layer, x = make_layer("gru", 3, 4), randn(5, 2, 3)
    expected = layer(x, lengths=torch.tensor([5, 2]))[0]
    for lengths in ([5, 2], (5, 2), np.array([5, 2]), torch.tensor([5, 2], dtype=torch.uint8)):
        assert torch.equal(layer(x, lengths=lengths)[0], expected)


@given(cases(max_steps=6))
def test_batch_first_is_a_transpose(case: Case) -> None:
    time_first = case.layer()
    case.options["batch_first"] = True
    batch_first, x, lengths = case.layer(), case.x(), torch.tensor(case.lengths)
    assume(selects_surely(time_first, x, lengths=lengths))
    output, state, attention = run(time_first, x, lengths=lengths, return_attention=True)
    output_2, state_2, attention_2 = run(batch_first, x.transpose(0, 1), lengths=lengths, return_attention=True)
    assert_close(output_2.transpose(0, 1), output)
    assert_close(state_2.h, state.h)
    assert_close(state_2.microstates, state.microstates)
    assert torch.equal(attention_2.numbers.transpose(-3, -2), attention.numbers)
    assert_close(attention_2.summary.transpose(-3, -2), attention.summary)


@given(cases(ragged=False, max_batch=1, bidirectional=False))
def test_unbatched_is_a_batch_of_one(case: Case) -> None:
    layer, x = case.layer(), case.x()
    output, state, attention = run(layer, x, return_attention=True)
    assume(selects_surely(layer, x) and selects_surely(layer, x, state))
    output_2, state_2, attention_2 = run(layer, x[:, 0], return_attention=True)
    assert_close(output_2, output[:, 0])
    assert_close(state_2.h, state.h[:, 0])
    assert torch.equal(attention_2.numbers, attention.numbers[..., 0, :])
    assert_close(layer(x[:, 0], state_2)[0], layer(x, state)[0][:, 0])
    assert int(state_2.steps) == case.steps


def test_shapes_of_the_attention() -> None:
    layer = make_layer("lstm", 3, 4, k_top=5)
    output, _, attention = layer(randn(7, 2, 3), return_attention=True)
    assert output.shape == (7, 2, 4)
    assert attention.numbers.shape == attention.weights.shape == (7, 2, 5)
    assert attention.summary.shape == (7, 2, 4)
    assert attention.numbers.dtype == torch.int64
    numbers, weights = attention
    assert numbers is attention.numbers
    assert weights is attention.weights
    deep = make_layer("lstm", 3, 4, 3, k_top=5, bidirectional=True)
    assert deep(randn(7, 2, 3), return_attention=True)[2].numbers.shape == (6, 7, 2, 5)
    assert deep(randn(7, 3), return_attention=True)[2].numbers.shape == (6, 7, 5)


def test_attention_of_the_reverse_direction_is_in_the_order_of_the_input() -> None:
    """The reverse direction reads nothing before it has kept something: at the end of the input."""
    layer = make_layer("lstm", 3, 4, k_top=1, k_att=2, bidirectional=True)
    _, _, (numbers, _) = layer(randn(5, 1, 3), return_attention=True)
    assert (numbers[0, :, 0, 0] >= 0).tolist() == [False, False, True, True, True]
    assert (numbers[1, :, 0, 0] >= 0).tolist() == [True, True, True, False, False]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("table", [lambda row: torch.stack([row, row * 0 + 1], 1)[:, 0],
                                   lambda row: row.repeat_interleave(2)[::2]])  # fmt: skip
def test_lengths_are_read_as_torch_reads_them(table: Callable[[Tensor], Tensor], backend: str) -> None:
    """A column of a table, and other tensors whose numbers do not lie side by side."""
    layer = randomize(make_layer("lstm", 2, 3, k_top=2, k_att=1, backend=backend))
    x, lengths = randn(6, 4, 2), [3, 6, 1, 5]
    expected, end = layer(x, lengths=lengths)
    output, state = layer(x, lengths=table(torch.tensor(lengths)))
    assert_close(output, expected)
    assert_close(state.h, end.h)
    assert_close(state.microstates, end.microstates)


@pytest.mark.parametrize("backend", BACKENDS)
def test_expanded_lengths(backend: str) -> None:
    layer, x = randomize(make_layer("gru", 2, 3, k_top=2, k_att=1, backend=backend)), randn(6, 4, 2)
    output, h = layer(x, lengths=torch.tensor(2).expand(4))
    assert_close(output[:2], layer(x[:2])[0])
    assert not output[2:].any()
    assert h.state.steps.tolist() == [2, 2, 2, 2]


def test_narrow_whole_numbers_are_lengths_too() -> None:
    layer, x = make_layer("gru", 2, 3), randn(6, 4, 2)
    for dtype in (torch.int32, torch.uint8):
        assert_close(layer(x, lengths=torch.tensor([3, 6, 1, 5], dtype=dtype))[0], layer(x, lengths=[3, 6, 1, 5])[0])


def test_a_packed_sequence_takes_no_more_operations_where_it_is_longer() -> None:
    layer = make_layer("lstm", 3, 4, 2, bidirectional=True)

    def nodes(steps: int) -> int:
        packed = pack_padded_sequence(randn(steps, 5, 3), torch.tensor([1, steps, 2, 3, 4]), enforce_sorted=False)
        waiting: list[Any] = [layer(packed)[0].data.grad_fn]
        seen: set[Any] = set()
        while waiting:
            node = waiting.pop()
            if node is not None and node not in seen:
                seen.add(node)
                waiting += [one for one, _ in node.next_functions]
        return len(seen)

    assert nodes(5) == nodes(60)

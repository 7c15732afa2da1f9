"""Rows that have seen different numbers of steps, in the fast backends."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

import sab
from sab.ops import ragged
from sab.ops.cpu import loader
from tests.comparing import distances_of_scores
from tests.ops.cases import BOUNDS, Case, assert_close, cases, gradients, randn, run, runs_fast, warns_slow

pytestmark = pytest.mark.skipif(loader.unavailable() is not None, reason="needs the compiled loops")


def in_use(state: sab.SABState) -> tuple[list[Tensor], Tensor]:
    """The parts of a state, its slots in use first, and their numbers."""
    slots = (state.numbers < 0).sort(dim=-1, stable=True).indices[..., : int((state.numbers >= 0).sum(-1).max())]
    found = state.at(slots)
    blank = (found.numbers < 0).unsqueeze(-1)
    return [*found, *(part.masked_fill(blank, 0.0) for part in (found.microstates, found.keys))], found.numbers


@given(cases(max_batch=4, max_memory=BOUNDS), st.integers(1, 5), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_groups_equal_the_reference(case: Case, steps: int, again: bool, recompute: bool) -> None:
    """Outputs, states, attention and every gradient, in a call after rows of different length, and in the next one."""
    results: list[list[Tensor]] = []
    numbers: list[list[Tensor]] = []
    for backend in ("reference", "cpu"):
        layer = case.layer()
        layer.config = dataclasses.replace(layer.config, backend=backend, recompute=recompute and backend == "cpu")
        x, more = case.x().requires_grad_(), randn(steps, case.batch, case.sizes[0], seed=5).requires_grad_()
        later = torch.arange(case.batch) % steps + 1
        seen: list[Tensor] = []
        read: list[Tensor] = []
        with distances_of_scores() as distances, runs_fast():
            state = run(layer, x, lengths=case.lengths)[1]
            for lengths in (None, later) if again else (later,):
                output, state, attention = run(layer, more, state, lengths=lengths, return_attention=True)
                seen += [output, attention.weights, attention.summary]
                read.append(attention.numbers)
        if backend == "reference":
            assume(distances.certain())
        whole: sab.SABState = state.state if isinstance(state, sab.SABHidden) else state
        parts, used = in_use(whole)
        seen += parts
        numbers.append([*read, used, whole.steps])
        results.append(seen + gradients(seen, [x, more, *layer.parameters()]))
    for expected, actual in zip(*numbers, strict=True):
        assert torch.equal(actual, expected)
    for place, (expected, actual) in enumerate(zip(*results, strict=True)):
        assert_close(actual, expected, f"tensor {place}", tolerance=1e-9)


def test_a_decoder_goes_on_from_a_packed_encoder_without_the_reference() -> None:
    encoder, decoder = sab.SABGRU(3, 8), sab.SABGRU(3, 8)
    packed = pack_padded_sequence(torch.randn(9, 5, 3), torch.tensor([4, 9, 1, 4, 2]), enforce_sorted=False)
    x = torch.randn(6, 5, 3)
    with runs_fast():
        _, h = encoder(packed)
        output, after = decoder(x, h)
        output.sum().backward()
    assert decoder.backend_for(x, h) == "cpu"
    assert after.state.steps.tolist() == [10, 15, 7, 10, 8]


def test_more_groups_than_pay_are_the_references() -> None:
    layer, batch = sab.SABLSTM(3, 4, k_att=1), 8 * ragged.MOST_GROUPS_A_STEP
    state = layer(torch.randn(batch, batch, 3), lengths=torch.arange(batch) + 1)[1]
    assert layer.backend_for(torch.randn(8, batch, 3), state) == "cpu"
    with warns_slow("seen different numbers of steps"):
        layer(torch.randn(7, batch, 3), state)


def test_rows_that_have_seen_as_many_steps_but_use_other_slots_are_the_references() -> None:
    layer, x = sab.SABLSTM(3, 4, k_att=1), torch.randn(5, 3, 3)
    state = layer(x)[1]
    numbers = state.numbers.clone()
    numbers[:, 0, 0] = -1
    assert layer.backend_for(x, dataclasses.replace(state, numbers=numbers)) == "reference"

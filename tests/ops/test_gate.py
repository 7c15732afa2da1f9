"""`incorporate="gate"`: no state leaves [-1, 1] if weights sum to at most 1, and a closed gate is the plain layer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sab.parts import registry
from tests.ops.cases import DOUBLE, SCORERS, make_layer, make_torch, randn, randomize, run

BOUNDED_CELLS = [name for name, cell in registry.CELLS.items() if cell.is_bounded]
BOUNDED_WEIGHTINGS = [name for name, weighting in registry.WEIGHTINGS.items() if weighting.is_bounded]
BOUNDED_INCORPORATIONS = [name for name, part in registry.INCORPORATIONS.items() if part.is_bounded]
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # of the interpreter


def test_what_is_bounded() -> None:
    assert BOUNDED_CELLS == ["lstm", "gru", "rnn_tanh"]
    assert BOUNDED_WEIGHTINGS == ["relu_norm", "softmax", "softmax_sink"]
    assert BOUNDED_INCORPORATIONS == ["gate"]


@settings(max_examples=30)
@given(
    cell=st.sampled_from(BOUNDED_CELLS),
    weighting=st.sampled_from(BOUNDED_WEIGHTINGS),
    incorporate=st.sampled_from(BOUNDED_INCORPORATIONS),
    scorer=st.sampled_from(SCORERS),
    backend_and_steps=st.sampled_from((("cpu", 5000), ("cpu", 300), ("reference", 40), ("triton", 6))),
    layer_norm=st.booleans(),
    inputs=st.sampled_from((1e-2, 1.0, 1e4)),
    weights=st.sampled_from((0.1, 1.0, 30.0)),
    seed=st.integers(0, 99),
)
def test_no_state_leaves_its_bound(
    cell: str,
    weighting: str,
    incorporate: str,
    scorer: str,
    backend_and_steps: tuple[str, int],
    layer_norm: bool,
    inputs: float,
    weights: float,
    seed: int,
) -> None:
    backend, steps = backend_and_steps
    options = {"k_top": 3, "k_att": 7, "weighting": weighting, "scorer": scorer, "incorporate": incorporate}
    options["layer_norm"] = layer_norm and backend != "triton"
    layer = randomize(make_layer(cell, 2, 4, backend=backend, **options), seed, scale=weights)
    with torch.no_grad():
        output, state = run(layer, randn(steps, 2, 2, seed=seed) * inputs)
    assert output.abs().max() <= 1 + 1e-12
    assert state.microstates.abs().max() <= 1 + 1e-12 if state.microstates.numel() > 0 else True


@pytest.mark.parametrize("cell", BOUNDED_CELLS)
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_an_open_gate_reads_and_a_closed_one_is_the_plain_layer(cell: str, dtype: torch.dtype) -> None:
    theirs = randomize(make_torch(cell, 3, 5, dtype=dtype))
    layer = make_layer(cell, 3, 5, k_top=3, k_att=1, k_trunc=None, incorporate="gate", dtype=dtype)
    layer.load_state_dict(theirs.state_dict(), strict=False)
    x = randn(12, 2, 3).to(dtype)
    expected = theirs(x)[0]
    assert (layer(x)[0] - expected).abs().max() > 0.01
    with torch.no_grad():
        layer.incorporate_bias_l0.fill_(-40.0)
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-4, atol=1e-5)

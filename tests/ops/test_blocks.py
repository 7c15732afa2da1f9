"""Two levels of memory: which blocks a step reads, that pieces and streams read the same, and what is refused.

`oracle.py` reads blocks by the text of docs/mathematics.md.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import sab
from sab.errors import UserError
from sab.ops import blocks
from sab.ops.cpu import loader
from tests.comparing import selects_surely
from tests.ops.cases import (
    BACKENDS,
    Case,
    assert_close,
    cases,
    gradients,
    make_layer,
    pieces,
    randn,
    randomize,
    run,
    runs_fast,
    warns_slow,
)
from tests.ops.test_reference import compare_with_oracle
from tests.test_online import Recorder, assert_equal, follow, gradients_of, sequence, squares

ON_EACH = pytest.mark.parametrize("backend", BACKENDS)
SMALL: dict[str, Any] = {"memory": "hierarchical", "block_size": 1, "blocks": 2}
native = pytest.mark.skipif(loader.unavailable() is not None, reason="needs the compiled loops")


def levelled(cell: Any = "gru", **options: Any) -> Any:
    """A layer that reads 2 blocks of 2 and the newest."""
    given = {"k_top": 3, "k_att": 1, "k_trunc": 4, "memory": "hierarchical", "block_size": 2, "blocks": 2}
    return randomize(make_layer(cell, 2, 6, **given | options))


def flat_like(layer: Any) -> Any:
    flat = make_layer(layer.cell, 2, 6, k_top=3, k_att=1, k_trunc=4)
    flat.load_state_dict(layer.state_dict())
    return flat


@pytest.mark.parametrize(
    ("smallest", "used", "size"),
    [(16, 1, 16), (16, 4095, 16), (16, 4096, 32), (16, 16_383, 32), (16, 16_384, 64), (16, 10**6, 256), (1, 16, 2)],
)
def test_the_size_of_blocks_is_at_most_half_a_square_root(smallest: int, used: int, size: int) -> None:
    assert blocks.sizes(torch.tensor([used]), smallest).tolist() == [size]
    if used >= 4 * smallest**2:
        assert used**0.5 / 4 < size <= used**0.5 / 2


HIERARCHICAL_CASES = cases(
    max_steps=16,
    max_batch=2,
    incorporate="gate",  # nothing grows over so many steps
    scorer=st.sampled_from(["cosine", "dot"]),
    weighting_and_forward=st.sampled_from([("softmax", "sparse"), ("relu_norm", "sparse")]),
    k_top=st.integers(1, 2),
    k_att=st.integers(1, 2),
)


@ON_EACH
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(case=HIERARCHICAL_CASES, block_size=st.integers(1, 3), count=st.integers(2, 3))
def test_random_cases_equal_the_oracle(backend: str, case: Case, block_size: int, count: int) -> None:
    """Outputs, states, attention and gradients: lengths, layers and directions included."""
    levels = {"memory": "hierarchical", "block_size": block_size, "blocks": count}
    case.options |= levels | {"backend": backend}
    layer = case.layer()
    shape = (len(layer._suffixes), case.batch, layer.hidden_size)
    h0, c0 = randn(*shape, seed=case.seed + 2), randn(*shape, seed=case.seed + 3)
    hx = (h0, c0) if case.cell == "lstm" else h0
    assume(selects_surely(layer, case.x(), hx, lengths=torch.tensor(case.lengths)))
    compare_with_oracle(layer, case.x(), case.lengths, h0, c0)


@ON_EACH
@pytest.mark.parametrize("scorer", ["cosine", "dot"])
def test_a_long_sequence_equals_the_oracle(backend: str, scorer: str) -> None:
    """Blocks double at 16 and at 64 microstates; what is read differs from what the flat layer reads."""
    layer = randomize(make_layer("gru", 2, 4, k_top=2, k_att=1, k_trunc=4, scorer=scorer, backend=backend, **SMALL))
    x, zeros = randn(75, 1, 2), torch.zeros(1, 1, 4, dtype=torch.float64)
    compare_with_oracle(layer, x, None, zeros, zeros)
    flat = make_layer("gru", 2, 4, k_top=2, k_att=1, k_trunc=4, scorer=scorer)
    flat.load_state_dict(layer.state_dict())
    with torch.no_grad():
        differs = layer(x, return_attention=True)[2].numbers != flat(x, return_attention=True)[2].numbers
    assert differs.any()


@native
def test_gradients_of_both_backends_are_the_same() -> None:
    found = []
    for backend in BACKENDS:
        layer, x = levelled("lstm", backend=backend), randn(90, 3, 2).requires_grad_()
        first, middle = run(layer, x[:40])[:2]
        rest, state, attention = run(layer, x[40:], middle, return_attention=True)
        seen = [first, rest, *state, state.microstates, state.keys, attention.weights, attention.summary]
        found.append([*seen, *gradients(seen, [x, *layer.parameters()]), attention.numbers])
    for one, other in zip(*found, strict=True):
        assert_close(one, other, tolerance=1e-9)


@ON_EACH
def test_ties_go_to_the_oldest(backend: str) -> None:
    """All keys are equal: the oldest blocks are read, and the oldest microstates of them are selected."""
    layer = levelled(backend=backend, k_top=4)
    with torch.no_grad():
        layer.get_parameter("attn_w_memory_l0").zero_()
        *_, attention = layer(randn(40, 2, 2), return_attention=True)
    assert attention.numbers[-1].tolist() == [[0, 1, 2, 3]] * 2


@ON_EACH
def test_the_newest_block_is_always_read(backend: str) -> None:
    """As many blocks as are read have higher scores; what was kept last is selected nevertheless, if it scores best."""
    layer = levelled(backend=backend, k_top=1, block_size=1, blocks=1, scorer="dot", attention_size=1)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.fill_(1.0 if name.startswith(("attn", "weight_ih")) else 0.0)
        x = torch.linspace(0.1, 2, 12, dtype=torch.float64).view(12, 1, 1).expand(12, 1, 2)
        *_, attention = layer(x, return_attention=True)
    assert attention.numbers[1:, 0, 0].tolist() == list(range(11))


@ON_EACH
def test_few_microstates_are_read_as_by_the_flat_layer(backend: str) -> None:
    layer = levelled(backend=backend)
    x, flat = randn(6, 2, 2), flat_like(layer)  # at most 6 microstates: three blocks of two
    outputs = [run(one, x, return_attention=True) for one in (layer, flat)]
    assert_close(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][2].numbers, outputs[1][2].numbers)


@ON_EACH
@settings(max_examples=20, deadline=None)
@given(division=pieces(60))
def test_pieces_are_one_piece(backend: str, division: list[slice]) -> None:
    layer, x = levelled("lstm", backend=backend), randn(60, 2, 2)
    state, outputs = None, []
    with torch.no_grad():
        whole = layer(x)[0]
        for piece in division:
            output, state = layer(x[piece], state)
            outputs.append(output)
    assert_close(torch.cat(outputs), whole)


def saved(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state.detach(), file)
    file.seek(0)
    return torch.load(file)


CARRIED = {
    "detach": lambda state: state.detach(),
    "clone": lambda state: state.clone(),
    "select": lambda state: getattr(state, "state", state).select([1, 0]).select([1, 0]),
    "pickle": lambda state: pickle.loads(pickle.dumps(state.detach())),
    "copy": lambda state: copy.deepcopy(state.detach()),
    "save": saved,
    "all that is recent": lambda state: getattr(state, "state", state).recent(1000),
}


@ON_EACH
@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("way", [*CARRIED, "compact"])
def test_a_carried_state_continues_exactly(way: str, kind: str, backend: str) -> None:
    layer, x = levelled(kind, backend=backend), randn(45, 2, 2)
    state, outputs = None, []
    with torch.no_grad():
        whole = layer(x)[0]
        for piece in x.split([20, 1, 1, 1, 8, 14]):
            output, state = layer(piece, state)
            state = layer.compact(state) if way == "compact" else CARRIED[way](state)
            outputs.append(output)
    assert_close(torch.cat(outputs), whole)


@ON_EACH
def test_a_stream_that_forgets_and_forks_equals_the_reference(backend: str) -> None:
    """Single steps through growing buffers; blocks are counted anew after `recent`, and two go on from one state."""
    layer, judge = levelled(backend=backend), levelled(backend="reference")
    x = randn(90, 2, 2)
    with torch.no_grad():
        first, middle = run(judge, x[:50])[:2]
        expected = [first, run(judge, x[50:], middle.recent(17))[0]], run(judge, x[60:], middle)[0]
        state: Any = None
        outputs: list[Tensor] = []
        for step in range(50):
            output, state = layer(x[step : step + 1], state)
            outputs.append(output)
        ends = []
        for begun, rest in ((state.state.recent(17), x[50:]), (state, x[60:])):
            now, made = begun, []
            for one in rest.split(1):
                output, now = layer(one, now if isinstance(now, sab.SABHidden) else now.h)
                made.append(output)
            ends.append(torch.cat(made))
    assert_close(torch.cat(outputs), expected[0][0])
    assert_close(ends[0], expected[0][1])
    assert_close(ends[1], expected[1])


def test_rows_that_have_seen_different_steps_count_each_for_itself() -> None:
    layer, x, rest = levelled(backend="reference"), randn(40, 3, 2), randn(20, 3, 2, seed=4)
    lengths = [3, 17, 40]
    with torch.no_grad():
        state = layer(x, lengths=lengths)[1]
        output, _, attention = layer(rest, state, return_attention=True)
        for row, length in enumerate(lengths):
            alone = layer(torch.cat([x[:length, row], rest[:, row]]), return_attention=True)
            assert_close(output[:, row], alone[0][length:])
            assert torch.equal(attention.numbers[:, row], alone[2].numbers[length:])


def test_a_cell_steps_as_its_layer() -> None:
    layer = levelled("lstm")
    cell, x, state = sab.SABLSTMCell.from_layer(layer), randn(40, 2, 2), None
    assert cell.config == layer.config
    with torch.no_grad():
        for step, expected in zip(x, layer(x)[0], strict=True):
            state = cell(step, state)
            assert_close(state.h, expected)


def test_a_trace_is_of_what_was_read() -> None:
    layer, x = levelled("lstm"), randn(30, 1, 2)
    trace = sab.trace(layer, x, 30, 0)
    *_, attention = layer(x, return_attention=True)
    assert torch.equal(trace.numbers, attention.numbers[:, 0])
    assert_close(trace.weights, attention.weights[:, 0])
    x.requires_grad_()
    (of_x,) = torch.autograd.grad(layer(x)[0][29, 0, 0], [x])
    assert ((of_x[:, 0] != 0).any(-1) <= (trace.total != 0).any(-1)).all()


def test_samples_of_a_vmap() -> None:
    layer, xs = levelled(), randn(3, 40, 2, 2)
    assert_close(torch.vmap(lambda x: layer(x)[0])(xs), torch.stack([layer(x)[0] for x in xs]))


def test_a_learner_reads_blocks_as_well() -> None:
    """With a learning rate of 0 the gradients of all pieces add up to that of the whole sequence."""
    layer, x, y = randomize(sab.SABGRU(3, 2, dtype=torch.float64, k_top=2, k_att=1, k_trunc=5, **SMALL)), *sequence(40)
    recorder = Recorder(layer)
    follow(sab.online.Learner(layer, recorder, squares, max_memory=1000), x, y, [3, 7, 1, 9, 20])
    assert_equal(recorder.sums, gradients_of(squares(layer(x)[0], y), layer))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"memory": "tree"}, "memory must be one of flat, hierarchical; got 'tree'"),
    ({"block_size": 0}, "block_size must be a whole number of at least 1"),
    ({"block_size": 2**20 + 1}, "block_size must be a whole number of at least 1, and at most 1048576; got 1048577"),
    ({"blocks": 2.5}, "blocks must be a whole number of at least 1"),
    ({"memory": "flat", "block_size": 2}, "block_size must be 16, the default, where memory is 'flat'; got 2"),
    ({"memory": "flat", "block_size": 16}, "blocks must be 8, the default, where memory is 'flat'; got 2"),
    ({"scorer": "affine"}, "scorer must be one of dot, cosine where memory is 'hierarchical'; got 'affine'"),
    ({"scorer": lambda m, h: m.sum(-1)}, "scorer must be one of dot, cosine .*; got a callable"),
    ({"forward": "dense"}, "forward must be 'sparse' where memory is 'hierarchical'; got 'dense'"),
    ({"max_memory": 9}, "max_memory must be None where memory is 'hierarchical'; got 9"),
    ({"recompute": True}, "recompute must be False where memory is 'hierarchical'; got True"),
    ({"k_top": 5}, "blocks times block_size must be at least k_top = 5; got 2 times 2"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED, ids=[sentence[:60] for _, sentence in REFUSED])
def test_what_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        levelled(**options)
    assert caught.value.option == sentence.split()[0]


def test_a_backend_without_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pytest.importorskip("sab.ops.triton.engine")
    monkeypatch.setattr(engine, "INTERPRETED", True)
    layer, x = levelled(), randn(9, 1, 2)
    weights = layer._weights(0)
    assert engine.unsupported(x, None, weights, "gru", layer.config) == "it has no hierarchical memory"
    assert engine.unsupported(x, None, weights, "gru", layer.config.flat()) is None


@native
def test_only_where_no_loop_has_it_a_call_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = levelled()
    with runs_fast():
        layer(randn(40, 1, 2))
    monkeypatch.setattr("sab.ops.cpu.engine._missing", lambda *names: "it is not there")
    with warns_slow("it is not there"):
        layer(randn(40, 1, 2))


def test_a_layer_shows_its_levels() -> None:
    assert "memory=hierarchical, block_size=2, blocks=2" in repr(levelled())
    assert "memory" not in repr(flat_like(levelled()))


def test_from_torch_takes_it() -> None:
    layer = sab.SABLSTM.from_torch(torch.nn.LSTM(2, 4), k_top=2, k_att=1, **SMALL)
    assert layer.config.is_hierarchical
    assert layer(torch.randn(30, 1, 2))[0].isfinite().all()


def test_onnx_refuses_it() -> None:
    pytest.importorskip("onnxscript")
    with pytest.raises(UserError, match="model must have SAB layers with memory='flat'; got 'hierarchical'"):
        sab.export.to_onnx(levelled().eval(), (randn(9, 2, 2),))

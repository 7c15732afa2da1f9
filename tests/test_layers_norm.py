"""`layer_norm` and `recurrent_dropout`: what the layers compute with them, and that nothing changes without."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import sab
from sab.errors import UserValueError
from sab.ops.cpu import engine as cpu
from sab.ops.triton import engine as triton
from tests.comparing import randomize_surely
from tests.ops.cases import BACKENDS, CELLS, DOUBLE, PLAIN, assert_close, gradients, make_layer, randn, randomize

N = 16
"""Hidden units of the layers whose masks are looked at: two masks are nearly never equal."""


def echo(**options: Any) -> Any:
    """A layer whose step multiplies the hidden state with its mask, and does nothing else."""
    layer = make_layer("rnn_relu", 1, N, **PLAIN, **options)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.eye(N) if name.startswith("weight_hh") else torch.zeros(parameter.shape))
    return layer


def masks(layer: Any, steps: int = 1, batch: int = 3) -> Tensor:
    """What the hidden states, from 1 on, have been multiplied with after some steps, [layers, B, n]."""
    ones = torch.ones(len(layer._suffixes), batch, N, dtype=DOUBLE)
    return layer(torch.zeros(steps, batch, 1, dtype=DOUBLE), ones)[1]


# Recurrent dropout ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_mask_serves_all_steps_of_a_call(backend: str) -> None:
    layer = echo(recurrent_dropout=0.5, backend=backend)
    torch.manual_seed(0)
    once = masks(layer)
    assert set(once.unique().tolist()) == {0.0, 2.0}
    assert len({tuple(row) for row in once[0].tolist()}) == 3, "rows have masks of their own"
    torch.manual_seed(0)
    assert_close(masks(layer, steps=4), once**4)
    assert not torch.equal(masks(layer), once), "a call draws its own mask, also that of a further piece"


def test_each_layer_and_direction_has_its_own_mask() -> None:
    layer = echo(num_layers=2, bidirectional=True, recurrent_dropout=0.5)
    assert len({tuple(mask) for mask in masks(layer).flatten(1).tolist()}) == 4


def test_the_share_that_is_dropped() -> None:
    layer = echo(recurrent_dropout=0.2)
    torch.manual_seed(0)
    drawn = masks(layer, batch=2000)
    assert (drawn == 0).double().mean().item() == pytest.approx(0.2, abs=0.02)
    assert drawn.max().item() == pytest.approx(1.25)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_gru_carries_over_is_not_masked(backend: str) -> None:
    layer = make_layer("gru", 1, N, **PLAIN, recurrent_dropout=0.9, backend=backend)
    with torch.no_grad():
        layer.bias_hh_l0[N : 2 * N] = 1e3  # the update gate is open for the old state alone
    h = randn(1, 2, N)
    assert_close(layer(randn(5, 2, 1), h)[1], h)


@pytest.mark.parametrize("cell", CELLS)
def test_without_training_recurrent_dropout_changes_nothing(cell: str) -> None:
    layer = randomize(make_layer(cell, 3, 4, 2, k_top=2, recurrent_dropout=0.7))
    plain = make_layer(cell, 3, 4, 2, k_top=2)
    plain.load_state_dict(layer.state_dict())
    x, before = randn(6, 2, 3), torch.get_rng_state()
    assert torch.equal(layer.eval()(x)[0], plain(x)[0])
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.allclose(layer.train()(x)[0], plain(x)[0])


def test_asking_for_the_backend_draws_nothing() -> None:
    layer, before = make_layer("lstm", 3, 4, recurrent_dropout=0.5), torch.get_rng_state()
    assert layer.backend_for(randn(5, 2, 3)) in BACKENDS
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("value", [-0.1, 1, 1.5, float("nan"), "0.5", None])
def test_bad_shares_are_refused(value: Any) -> None:
    with pytest.raises(
        (ValueError, TypeError), match="recurrent_dropout must be a finite number of at least 0 and below"
    ):
        make_layer("gru", 3, 4, recurrent_dropout=value)


# Layer norm ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS)
def test_names_shapes_and_start_of_the_parameters(cell: str) -> None:
    layer = make_layer(cell, 3, 5, 2, bidirectional=True, layer_norm=True)
    gates = {"lstm": 20, "gru": 15}.get(cell, 5)
    of_one = {"norm_ih": gates, "norm_hh": gates} | ({"norm_c_weight": 5, "norm_c_bias": 5} if cell == "lstm" else {})
    found = {name: parameter for name, parameter in layer.named_parameters() if name.startswith("norm_")}
    ends = ("_l0", "_l0_reverse", "_l1", "_l1_reverse")
    assert {name: len(parameter) for name, parameter in found.items()} == {
        name + end: size for end in ends for name, size in of_one.items()
    }
    for name, parameter in found.items():
        assert (parameter == (0 if "bias" in name else 1)).all()


@pytest.mark.parametrize("cell", CELLS)
def test_the_cell_is_drawn_as_without_layer_norm(cell: str) -> None:
    drawn = []
    for layer_norm in (True, False):
        torch.manual_seed(3)
        drawn.append(make_layer(cell, 3, 5, 2, layer_norm=layer_norm).state_dict())
    normed, plain = drawn
    assert not any(name.startswith("norm_") for name in plain)
    assert all(torch.equal(normed[name], value) for name, value in plain.items())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cell", CELLS)
def test_the_size_of_the_weights_does_not_matter(cell: str, backend: str) -> None:
    """But for what keeps a variance of 0 finite: so the weights must not be small."""
    layer = randomize(make_layer(cell, 3, 5, k_top=0, layer_norm=True, backend=backend), scale=1e3)
    with torch.no_grad():
        for name in ("bias_ih_l0", "bias_hh_l0", "norm_ih_l0", "norm_hh_l0"):
            layer.get_parameter(name).mul_(1e-3)
    x = randn(9, 2, 3)
    expected = layer(x)[0]
    with torch.no_grad():
        layer.weight_ih_l0.mul_(7)
        layer.weight_hh_l0.mul_(0.5)
    assert_close(layer(x)[0], expected, tolerance=1e-4)
    with torch.no_grad():
        layer.norm_hh_l0.mul_(1.5)
    assert not torch.allclose(layer(x)[0], expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cell", CELLS)
def test_single_precision_is_close_to_double(cell: str, backend: str) -> None:
    results = []
    for dtype in (torch.float32, DOUBLE):
        layer = randomize(make_layer(cell, 3, 8, dtype=dtype, layer_norm=True, k_top=0, backend=backend))
        x = randn(12, 4, 3).to(dtype).requires_grad_()
        output = layer(x)[0]
        results.append([output, *torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])])
    for single, double in zip(*results, strict=True):
        assert (single - double).norm() <= 1e-4 * double.norm() + 1e-6


@pytest.mark.parametrize("cell", CELLS)
def test_torch_has_no_such_layer(cell: str) -> None:
    layer = make_layer(cell, 3, 4, layer_norm=True)
    with pytest.raises(UserValueError, match=r"layer_norm must be False for to_torch: torch\.nn's layers have none"):
        layer.to_torch()
    theirs = make_layer(cell, 3, 4).to_torch()
    with pytest.raises(UserValueError, match=r"layer_norm must be False in from_torch: torch\.nn's layers have none"):
        type(layer).from_torch(theirs, layer_norm=True)
    assert type(layer).from_torch(theirs, recurrent_dropout=0.3).to_torch().state_dict().keys() == (
        theirs.state_dict().keys()
    )


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_layer_norm_is_true_or_false(value: Any) -> None:
    with pytest.raises(TypeError, match="layer_norm must be True or False; got"):
        make_layer("lstm", 3, 4, layer_norm=value)


# Both ----------------------------------------------------------------------------------------------------------------

EXTRAS: list[dict[str, Any]] = [
    {"layer_norm": True},
    {"recurrent_dropout": 0.4},
    {"layer_norm": True, "recurrent_dropout": 0.4},
]


@pytest.mark.parametrize("extra", EXTRAS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cell", CELLS)
def test_gradcheck(cell: str, backend: str, extra: dict[str, Any]) -> None:
    layer = make_layer(cell, 2, 3, k_top=2, k_att=1, k_trunc=None, backend=backend, **extra)
    x, h, c = (randn(*shape).requires_grad_() for shape in ((5, 2, 2), (1, 2, 3), (1, 2, 3)))
    randomize_surely(layer, x.detach(), (h.detach(), c.detach()) if cell == "lstm" else h.detach())

    def run(x: Tensor, h: Tensor, c: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        output, state, attention = layer(x, (h, c) if cell == "lstm" else h, return_attention=True)
        return output, *state, attention.weights

    assert torch.autograd.gradcheck(run, (x, h, c, *layer.parameters()))


@pytest.mark.parametrize("extra", EXTRAS, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_threads_that_share_products_give_the_same(
    cell: str, extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with weights that are too large for a core's cache."""

    def results() -> list[Tensor]:
        layer = randomize(make_layer(cell, 3, 40, k_top=2, k_trunc=3, backend="cpu", **extra), scale=0.2)
        x = randn(6, 5, 3).requires_grad_()
        torch.manual_seed(5)
        output, _ = layer(x, lengths=torch.tensor([6, 2, 4, 5, 6]))
        return [output, *gradients([output], [x, *layer.parameters()])]

    expected = results()
    monkeypatch.setattr(cpu, "LARGEST_WITH_OWN_ROWS", 0)
    for one, other in zip(results(), expected, strict=True):
        assert_close(one, other, tolerance=1e-9)


def test_layer_norm_in_pieces_equals_the_whole_and_is_traced() -> None:
    layer, x = make_layer("lstm", 3, 5, k_top=2, k_trunc=4, layer_norm=True), randn(11, 2, 3)
    randomize_surely(layer, x)
    first, state = layer(x[:5])
    assert_close(torch.cat([first, layer(x[5:], state)[0]]), layer(x)[0])
    found = sab.trace(layer, x, 11, 0)
    x.requires_grad_()
    output, _ = layer(x)
    assert found.value == pytest.approx(output[-1, 0, 0].item())
    assert found.total[:-1].abs().max() > 0


@pytest.mark.parametrize("extra", EXTRAS, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_per_sample_gradients(cell: str, extra: dict[str, Any]) -> None:
    layer = randomize(make_layer(cell, 3, 5, k_top=0, backend="cpu", **extra))
    weights, x = {name: value.detach() for name, value in layer.named_parameters()}, randn(6, 4, 3)

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(layer, weights, (row.unsqueeze(1),))[0].square().sum()

    def found(rows: Tensor) -> dict[str, Tensor]:
        torch.manual_seed(1)  # and all samples have the same mask
        return torch.vmap(torch.func.grad(loss), in_dims=(None, 1), randomness="same")(weights, rows)

    together = found(x)
    for row in range(4):
        alone = found(x[:, row : row + 1])
        for name, value in together.items():
            assert_close(value[row], alone[name][0], name, tolerance=1e-9)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_and_files_keep_the_options(make: Any) -> None:
    layer = make_layer("lstm", 3, 5, layer_norm=True, recurrent_dropout=0.25)
    twin, x = make(layer).eval(), randn(6, 2, 3)
    assert repr(twin) == repr(layer.eval())
    assert torch.equal(twin(x)[0], layer(x)[0])
    assert "recurrent_dropout=0.25, layer_norm=True" in repr(twin)


def test_neither_is_in_the_text_of_a_plain_layer() -> None:
    assert "norm" not in repr(make_layer("lstm", 3, 5))
    assert "recurrent" not in repr(make_layer("lstm", 3, 5))


def test_a_layer_of_an_older_version_still_loads() -> None:
    """Its pickle holds neither option, and fewer names of parameters."""
    layer, x = make_layer("lstm", 3, 5), randn(6, 2, 3)
    old = copy.deepcopy(layer)
    del old.__dict__["recurrent_dropout"]
    del old.config.__dict__["layer_norm"]
    old._names = [names[:10] for names in old._names]
    assert torch.equal(pickle.loads(pickle.dumps(old))(x)[0], layer(x)[0])


@pytest.mark.parametrize(
    ("extra", "reason"),
    [({"layer_norm": True}, "it has no layer_norm"), ({"recurrent_dropout": 0.4}, "it has no recurrent_dropout")],
)
def test_the_kernels_refuse_them(extra: dict[str, Any], reason: str) -> None:
    layer, x = make_layer("lstm", 3, 5, backend="triton", **extra), randn(6, 2, 3)
    with pytest.raises(UserValueError, match=f"'triton' does not: {reason}"):
        layer(x)
    layer.eval()
    refused = triton.unsupported(x, None, layer._weights(0), "lstm", layer.config)
    assert refused == (reason if "layer_norm" in extra else None), "without a mask there is nothing to refuse"


@pytest.mark.filterwarnings("ignore")  # of the compiler's own parts
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_recurrent_dropout_compiles(cell: str) -> None:
    torch._dynamo.reset()
    layer = randomize(make_layer(cell, 3, 5, k_top=3, layer_norm=True, recurrent_dropout=0.5))
    compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, found = randn(7, 2, 3).requires_grad_(), []
    for run in (layer, compiled):
        torch.manual_seed(2)
        output = run(x)[0]
        found.append([output, *gradients([output], [x, *layer.parameters()])])
    for one, other in zip(*found, strict=True):
        assert_close(one, other)

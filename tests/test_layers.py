"""The layers as a user of `torch.nn` meets them: all the ordinary things work."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sab
from sab.errors import UserError
from tests.ops.cases import (
    BACKENDS,
    CELLS,
    DOUBLE,
    PLAIN,
    SCORERS,
    WEIGHTINGS_AND_FORWARDS,
    assert_close,
    both,
    gradients,
    make_layer,
    make_torch,
    randn,
    randomize,
    run,
    weighted_sum,
)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {},
            {
                "attn_w_memory": (4, 4), "attn_w_query": (4, 4), "attn_bias": (4,), "attn_v": (4,),
                "incorporate_weight": (4, 8), "incorporate_bias": (4,)
            },
        ),
        ({"scorer": "affine", "incorporate": "add"}, {"attn_w_memory": (4,), "attn_w_query": (4,)}),
        (
            {"scorer": "affine_tanh", "max_microstates": 5, "incorporate": "add"},
            {"attn_w_memory": (4,), "attn_w_query": (4,), "attn_bias": (5,)},
        ),
        (
            {"scorer": "mlp", "attention_size": 2, "max_microstates": 5, "incorporate": "add_bounded"},
            {"attn_w_memory": (2, 4), "attn_w_query": (2, 4), "attn_bias": (2,), "attn_v": (2,)},
        ),
        (
            {"scorer": "dot", "incorporate": "concat"},
            {
                "attn_w_memory": (4, 4), "attn_w_query": (4, 4), "incorporate_weight": (4, 8), "incorporate_bias": (4,)
            },
        ),
        ({"k_top": 0, "incorporate": "concat"}, {}),
    ],
)  # fmt: skip
def test_names_and_shapes_of_the_memory_parameters(options: dict[str, Any], expected: dict[str, Any]) -> None:
    layer = make_layer("gru", 3, 4, 2, bidirectional=True, **options)
    cells = set(make_torch("gru", 3, 4, 2, bidirectional=True).state_dict())
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters() if name not in cells}
    suffixes = ("_l0", "_l0_reverse", "_l1", "_l1_reverse")
    assert shapes == {name + suffix: shape for name, shape in expected.items() for suffix in suffixes}


def test_keys_are_as_large_as_the_hidden_state_but_at_most_128() -> None:
    for hidden, size in ((127, 127), (128, 128), (129, 128)):
        assert sab.SABGRU(3, hidden).attn_w_memory_l0.shape == (size, hidden)
    assert sab.SABGRU(3, 129, attention_size=130).attn_w_query_l0.shape == (130, 129)


@pytest.mark.parametrize("make", [sab.SABLSTM, sab.SABGRUCell])
def test_weights_with_larger_keys_say_how_to_make_a_layer_for_them(make: Any) -> None:
    older = {f"rnn.{name}": weight for name, weight in make(3, 130, attention_size=130).state_dict().items()}
    advice = "have 130 entries, those of this layer 128: make the layer with attention_size=130."
    with pytest.raises(RuntimeError, match=f"size mismatch for rnn(.|\n)*{advice}"):
        nn.ModuleDict({"rnn": make(3, 130)}).load_state_dict(older)
    nn.ModuleDict({"rnn": make(3, 130, attention_size=130)}).load_state_dict(older)


def test_a_layer_pickled_by_a_version_with_larger_keys_knows_their_size() -> None:
    layer = sab.SABGRU(3, 130, attention_size=130)
    layer.config = replace(layer.config, attention_size=None)  # which then stood for the hidden size
    older = round_trip_pickle(layer)
    assert older.config.attention_size == 130
    x = torch.randn(5, 2, 3)
    again = sab.SABGRUCell.from_layer(older).to_layer()
    assert torch.equal(again(x)[0], layer(x)[0])
    for one in (sab.SABGRU(3, 130), sab.SABGRU(3, 4, scorer="affine"), sab.SABGRU(3, 130, k_top=0)):
        assert round_trip_pickle(one).config == one.config


def test_reset_parameters_draws_within_the_bound_of_torch() -> None:
    layer = randomize(make_layer("lstm", 3, 16, scorer="mlp", incorporate="concat", input_start="torch"), scale=5.0)
    layer.reset_parameters()
    for name, parameter in layer.named_parameters():
        if not name.startswith("incorporate"):
            assert parameter.abs().max() <= 1 / 4, name
            assert parameter.std() > 0.05, name


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_cell_starts_as_that_of_torch_but_for_the_scale_of_the_input_weights(
    cell: str, bidirectional: bool
) -> None:
    sizes: dict[str, Any] = {"bidirectional": bidirectional, "dtype": torch.float32}
    torch.manual_seed(3)
    theirs = make_torch(cell, 3, 16, 2, **sizes).state_dict()
    for input_start in ("fan_in", "torch"):
        torch.manual_seed(3)
        ours = make_layer(cell, 3, 16, 2, input_start=input_start, **sizes).state_dict()
        for name, expected in theirs.items():
            inputs = expected.shape[-1]
            is_scaled = input_start == "fan_in" and name.startswith("weight_ih")
            assert_close(ours[name], expected * 2 * (3 * 16 / inputs) ** 0.5 if is_scaled else expected, name)
    torch.manual_seed(3)
    plain = make_layer(cell, 3, 16, 2, k_top=0, **sizes).state_dict()
    assert all(torch.equal(plain[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("inputs", [1, 50])
def test_input_weights_by_fan_in_change_the_gates_by_about_two(inputs: int) -> None:
    torch.manual_seed(0)
    layer = make_layer("lstm", inputs, 400)
    changes = randn(300, inputs) @ layer.weight_ih_l0.t()
    assert 1.8 < changes.std() < 2.2


def test_the_memory_starts_as_documented() -> None:
    layer = randomize(make_layer("lstm", 3, 16))
    layer.reset_parameters()
    assert_close(layer.attn_v_l0, torch.full_like(layer.attn_v_l0, 0.3))
    assert_close(torch.sigmoid(layer.incorporate_bias_l0), torch.full_like(layer.incorporate_bias_l0, 0.25))
    assert layer.attn_bias_l0.abs().max() <= 1 / 4
    gated = make_layer("lstm", 3, 16, 2, initial_gate=0.9)
    for bias in (gated.incorporate_bias_l0, gated.incorporate_bias_l1):
        assert_close(torch.sigmoid(bias), torch.full_like(bias, 0.9))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial_gate": 0.0}, "initial_gate must be a finite number above 0 and below 1; got 0.0."),
        ({"initial_gate": 1}, "initial_gate must be a finite number above 0 and below 1; got 1."),
        ({"initial_gate": "half"}, "initial_gate must be a finite number above 0 and below 1; got 'half'."),
        (
            {"initial_gate": 0.5, "incorporate": "add"},
            "initial_gate must be None where incorporate is 'add'; got 0.5.",
        ),
        ({"input_start": "xavier"}, "input_start must be one of fan_in, torch; got 'xavier'."),
    ],
)
def test_bad_starts_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        sab.SABLSTM(3, 4, **options)
    assert str(caught.value) == message


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
@pytest.mark.parametrize("steps", [5, 300])
def test_from_torch_starts_as_the_layer_it_was_given_and_learns(cell: str, steps: int) -> None:
    theirs = randomize(make_torch(cell, 3, 32, 2), scale=0.25)
    layer = type(make_layer(cell, 3, 4)).from_torch(theirs)
    x = randn(steps, 4, 3)
    expected, output = theirs(x)[0], layer(x)[0]
    assert (output - expected).norm() <= 1e-3 * expected.norm()
    output.square().sum().backward()
    for name, parameter in layer.named_parameters():
        if name.startswith("incorporate"):
            assert parameter.grad.abs().max() > 1e-8, name
    assert layer.config.initial_gate == sab.config.NEUTRAL_GATE
    assert type(layer).from_torch(theirs, initial_gate=0.5).config.initial_gate == 0.5
    assert type(layer).from_torch(theirs, incorporate="add").config.initial_gate is None


def test_growing_states_are_warned_about_once_in_training() -> None:
    x = randn(300, 2, 3)
    layer = make_layer("gru", 3, 64, scorer="mlp", incorporate="add")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.eval()(x)
        make_layer("gru", 3, 64)(x)
        make_layer("rnn_relu", 3, 64, k_top=0)(x)
    layer.train()
    with pytest.warns(UserWarning, match=r"^hidden states of SABGRU have left \[-1000, 1000\]") as caught:
        layer(x)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x)


def test_concat_starts_as_add() -> None:
    torch.manual_seed(1)
    add = make_layer("lstm", 3, 4, incorporate="add")
    torch.manual_seed(1)
    concat = make_layer("lstm", 3, 4, incorporate="concat")
    x = randn(8, 2, 3)
    assert_close(concat(x)[0], add(x)[0])


@pytest.mark.parametrize("batch_first", [True, False])
def test_dropout_acts_between_layers_in_training_alone(batch_first: bool) -> None:
    """With the same random numbers it is `torch.nn`'s dropout."""
    theirs, ours = both("lstm", 3, 4, 3, dropout=0.5, batch_first=batch_first)
    x = randn(5, 5, 3)
    for training in (True, False):
        torch.manual_seed(2)
        expected = theirs.train(training)(x)[0]
        torch.manual_seed(2)
        assert_close(ours.train(training)(x)[0], expected)
    layer = randomize(make_layer("lstm", 3, 4, 3, dropout=0.5, k_top=2))
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])


@pytest.mark.parametrize("cell", CELLS)
def test_dropout_without_a_second_layer_warns_where_it_was_asked_for(cell: str) -> None:
    classes: dict[str, Any] = {"lstm": sab.SABLSTM, "gru": sab.SABGRU}
    cls = classes.get(cell, sab.SABRNN)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cls(3, 4, dropout=0.5)
    assert len(caught) == 1
    assert issubclass(caught[0].category, UserWarning)
    assert "dropout=0.5 does nothing with num_layers=1" in str(caught[0].message)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls(3, 4, 2, dropout=0.5)


CONFIGURATIONS = [
    pytest.param(
        {"scorer": scorer, "weighting": weighting, "forward": forward, "k_top": 3, "k_trunc": 4},
        id=f"{scorer}-{weighting}-{forward}",
    )
    for scorer, (weighting, forward) in itertools.product(SCORERS, WEIGHTINGS_AND_FORWARDS)
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_autocast_to_the_other_type_of_16_bits(dtype: torch.dtype, bidirectional: bool) -> None:
    """Where it refuses to join tensors of this one: on the CPU, and with a plain `RuntimeError`."""
    layer = sab.SABLSTM(3, 5, num_layers=2, bidirectional=bidirectional).to(dtype)
    x = torch.randn(7, 2, 3, dtype=dtype)
    other = torch.bfloat16 if dtype == torch.float16 else torch.float16
    with torch.autocast("cpu", other):
        output, state, attention = layer(x, return_attention=True)
        output, state = layer(x, state)
    h, c = state
    assert {output.dtype, h.dtype, c.dtype, state.microstates.dtype, attention.weights.dtype} == {dtype}
    output.float().sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


@pytest.mark.parametrize("options", CONFIGURATIONS)
def test_autocast(options: dict[str, Any]) -> None:
    incorporate = {"mlp": "concat", "dot": "add_bounded"}.get(options["scorer"], "add")
    layer = make_layer("lstm", 3, 8, **options, incorporate=incorporate, max_microstates=4, dtype=torch.float32)
    x = randn(9, 2, 3).float().requires_grad_()
    expected = layer(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        output, state, attention = layer(x, return_attention=True)
        again, _ = layer(x, state)
        from_half, _ = layer(x.bfloat16())
    assert all(tensor.dtype == torch.float32 for tensor in (*state, state.microstates, state.keys, attention.weights))
    torch.testing.assert_close(output.float(), expected, atol=0.05, rtol=0.05)
    assert again.isfinite().all()
    assert from_half.isfinite().all()
    for gradient in gradients([output.float(), again.float()], [x, *layer.parameters()]):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cell", CELLS)
def test_other_floating_point_types(cell: str, dtype: torch.dtype) -> None:
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    exact = make_layer(cell, 3, 8, 2, k_top=3, weighting="softmax", scorer="mlp", incorporate="add_bounded")
    layer = copy.deepcopy(exact).to(dtype)
    x = randn(9, 2, 3)
    output, state = run(layer, x.to(dtype), lengths=torch.tensor([9, 4]))
    assert output.dtype == state.h.dtype == state.microstates.dtype == state.keys.dtype == dtype
    assert_close(output.double(), exact(x, lengths=torch.tensor([9, 4]))[0], tolerance=tolerance)
    for gradient in gradients([output], list(layer.parameters())):
        assert gradient.dtype == dtype
        assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", CONFIGURATIONS)
def test_large_preactivations_give_no_nan(options: dict[str, Any], dtype: torch.dtype) -> None:
    for cell, sign in itertools.product(CELLS[:3], (1.0, -1.0)):
        layer = make_layer(cell, 2, 3, **options, dtype=dtype, incorporate="add_bounded")
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.fill_(sign * 1e4)
        x = randn(7, 2, 2).to(dtype).requires_grad_()
        output, state = run(layer, x, lengths=[7, 3])
        assert output.isfinite().all()
        assert state.microstates.isfinite().all()
        for gradient in gradients([output, state.h], [x, *layer.parameters()]):
            assert not gradient.isnan().any()


def test_repr_tells_what_the_layer_is() -> None:
    assert repr(sab.SABLSTM(3, 4)) == (
        "SABLSTM(3, 4, k_top=10, k_att=2, k_trunc=10, scorer=cosine, weighting=softmax, forward=sparse, "
        "incorporate=gate)"
    )
    layer = sab.SABGRU(3, 4, 2, batch_first=True, dropout=0.5, bidirectional=True, bias=False, **PLAIN)
    assert repr(layer) == (
        "SABGRU(3, 4, num_layers=2, bias=False, batch_first=True, dropout=0.5, bidirectional=True, "
        "k_top=0, k_att=2, k_trunc=None)"
    )
    text = repr(sab.SABRNN(3, 4, nonlinearity="relu", scorer="affine", max_microstates=7))
    assert "max_microstates=7" in text
    assert "relu" in text
    text = repr(sab.SABGRU(3, 4, attention_size=5, initial_gate=0.25, input_start="torch"))
    assert text.endswith("incorporate=gate, initial_gate=0.25, input_start=torch, attention_size=5)")
    assert "Mixer" in repr(make_layer("lstm", 3, 4, scorer=Mixer(4)))


class Mixer(nn.Module):
    """A scorer with parameters of its own."""

    def __init__(self, size: int):
        super().__init__()
        self.linear = nn.Linear(size, size, dtype=DOUBLE)

    def forward(self, microstates: Tensor, h: Tensor) -> Tensor:
        return (self.linear(microstates) * h.unsqueeze(1)).sum(-1)


def round_trip_pickle(layer: Any) -> Any:
    return pickle.loads(pickle.dumps(layer))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, round_trip_pickle])
@pytest.mark.parametrize("module_scorer", [False, True])
@pytest.mark.parametrize("cell", ["lstm", "rnn_relu"])
def test_copies_are_equal_and_independent(cell: str, module_scorer: bool, duplicate: Callable[[Any], Any]) -> None:
    layer = randomize(make_layer(cell, 3, 4, 2, k_top=2, scorer=Mixer(4) if module_scorer else "dot"))
    x = randn(8, 2, 3)
    expected = layer(x)[0]
    twin = duplicate(layer)
    assert repr(twin) == repr(layer)
    assert torch.equal(twin(x)[0], expected)
    randomize(twin, seed=9)
    assert torch.equal(layer(x)[0], expected)
    assert not torch.allclose(twin(x)[0], expected)
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x)[0], expected)


def test_a_module_as_scorer_belongs_to_the_layer() -> None:
    layer = make_layer("lstm", 3, 4, 2, k_top=2, k_att=1, scorer=Mixer(4))
    names = [name for name, _ in layer.named_parameters() if name.startswith("scorer.")]
    assert names == ["scorer.linear.weight", "scorer.linear.bias"]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    before = layer.scorer.linear.weight.detach().clone()
    weighted_sum([layer(randn(6, 2, 3))[0]]).backward()
    optimizer.step()
    assert not torch.equal(layer.scorer.linear.weight, before)
    layer.float()
    assert layer(randn(6, 2, 3).float())[0].dtype == torch.float32
    assert not layer.eval().scorer.training


def test_the_scorer_that_is_registered_is_the_one_that_is_used() -> None:
    """Wrappers and quantisers replace a submodule by assignment."""
    layer = randomize(make_layer("lstm", 3, 4, k_top=2, k_att=1, scorer=Mixer(4)))
    x = randn(6, 2, 3)
    before = layer(x)[0]
    layer.scorer = randomize(Mixer(4), seed=5)
    assert not torch.allclose(layer(x)[0], before)


def test_a_function_as_scorer() -> None:
    seen: list[tuple[Any, ...]] = []

    def nearest(microstates: Tensor, h: Tensor) -> Tensor:
        seen.append((microstates.shape, h.shape))
        return -(microstates - h.unsqueeze(1)).square().sum(-1)

    layer = randomize(make_layer("gru", 3, 4, k_top=2, k_att=2, scorer=nearest))
    output, state, attention = layer(randn(6, 5, 3), return_attention=True)
    assert seen == [((5, slots, 4), (5, 4)) for slots in (1, 1, 2, 2)]
    assert output.isfinite().all()
    assert (attention.numbers[-1] >= 0).all()
    assert_close(layer(randn(6, 5, 3), state)[0][:1], layer(randn(6, 5, 3)[:1], state)[0])


@pytest.mark.parametrize(
    ("scorer", "given"),
    [
        (lambda m, h: m.sum(), r"\[\]"),
        (lambda m, h: m, r"\[2, 1, 4\]"),
        (lambda m, h: m.sum(-1).T, r"\[1, 2\]"),
        (lambda m, h: None, "None"),
        (lambda m, h: np.zeros(m.shape[:2]), "ndarray"),
    ],
    ids=["scalar", "unreduced", "transposed", "nothing", "array"],
)
def test_a_scorer_that_gives_something_else_is_told(scorer: Any, given: str) -> None:
    layer = make_layer("gru", 3, 4, scorer=scorer, k_att=1)
    with pytest.raises(UserError, match=rf"scorer must .*\[2, 1\].*{given}"):
        layer(randn(4, 2, 3))


def test_a_scorer_whose_scores_are_whole_numbers() -> None:
    layer = make_layer("gru", 3, 4, k_top=1, k_att=1, scorer=lambda m, h: torch.arange(m.shape[1]).expand(len(m), -1))
    _, _, (numbers, _) = layer(randn(5, 2, 3), return_attention=True)
    assert numbers[:, 0, 0].tolist() == [-1, 0, 1, 2, 3]


class Tagger(nn.Module):
    """A user's own model with a layer in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.rnn = sab.SABLSTM(3, 4, batch_first=True, bidirectional=True, k_top=2, k_trunc=3)
        self.head = nn.Linear(8, 5)

    def forward(self, symbols: Tensor) -> Tensor:
        output, _ = self.rnn(torch.relu(self.embedding(symbols)))
        return self.head(output)


def train_two_steps(model: Any, of: nn.Module) -> list[Tensor]:
    """Train `model`, which is `of` or wraps it, and return the losses."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(2):
        symbols = torch.randint(7, (2, 9), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(symbols).flatten(0, 1), symbols.flatten() % 5)
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in of.parameters())
        optimizer.step()
        losses.append(loss.detach())
    return losses


def assert_same_parameters(one: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=lambda message, name=name: f"{name}: {message}")


# The compiler looks at .grad of what comes out of a graph break; only where warnings are errors does that surface.
IGNORE_WARNING_INSIDE_COMPILER = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@IGNORE_WARNING_INSIDE_COMPILER
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_gives_the_same(backend: str) -> None:
    torch._dynamo.reset()
    model = Tagger()
    twin = copy.deepcopy(model)
    losses = train_two_steps(torch.compile(twin, backend=backend), twin)
    torch.testing.assert_close(losses, train_two_steps(model, model))
    assert_same_parameters(model, twin)


@IGNORE_WARNING_INSIDE_COMPILER
def test_torch_compile_takes_a_layer_that_has_not_run_yet_as_one_graph() -> None:
    torch._dynamo.reset()
    layer = make_layer("gru", 3, 4, 2, k_top=2)
    x = randn(7, 2, 3)
    compiled: Any = torch.compile(layer, backend="eager", fullgraph=True)
    assert_close(compiled(x)[0], layer(x)[0])


@IGNORE_WARNING_INSIDE_COMPILER
def test_torch_compile_with_state_lengths_and_attention() -> None:
    torch._dynamo.reset()
    layer = randomize(make_layer("gru", 3, 4, 2, k_top=2))
    compiled: Any = torch.compile(layer, backend="eager")
    x, lengths = randn(7, 2, 3), torch.tensor([7, 4])
    output, state, attention = layer(x, lengths=lengths, return_attention=True)
    output_2, state_2, attention_2 = compiled(x, lengths=lengths, return_attention=True)
    assert_close(output_2, output)
    assert torch.equal(attention_2.numbers, attention.numbers)
    assert_close(compiled(x, state_2)[0], layer(x, state)[0])


def test_ddp_equals_no_ddp(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = Tagger()
        plain, unused = copy.deepcopy(model), copy.deepcopy(model)
        losses = train_two_steps(nn.parallel.DistributedDataParallel(model), model)
        torch.testing.assert_close(losses, train_two_steps(plain, plain))
        assert_same_parameters(model, plain)
        train_two_steps(nn.parallel.DistributedDataParallel(unused, find_unused_parameters=True), unused)
        assert_same_parameters(unused, plain)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("scorer", SCORERS)
def test_a_memory_that_is_read_gives_every_parameter_a_gradient(scorer: str) -> None:
    """Data-parallel training needs that; the affine query's is 0 or nearly so, but it is there."""
    layer = make_layer("lstm", 3, 4, 2, scorer=scorer, max_microstates=3, incorporate="concat")
    layer(randn(6, 2, 3))[0].sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_functional_call_takes_other_parameters() -> None:
    layer = randomize(make_layer("lstm", 3, 4, k_top=2, incorporate="concat"))
    other = randomize(copy.deepcopy(layer), seed=5)
    x = randn(7, 2, 3)
    parameters = {name: parameter.detach().clone() for name, parameter in other.named_parameters()}
    output, _ = torch.func.functional_call(layer, parameters, (x,))
    assert_close(output, other(x)[0])
    with torch.no_grad():
        again, _ = layer(x)
    assert not torch.allclose(again, output), "the layer's own parameters are back"


def test_function_transforms_differentiate_the_layer() -> None:
    layer, x = randomize(make_layer("lstm", 3, 4, k_top=2)), randn(7, 2, 3)
    gradient = torch.func.grad(lambda x: weighted_sum([layer(x)[0]]))(x)
    leaf = x.clone().requires_grad_()
    assert_close(gradient, gradients([layer(leaf)[0]], [leaf])[0])


@pytest.mark.parametrize("name", ["weight_hh_l0", "bias_ih_l0", "attn_w_memory_l0", "incorporate_weight_l0"])
def test_parametrizations_are_followed(name: str) -> None:
    """Weight normalisation, orthogonal weights and the like replace a parameter by a computed one."""

    class Half(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    layer = randomize(make_layer("lstm", 3, 4, k_top=2, incorporate="concat"))
    halved = copy.deepcopy(layer)
    with torch.no_grad():
        halved.get_parameter(name).div_(2)
    x = randn(7, 2, 3)
    expected = halved(x)[0]
    nn.utils.parametrize.register_parametrization(layer, name, Half())
    assert_close(layer(x)[0], expected)


def test_a_default_device_does_not_catch_what_lives_on_the_cpu() -> None:
    """`torch.set_default_device("cuda")` is common; here another device stands for it."""
    layer, x, lengths = make_layer("lstm", 3, 4, bidirectional=True), randn(5, 2, 3), torch.tensor([5, 2])
    expected = layer(x, lengths=lengths)[0]
    with torch.device("meta"):
        output, state = layer(x, lengths=lengths)
        layer(x)
    assert state.steps.device.type == "cpu"
    assert torch.equal(output, expected)


def test_layers_are_made_on_the_meta_device() -> None:
    layer = make_layer("lstm", 3, 4, incorporate="concat", device="meta")
    assert all(parameter.is_meta for parameter in layer.parameters())
    layer.to_empty(device="cpu").reset_parameters()
    assert layer(randn(5, 2, 3))[0].isfinite().all()


def test_no_grad_and_inference_mode() -> None:
    layer, x = make_layer("lstm", 3, 4, k_top=2), randn(6, 2, 3)
    expected = layer(x)[0]
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            output, state = layer(x)
            again, _ = layer(x, state)
        assert not output.requires_grad
        assert_close(output, expected)
        assert not again.requires_grad


def test_frozen_parameters_get_no_gradient() -> None:
    layer = make_layer("lstm", 3, 4, k_top=2).requires_grad_(False)
    x = randn(6, 2, 3).requires_grad_()
    layer(x)[0].sum().backward()
    assert x.grad is not None
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_inputs_are_left_as_they_are() -> None:
    layer = randomize(make_layer("lstm", 3, 4, k_top=2))
    x, h, c = randn(6, 2, 3), randn(1, 2, 4), randn(1, 2, 4, seed=4)
    lengths = torch.tensor([6, 3])
    copies = [tensor.clone() for tensor in (x, h, c, lengths)]
    _, state = layer(x, (h, c), lengths=lengths)
    snapshot = state.to("cpu", copy=True)
    layer(x, state)
    for tensor, saved in zip((x, h, c, lengths), copies, strict=True):
        assert torch.equal(tensor, saved)
    assert torch.equal(state.microstates, snapshot.microstates)
    assert torch.equal(state.h, snapshot.h)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cell", CELLS)
def test_the_output_may_be_changed_in_place(cell: str, backend: str) -> None:
    """As `torch.nn`'s may: `F.dropout(output, inplace=True)` and the like are common."""
    layer = randomize(make_layer(cell, 3, 4, k_top=2, backend=backend))
    x = randn(7, 2, 3).requires_grad_()
    output, state = run(layer, x)
    expected = gradients([output * 2, state.h], [x])[0]
    output, state = run(layer, x)
    before = [part.clone() for part in (*state, state.microstates)]
    output.mul_(2)
    for part, saved in zip((*state, state.microstates), before, strict=True):
        assert torch.equal(part, saved), "the state shares memory with the output"
    assert_close(gradients([output, state.h], [x])[0], expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_activation_checkpointing(backend: str) -> None:
    layer = randomize(make_layer("gru", 3, 4, k_top=2, backend=backend))
    x = randn(7, 2, 3).requires_grad_()
    leaves = [x, *layer.parameters()]
    expected = gradients([layer(x)[0]], leaves)
    actual = gradients([checkpoint(lambda x: layer(x)[0], x, use_reentrant=False)], leaves)  # type: ignore[list-item]
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_that_are_not_contiguous(backend: str) -> None:
    layer = randomize(make_layer("lstm", 3, 4, k_top=2, backend=backend))
    x, h = randn(3, 2, 14).permute(2, 1, 0)[::2], randn(4, 2, 1).permute(2, 1, 0)
    x.requires_grad_()
    output, state = layer(x, (h, h))
    dense = x.detach().contiguous().requires_grad_()
    expected, expected_state = layer(dense, (h.contiguous(), h.contiguous()))
    assert_close(output, expected)
    assert_close(gradients([output], [x])[0], gradients([expected], [dense])[0])
    assert_close(layer(x, state)[0], layer(dense, expected_state)[0])
    assert_close(layer(x[:, :1].expand(-1, 5, -1))[0][:, 3], layer(x[:, :1])[0][:, 0])


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "bias": False}])
@pytest.mark.parametrize("cell", CELLS)
def test_what_code_for_torchs_layers_asks_of_them(cell: str, options: dict[str, Any]) -> None:
    ours, theirs = make_layer(cell, 3, 4, **options), make_torch(cell, 3, 4, **options)
    ours.flatten_parameters()
    assert (ours.mode, ours.proj_size) == (theirs.mode, theirs.proj_size)
    assert ours._all_weights == theirs._all_weights
    parameters = dict(ours.named_parameters())
    for names, weights in zip(ours._all_weights, ours.all_weights, strict=True):
        assert all(parameters[name] is weight for name, weight in zip(names, weights, strict=True))


def test_numpy_integers_are_whole_numbers_too() -> None:
    five: Any = np.int64(5)
    layer = sab.SABLSTM(five, five, k_top=five, k_att=five, k_trunc=five, attention_size=five)
    assert all(type(value) is int for name, value in vars(layer.config).items() if name.startswith("k_"))
    assert layer(torch.randn(7, 2, 5))[0].shape == (7, 2, 5)

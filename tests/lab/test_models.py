"""The model that gets trained: encoder, layers and readout, against its own computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sab
from sab.errors import UserError, UserValueError
from sab.lab.models import ModelConfig, SequenceModel
from tests.ops.cases import CELLS, SCORERS, WEIGHTINGS_AND_FORWARDS, assert_close, gradients, randn, randomize, run

SMALL: dict[str, Any] = {"hidden_size": 4, "k_top": 2, "k_att": 2, "k_trunc": 3}


def make_model(encoding: str = "vector", input_size: int = 3, steps: int = 8, **options: Any) -> Any:
    """A float64 model with three outputs."""
    config = ModelConfig.from_options(SMALL | options)
    model = SequenceModel(config, encoding=encoding, input_size=input_size, output_size=3, steps=steps)
    return randomize(model.double())


def symbols(steps: int = 8, batch: int = 2, below: int = 5) -> Tensor:
    return torch.randint(below, (steps, batch), generator=torch.Generator().manual_seed(0))


# Readouts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("cell", CELLS)
def test_the_hidden_readout(cell: str, num_layers: int) -> None:
    model = make_model(cell=cell, num_layers=num_layers)
    x = randn(8, 2, 3)
    hidden, _ = model.layers(x)
    outputs, model_state = model(x)
    assert_close(outputs, hidden @ model.readout.weight.T + model.readout.bias)
    assert_close(model_state.h, run(model.layers, x)[1].h)
    assert model.readout_attention is None


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("weighting", ["relu", "relu_norm", "softmax", "softmax_sink"])
def test_the_readout_of_weights_is_equation_4(weighting: str, num_layers: int) -> None:
    """y = V1 h + V2 a + b, where a has a place for every microstate number."""
    model = make_model(readout="hidden+weights", weighting=weighting, num_layers=num_layers)
    x = randn(8, 2, 3)
    hidden, _, attention = model.layers(x, return_attention=True)
    v1, v2, b = model.readout.weight, model.readout_attention.weight, model.readout.bias
    assert v2.shape == (3, 4)
    numbers, weights = (part if num_layers == 1 else part[-1] for part in attention)
    expected = []
    for t in range(8):
        rows = []
        for row in range(2):
            a = torch.zeros(4, dtype=torch.float64)
            for number, weight in zip(numbers[t, row].tolist(), weights[t, row], strict=True):
                if number >= 0:
                    a = a + weight * F.one_hot(torch.tensor(number), 4)
            rows.append(v1 @ hidden[t, row] + v2 @ a + b)
        expected.append(torch.stack(rows))
    outputs = model(x)[0]
    assert_close(outputs, torch.stack(expected))
    parameters = list(model.parameters())
    for one, other in zip(
        gradients([outputs], parameters), gradients([torch.stack(expected)], parameters), strict=True
    ):
        assert_close(one, other)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize(("weighting", "forward"), WEIGHTINGS_AND_FORWARDS)
def test_the_readout_of_the_summary(weighting: str, forward: str, num_layers: int) -> None:
    model = make_model(readout="hidden+summary", weighting=weighting, forward=forward, num_layers=num_layers)
    x = randn(8, 2, 3)
    hidden, _, attention = model.layers(x, return_attention=True)
    summary = attention.summary if num_layers == 1 else attention.summary[-1]
    v1, v2, b = model.readout.weight, model.readout_attention.weight, model.readout.bias
    assert v2.shape == (3, 4)
    assert_close(model(x)[0], hidden @ v1.T + summary @ v2.T + b)


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 20))
def test_longer_sequences_than_trained_at(steps: int, k_att: int, longer: int) -> None:
    """Microstates past the last column add nothing; up to there nothing depends on what comes later."""
    model = make_model(readout="hidden+weights", steps=steps, k_att=k_att)
    x = randn(steps + longer, 2, 3)
    outputs, _, attention = model(x, return_attention=True)
    assert_close(outputs[:steps], model(x[:steps])[0])
    hidden, _ = model.layers(x)
    numbers, weights = attention
    columns = steps // k_att
    late = (numbers >= columns) | (numbers < 0)
    extra = outputs - model.readout(hidden)
    nothing = (weights.masked_fill(late, 0.0) == 0).all(-1)
    assert_close(extra[nothing], torch.zeros_like(extra[nothing]))
    if columns > 0:
        a = torch.zeros(*weights.shape[:2], columns, dtype=weights.dtype)
        a = a.scatter_add(-1, numbers.masked_fill(late, 0), weights.masked_fill(late, 0.0))
        assert_close(extra, model.readout_attention(a))


@pytest.mark.parametrize("readout", ["hidden", "hidden+weights", "hidden+summary"])
def test_the_state_continues_exactly(readout: str) -> None:
    model = make_model(readout=readout)
    x = randn(8, 2, 3)
    first, state = model(x[:3])
    second, _ = model(x[3:], state)
    assert_close(torch.cat([first, second]), model(x)[0])


@pytest.mark.parametrize("readout", ["hidden", "hidden+weights", "hidden+summary"])
def test_the_layers_give_attention_only_where_it_is_used(readout: str) -> None:
    """A layer that returns its attention copies its whole memory at each step of a stream."""
    model, asked = make_model(readout=readout), []
    model.layers.register_forward_pre_hook(
        lambda _, __, options: asked.append(options["return_attention"]), with_kwargs=True
    )
    model(randn(8, 2, 3))
    model(randn(8, 2, 3), return_attention=True)
    assert asked == [readout != "hidden", True]


# Encodings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoding", "size", "encode"),
    [
        ("onehot", 5, lambda inputs: torch.eye(5, dtype=torch.float64)[inputs]),
        ("scalar", 1, lambda inputs: inputs[..., None].double()),
        ("vector", 5, lambda inputs: inputs),
    ],
)
def test_encodings(encoding: str, size: int, encode: Callable[[Tensor], Tensor]) -> None:
    model = make_model(encoding, input_size=5)
    inputs = randn(8, 2, 5) if encoding == "vector" else symbols()
    assert_close(model(inputs)[0], model.readout(model.layers(encode(inputs))[0]))
    assert model.layers.input_size == size


# Methods -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS)
def test_bptt_is_torch(cell: str) -> None:
    model = make_model(method="bptt", cell=cell)
    x = randn(8, 2, 3).requires_grad_()
    expected = model.readout(model.layers.to_torch()(x)[0])
    actual = model(x)[0]
    assert_close(actual, expected)
    assert_close(gradients([actual], [x])[0], gradients([expected], [x])[0])


@pytest.mark.parametrize("method", ["bptt", "tbptt"])
@pytest.mark.parametrize("readout", ["hidden", "hidden+weights", "hidden+summary"])
def test_a_baseline_has_no_memory_and_reads_none(method: str, readout: str) -> None:
    model = make_model(method=method, readout=readout)
    assert {name.split("_")[0] for name, _ in model.layers.named_parameters()} == {"weight", "bias"}
    assert model.readout_attention is None
    x = randn(8, 2, 3).requires_grad_()
    touched = gradients([model(x)[0][-1]], [x])[0].flatten(1).any(-1).tolist()
    assert touched == ([True] * 8 if method == "bptt" else [False] * 6 + [True] * 2)


TORCH = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}


@pytest.mark.parametrize("method", ["torch", "torch_start"])
@pytest.mark.parametrize("cell", CELLS)
def test_the_layers_of_torch_are_torchs_own(cell: str, method: str) -> None:
    options = {**SMALL, "method": method, "cell": cell, "num_layers": 2}
    torch.manual_seed(3)
    config = ModelConfig.from_options(options)
    model = SequenceModel(config, encoding="vector", input_size=3, output_size=3, steps=8)
    assert type(model.layers) is TORCH[cell]
    torch.manual_seed(3)
    extra = {"nonlinearity": cell.removeprefix("rnn_")} if cell.startswith("rnn") else {}
    plain = TORCH[cell](3, 4, 2, **extra)
    names = [name for name, _ in model.named_parameters()]
    assert names[:3] == ["layers.weight_ih_l0", "layers.weight_hh_l0", "layers.bias_ih_l0"]
    for name, parameter in plain.named_parameters():
        same = torch.equal(parameter, model.layers.get_parameter(name))
        assert same == (method == "torch" or not name.startswith("weight_ih")), name
    plain.load_state_dict(model.layers.state_dict())
    x = torch.randn(8, 2, 3, requires_grad=True)
    outputs, state = model(x)
    expected = model.readout(plain(x)[0])
    assert torch.equal(outputs, expected)
    assert torch.equal(gradients([outputs], [x])[0], gradients([expected], [x])[0])
    assert (state.c is None) == (cell != "lstm")
    assert state.steps.tolist() == [8, 8]
    assert state.recent(0).microstates.shape == (2, 2, 0, 4)


def test_input_weights_start_by_their_fan_in() -> None:
    torch.manual_seed(0)
    for input_size in (1, 49):
        config = ModelConfig(method="torch_start", hidden_size=128)
        model = SequenceModel(config, encoding="vector", input_size=input_size, output_size=3, steps=8)
        weight = model.layers.weight_ih_l0
        assert weight.std().item() == pytest.approx(2 * input_size**-0.5, rel=0.1)
        assert weight.abs().max() <= 2.001 * (3 / input_size) ** 0.5
        assert weight.requires_grad
        assert model.layers.weight_hh_l0.abs().max() <= 128**-0.5


@pytest.mark.parametrize("cell", CELLS)
def test_the_state_of_torchs_layers_continues(cell: str) -> None:
    model = make_model(method="torch", cell=cell, num_layers=2)
    x = randn(8, 2, 3)
    first, state = model(x[:3])
    state = state.detach().select([1, 0]).select([1, 0]).recent(5)
    second, end = model(x[3:], state)
    assert_close(torch.cat([first, second]), model(x)[0])
    assert end.steps.tolist() == [8, 8]
    plain = (state.h, state.c) if cell == "lstm" else state.h
    assert_close(model(x[3:], plain)[0], second)


def test_the_layers_of_torch_have_no_attention() -> None:
    model = make_model(method="torch", readout="hidden+summary")
    assert model.readout_attention is None
    with pytest.raises(UserError, match=r"^return_attention must be False where method is 'torch'; got True"):
        model(randn(8, 2, 3), return_attention=True)
    with pytest.raises(UserError, match=r"^module must be or have one SAB layer"):
        sab.trace(model, randn(8, 2, 3))


@pytest.mark.parametrize("scorer", SCORERS)
def test_every_option_reaches_the_layers(scorer: str) -> None:
    options: dict[str, Any] = {
        "k_top": 3, "k_att": 1, "k_trunc": 4, "scorer": scorer, "weighting": "softmax_sink", "forward": "dense",
        "incorporate": "concat", "attention_size": 2, "max_microstates": 5, "backend": "reference",
        "input_start": "torch",
    }  # fmt: skip
    config = ModelConfig.from_options({"hidden_size": 4, **options})
    model = SequenceModel(config, encoding="vector", input_size=3, output_size=2, steps=5)
    assert model.layers.config == config.memory == sab.SABConfig(**options)


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "option", "words"),
    [
        ({"method": "hebb"}, "method", "sab, bptt, tbptt, torch, torch_start"),
        ({"cell": "LSTM"}, "cell", "lstm, gru, rnn_tanh, rnn_relu"),
        ({"hidden_size": 0}, "hidden_size", "at least 1"),
        ({"num_layers": 0}, "num_layers", "at least 1"),
        ({"readout": "summary"}, "readout", "hidden, hidden+weights, hidden+summary"),
        ({"k_top": -1}, "k_top", "at least 0"),
        ({"method": "tbptt", "k_trunc": None}, "k_trunc", "tbptt"),
        ({"readout": "hidden+weights", "forward": "dense"}, "readout", "dense"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], option: str, words: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        ModelConfig.from_options(options)
    assert isinstance(caught.value, UserError)
    assert caught.value.option == option
    assert str(caught.value).startswith(f"{option} must be ")
    assert words in str(caught.value)
    assert "; got " in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("encoding", "embedding"),
        ("input_size", 0),
        ("output_size", 0),
        ("steps", 0),
        ("steps", None),
    ],
)
def test_a_bad_argument_of_the_model_is_named(option: str, value: Any) -> None:
    arguments: dict[str, Any] = {"encoding": "vector", "input_size": 3, "output_size": 2, "steps": 5} | {option: value}
    with pytest.raises((ValueError, TypeError)) as caught:
        SequenceModel(ModelConfig.from_options({**SMALL, "readout": "hidden+weights"}), **arguments)
    assert isinstance(caught.value, UserError)
    assert str(caught.value).startswith(f"{option} must be ")


@pytest.mark.parametrize(
    ("encoding", "inputs"),
    [
        ("onehot", torch.tensor([[0], [5]])),
        ("onehot", torch.tensor([[0], [-1]])),
        ("onehot", torch.tensor([[0.5], [1.0]])),
        ("vector", torch.zeros(4, 2, 3)),
        ("vector", torch.full((4, 2, 5), torch.nan)),
        ("scalar", torch.zeros(4, 2, 1)),
        ("vector", torch.zeros(0, 2, 5)),
    ],
    ids=["too large", "negative", "not whole", "size", "nan", "too deep", "empty"],
)
def test_bad_inputs_of_the_model_are_told(encoding: str, inputs: Tensor) -> None:
    model = make_model(encoding, input_size=5)
    with pytest.raises(UserError) as caught:
        model(inputs)
    assert "must" in str(caught.value)


def test_the_lab_keeps_layer_norm_with_a_run() -> None:
    config = ModelConfig.from_options({"layer_norm": True, "method": "bptt"})
    assert config.options()["layer_norm"] is True
    assert config.layer_config().layer_norm
    assert config.effective().memory.layer_norm, "a baseline has it too"
    older = {name: value for name, value in ModelConfig().options().items() if name != "layer_norm"}
    assert ModelConfig.from_options(older) == ModelConfig()
    with pytest.raises(UserValueError, match="layer_norm must be False where method is 'torch'; got True"):
        ModelConfig.from_options({"layer_norm": True, "method": "torch"})

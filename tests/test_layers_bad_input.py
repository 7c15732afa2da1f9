"""Every mistake gets one sentence that names the option, what is allowed and what was given."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from torch.nn.utils.rnn import pack_sequence

import sab
from sab.errors import UserError
from tests.ops.cases import DOUBLE, assert_close, make_layer, randn


def check_mistake(error: BaseException, option: str, *words: str) -> None:
    """One sentence that names the option and holds these words."""
    assert isinstance(error, UserError)
    sentence = str(error)
    assert error.option == option
    assert sentence.startswith(option), sentence
    assert sentence.endswith("."), sentence
    assert "\n" not in sentence
    for word in words:
        assert word in sentence, sentence


BAD_OPTIONS: list[tuple[str, Any, type[Exception], str]] = [
    *((name, value, TypeError, "at least 1") for name in ("input_size", "hidden_size", "num_layers")
      for value in (2.0, "2", None, True, [2], torch.ones(2))),
    *((name, value, ValueError, "at least 1") for name in ("input_size", "hidden_size", "num_layers")
      for value in (0, -1)),
    *((name, value, TypeError, "True or False") for name in ("bias", "batch_first", "bidirectional")
      for value in (1, 0, None, "True")),
    *(("dropout", value, TypeError, "at most 1") for value in ("0.1", None, True, [0.1])),
    *(("dropout", value, ValueError, "at most 1") for value in (-0.1, 1.1, float("nan"), float("inf"))),
    *((name, value, TypeError, "at least")
      for name in ("k_top", "k_att", "k_trunc", "attention_size", "max_microstates")
      for value in (1.5, "3", True, [1], torch.ones(2))),
    ("k_top", None, TypeError, "at least 0"),
    ("k_att", None, TypeError, "at least 1"),
    ("k_top", -1, ValueError, "at least 0"),
    *((name, value, ValueError, "at least 1") for name in ("k_att", "k_trunc", "attention_size", "max_microstates")
      for value in (0, -3)),
    ("scorer", "afine", ValueError, "affine, affine_tanh, mlp, dot, cosine, or a callable"),
    *(("scorer", value, TypeError, "mlp, dot, cosine, or a callable") for value in (None, 3, ["mlp"])),
    ("weighting", "sigmoid", ValueError, "relu, relu_norm, softmax, softmax_sink"),
    *(("weighting", value, TypeError, "relu, relu_norm, softmax, softmax_sink") for value in (None, 3, torch.softmax)),
    ("forward", "Sparse", ValueError, "sparse, dense"),
    *(("forward", value, TypeError, "sparse, dense") for value in (None, True)),
    ("incorporate", "sum", ValueError, "add, concat, add_bounded"),
    *(("incorporate", value, TypeError, "add, concat, add_bounded") for value in (None, 1)),
    ("backend", "gpu", ValueError, "auto, "),
    *(("backend", value, TypeError, "auto, ") for value in (None, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("option", "value", "kind", "allowed"), BAD_OPTIONS)
@pytest.mark.parametrize("cls", [sab.SABLSTM, sab.SABRNN])
def test_a_bad_option_is_named(cls: Any, option: str, value: Any, kind: type[Exception], allowed: str) -> None:
    arguments: dict[str, Any] = {"input_size": 3, "hidden_size": 4} | {option: value}
    with pytest.raises(kind) as caught:
        cls(**arguments)
    check_mistake(caught.value, option, allowed, repr(value))


def test_a_bad_combination_is_named() -> None:
    for weighting in ("relu", "relu_norm"):
        with pytest.raises(ValueError, match="dense") as caught:
            sab.SABLSTM(3, 4, weighting=weighting, forward="dense")
        check_mistake(caught.value, "weighting", "softmax, softmax_sink", "dense", repr(weighting))


@pytest.mark.parametrize("value", ["sigmoid", None, 3])
def test_a_bad_nonlinearity_is_named(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        sab.SABRNN(3, 4, nonlinearity=value)
    check_mistake(caught.value, "nonlinearity", "tanh, relu", repr(value))


def test_unknown_options_are_refused_as_python_does() -> None:
    for cls in (sab.SABLSTM, sab.SABGRU, sab.SABRNN):
        unknown: dict[str, Any] = {"k_topp": 3}
        with pytest.raises(TypeError, match="k_topp"):
            cls(3, 4, **unknown)
        with pytest.raises(TypeError):
            cls(3, 4, 1, "tanh", True, False, 0.0, False, None, None, 5)  # type: ignore[arg-type]


BAD_INPUTS: list[tuple[Any, type[Exception], str]] = [
    (randn(5, 2, 4), ValueError, "[5, 2, 4]"),
    (randn(5, 4), ValueError, "[5, 4]"),
    (randn(3), ValueError, "[3]"),
    (randn(1, 5, 2, 3), ValueError, "[1, 5, 2, 3]"),
    (randn(), ValueError, "[]"),
    (randn(0, 2, 3), ValueError, "[0, 2, 3]"),
    (randn(0, 0, 3), ValueError, "[0, 0, 3]"),
    (randn(0, 3), ValueError, "[0,"),
    (randn(5, 2, 3).float(), TypeError, "torch.float32"),
    (torch.zeros(5, 2, 3, dtype=torch.int64), TypeError, "torch.int64"),
    (torch.zeros(5, 2, 3, dtype=torch.bool), TypeError, "torch.bool"),
    (np.zeros((5, 2, 3)), TypeError, "ndarray"),
    ([[1.0, 2.0, 3.0]], TypeError, "list"),
    (None, TypeError, "NoneType"),
    (pack_sequence([torch.zeros(3, 4, dtype=DOUBLE)]), ValueError, "4]"),
    (pack_sequence([torch.zeros(3, 3)]), TypeError, "torch.float32"),
]


@pytest.mark.parametrize(("value", "kind", "given"), BAD_INPUTS)
def test_a_bad_input_is_told(value: Any, kind: type[Exception], given: str) -> None:
    with pytest.raises(kind) as caught:
        make_layer("lstm", 3, 4)(value)
    check_mistake(caught.value, "input", given)


def test_nan_in_the_input_is_told_where() -> None:
    x = randn(5, 2, 3)
    x[3, 1, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN at step 3 of row 1") as caught:
        make_layer("lstm", 3, 4)(x)
    check_mistake(caught.value, "input")
    with pytest.raises(ValueError, match="NaN at step 3 of row 1"):
        make_layer("lstm", 3, 4, batch_first=True)(x.transpose(0, 1))
    with pytest.raises(ValueError, match="NaN at step 3 of row 1"):
        make_layer("lstm", 3, 4)(x, lengths=[1, 4])
    with pytest.raises(ValueError, match="NaN at step 1 of row 0"):
        make_layer("lstm", 3, 4)(pack_sequence([torch.tensor([[0.0] * 3, [torch.nan] * 3], dtype=DOUBLE)]))


H = torch.zeros(1, 2, 4, dtype=DOUBLE)
BAD_STATES: list[tuple[str, Any, type[Exception], str]] = [
    ("lstm", H, ValueError, "(h, c)"),
    ("lstm", (H,), ValueError, "(h, c)"),
    ("lstm", (H, H, H), ValueError, "(h, c)"),
    ("gru", (H, H), ValueError, "hx must be h "),
    ("lstm", (), ValueError, "(h, c)"),
    ("lstm", "state", TypeError, "str"),
    ("lstm", 3, TypeError, "int"),
    ("lstm", {"h": H, "c": H}, TypeError, "dict"),
    ("gru", H.numpy(), TypeError, "ndarray"),
    ("lstm", (H, None), TypeError, "None"),
    ("lstm", (H, "c"), TypeError, "str"),
    ("lstm", (H.numpy(), H.numpy()), TypeError, "ndarray"),
    ("lstm", (H[0], H[0]), ValueError, "[2, 4]"),
    ("lstm", (H, H[:, :1]), ValueError, "[1, 1, 4]"),
    ("lstm", (H[..., :3], H), ValueError, "[1, 2, 3]"),
    ("gru", torch.zeros(2, 2, 4, dtype=DOUBLE), ValueError, "[2, 2, 4]"),
    ("lstm", (H.float(), H.float()), TypeError, "torch.float32"),
    ("gru", H.long(), TypeError, "torch.int64"),
]


@pytest.mark.parametrize(("cell", "hx", "kind", "given"), BAD_STATES)
def test_a_bad_hx_is_told(cell: str, hx: Any, kind: type[Exception], given: str) -> None:
    with pytest.raises(kind) as caught:
        make_layer(cell, 3, 4)(randn(5, 2, 3), hx)
    check_mistake(caught.value, "hx", given)


@pytest.mark.parametrize(
    ("hx", "kind", "given"),
    [
        ((1, 2), TypeError, "int"),
        ((H, H), ValueError, "[1, 2, 4]"),
        ((H[:, :1], H[:, :1]), ValueError, "[1, 1, 4]"),
        ((H[0, :1, :3], H[0, :1]), ValueError, "[1, 3]"),
    ],
)
def test_a_bad_hx_of_unbatched_input_is_told_in_its_own_shape(hx: Any, kind: type[Exception], given: str) -> None:
    with pytest.raises(kind) as caught:
        make_layer("lstm", 3, 4)(randn(5, 3), hx)
    check_mistake(caught.value, "hx", f"got {given}")


def test_a_state_of_another_layer_is_refused() -> None:
    x = randn(5, 2, 3)
    state = make_layer("lstm", 3, 4, scorer="dot", attention_size=2, k_top=2)(x)[1]
    others = {
        "another size": make_layer("lstm", 3, 5, scorer="dot", attention_size=2, k_top=2),
        "another cell": make_layer("gru", 3, 4, scorer="dot", attention_size=2, k_top=2),
        "another scorer": make_layer("lstm", 3, 4, scorer="affine", k_top=2),
        "other keys": make_layer("lstm", 3, 4, scorer="dot", attention_size=3, k_top=2),
        "more layers": make_layer("lstm", 3, 4, 2, scorer="dot", attention_size=2, k_top=2),
        "another type": make_layer("lstm", 3, 4, scorer="dot", attention_size=2, k_top=2, dtype=torch.float32),
    }
    for layer in others.values():
        with pytest.raises(UserError) as caught:
            layer(x.to(next(layer.parameters()).dtype), state)
        check_mistake(caught.value, "hx")
    layer = make_layer("lstm", 3, 4, scorer="dot", attention_size=2, k_top=2)
    with pytest.raises(ValueError, match="hx must have h of shape"):
        layer(randn(5, 3, 3), state)
    with pytest.raises(ValueError, match="hx must have h of shape"):
        layer(x[:, 0], state)
    with pytest.raises(ValueError, match="hx must have h of shape"):
        layer(x, layer(x[:, 0])[1])


BAD_LENGTHS: list[tuple[Any, type[Exception], str]] = [
    ([5], ValueError, "[1]"),
    ([5, 5, 5], ValueError, "[3]"),
    ([[5, 5]], ValueError, "[1, 2]"),
    (5, ValueError, "[]"),
    ([0, 5], ValueError, "[0, 5]"),
    ([-1, 5], ValueError, "[-1, 5]"),
    ([5, 6], ValueError, "[5, 6]"),
    ([5.0, 5.0], TypeError, "float"),
    ([True, True], TypeError, "bool"),
    (torch.tensor([5, 5]) * 1j, TypeError, "complex"),
    ("55", TypeError, "'55'"),
    ([5, None], TypeError, "[5, None]"),
    ({"a": 5}, TypeError, "{'a': 5}"),
    ([[5], [5, 5]], (TypeError, ValueError), "[[5], [5, 5]]"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("lengths", "kind", "given"), BAD_LENGTHS)
def test_bad_lengths_are_told(lengths: Any, kind: type[Exception], given: str) -> None:
    with pytest.raises(kind) as caught:
        make_layer("lstm", 3, 4)(randn(5, 2, 3), lengths=lengths)
    check_mistake(caught.value, "lengths", "whole numbers", given)


def test_lengths_beside_a_packed_sequence_are_refused() -> None:
    packed = pack_sequence([randn(3, 3), randn(2, 3)])
    with pytest.raises(ValueError, match="PackedSequence") as caught:
        make_layer("lstm", 3, 4)(packed, lengths=torch.tensor([3, 2]))
    check_mistake(caught.value, "lengths")


def test_double_input_under_autocast_is_told() -> None:
    layer = sab.SABLSTM(3, 4)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError) as caught:
        layer(randn(5, 2, 3))
    check_mistake(caught.value, "input", "torch.float64")


def test_states_made_by_hand_are_checked() -> None:
    layer = sab.SABGRU(3, 4)
    state = layer(torch.zeros(5, 2, 3))[1].state
    for change, words in (
        ({"steps": torch.tensor([-1, 5])}, "steps from 0 to 2147483647; got [-1, 5]"),
        ({"steps": torch.full((2,), 2**63 - 2)}, "steps from 0 to 2147483647; got [9223372036854775806,"),
        ({"steps": torch.zeros(2, dtype=torch.int64, device="meta")}, "steps on the CPU; got meta"),
        ({"numbers": None}, "numbers of shape [1, 2, 2]; got None"),
        ({"keys": [1.0]}, "keys that is a tensor of layout torch.strided; got list"),
        ({"h": state.h.to_sparse()}, "h that is a tensor of layout torch.strided; got torch.sparse_coo"),
        ({"steps": state.steps.double()}, "steps of type torch.int64; got torch.float64"),
        ({"numbers": state.numbers.float()}, "numbers of type torch.int64; got torch.float32"),
        ({"keys": state.keys.double()}, "keys of type torch.float32; got torch.float64"),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            layer(torch.zeros(5, 2, 3), dataclasses.replace(state, **change))
        check_mistake(caught.value, "hx", words)


@pytest.mark.parametrize(("option", "most"), [("k_top", 2**63 - 1), ("k_att", 2**31 - 1), ("k_trunc", 2**31 - 1)])
def test_numbers_that_nobody_counts_to_are_refused(option: str, most: int) -> None:
    with pytest.raises(ValueError, match=rf"^{option} must be .*, and at most {most}; got {2**64}"):
        sab.SABLSTM(3, 4, **{option: 2**64})  # pyright: ignore[reportArgumentType]
    layer = make_layer("lstm", 3, 4, **{option: most})
    layer(randn(5, 2, 3))[0].sum().backward()


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, "float32"])
def test_a_type_that_is_not_floating_point_is_refused(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"^dtype must be a floating-point type of torch; got "):
        sab.SABLSTM(3, 4, dtype=dtype)


def test_a_class_is_no_scorer() -> None:
    with pytest.raises(TypeError, match=r"^scorer must be one of .*, or a callable; got "):
        sab.SABLSTM(3, 4, scorer=torch.nn.Bilinear)  # pyright: ignore[reportArgumentType]


def test_one_length_for_unbatched_input() -> None:
    layer = sab.SABLSTM(3, 4)
    x = torch.randn(5, 3)
    assert_close(layer(x, lengths=3)[0][:3], layer(x[:3])[0])  # pyright: ignore[reportArgumentType, reportCallIssue]


@pytest.mark.parametrize("cls", [sab.SABLSTM, sab.SABGRU, sab.SABRNN])
def test_a_projection_is_refused_by_name(cls: Any) -> None:
    assert cls(3, 4, proj_size=0).hidden_size == 4
    with pytest.raises(ValueError, match=r"^proj_size must be 0: .*; got 2\.$"):
        cls(3, 4, proj_size=2)


def test_only_a_state_can_be_compact() -> None:
    with pytest.raises(TypeError, match=r"^state must be a SABState or a SABHidden; got tuple"):
        sab.SABLSTM(3, 4).compact((torch.zeros(1), torch.zeros(1)))  # pyright: ignore[reportArgumentType]


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=layout)


INPUTS_OF_OTHER_KINDS = {
    "sparse": (lambda: torch.zeros(4, 2, 3).to_sparse(), TypeError, "layout torch.sparse_coo"),
    "compressed": (lambda: torch.zeros(4, 3).to_sparse_csr(), TypeError, "layout torch.sparse_csr"),
    "nested": (lambda: nested(torch.strided), TypeError, "a nested tensor"),
    "jagged": (lambda: nested(torch.jagged), TypeError, "a nested tensor"),
    "meta": (lambda: torch.zeros(4, 2, 3, device="meta"), ValueError, "the layer's device cpu; got one on meta"),
}


@pytest.mark.filterwarnings("ignore:.*(nested|Sparse CSR).*:UserWarning")
@pytest.mark.parametrize("kind", INPUTS_OF_OTHER_KINDS)
def test_an_input_of_another_kind_gets_a_sentence(kind: str) -> None:
    make, error, words = INPUTS_OF_OTHER_KINDS[kind]
    with pytest.raises(error) as caught:
        sab.SABLSTM(3, 5)(make())
    check_mistake(caught.value, "input", words)


def test_a_layer_on_the_meta_device_takes_an_input_from_there_alone() -> None:
    layer = sab.SABGRU(3, 5, device="meta")
    output = layer(torch.zeros(4, 2, 3, device="meta"))[0]
    assert (output.shape, output.device.type) == ((4, 2, 5), "meta")
    with pytest.raises(UserError, match="the layer's device meta; got one on cpu"):
        layer(torch.zeros(4, 2, 3))

"""SABConfig: validated once; whatever it accepts, a layer runs with."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sab
from sab.config import BACKENDS, FORWARDS, INPUT_STARTS
from sab.errors import UserError
from sab.parts.registry import INCORPORATIONS, SCORERS, WEIGHTINGS

GOOD = {
    "k_top": st.integers(0, 4),
    "k_att": st.integers(1, 4),
    "k_trunc": st.none() | st.integers(1, 4),
    "scorer": st.sampled_from(sorted(SCORERS)),
    "weighting": st.sampled_from(sorted(WEIGHTINGS)),
    "forward": st.sampled_from(FORWARDS),
    "incorporate": st.sampled_from(sorted(INCORPORATIONS)),
    "input_start": st.sampled_from(INPUT_STARTS),
    "attention_size": st.none() | st.integers(1, 4),
    "max_microstates": st.none() | st.integers(1, 4),
    "backend": st.sampled_from(["auto", "reference"]),
    "max_memory": st.none() | st.integers(1, 4),
    "forget": st.just("recent"),
    "memory": st.just("flat"),
    "block_size": st.just(16),
    "blocks": st.just(8),
}
JUNK = st.one_of(
    st.none(), st.booleans(), st.floats(), st.text(max_size=5), st.integers(-3, 3), st.binary(max_size=2),
    st.lists(st.integers(), max_size=2), st.sampled_from([object(), torch.zeros(2), 1j]),
)  # fmt: skip


def test_the_defaults() -> None:
    config = sab.SABConfig()
    assert (config.k_top, config.k_att, config.k_trunc) == (10, 2, 10)
    parts = (config.scorer, config.weighting, config.forward, config.incorporate)
    assert parts == ("cosine", "softmax", "sparse", "gate")
    assert (config.initial_gate, config.input_start) == (None, "fan_in")
    assert config.backend == "auto"
    assert "auto" in BACKENDS
    assert sab.SABLSTM(3, 4).config == sab.SABGRU(3, 4).config == sab.SABRNN(3, 4).config == config


def test_the_layers_take_every_option_of_the_configuration() -> None:
    options: dict[str, Any] = {
        "k_top": 3, "k_att": 1, "k_trunc": None, "scorer": "dot", "weighting": "softmax_sink", "forward": "dense",
        "incorporate": "gate", "initial_gate": 0.1, "input_start": "torch", "attention_size": 2, "max_microstates": 5,
        "backend": "cpu", "layer_norm": True, "max_memory": 9, "forget": "reservoir", "recompute": True,
        "offload": True,
    }  # fmt: skip
    levels = {"memory": "hierarchical", "block_size": 3, "blocks": 5}  # which do not go with all of the others
    assert {*options, *levels} == {field.name for field in dataclasses.fields(sab.SABConfig)}
    for cls in (sab.SABLSTM, sab.SABGRU, sab.SABRNN):
        assert cls(3, 4, **options).config == sab.SABConfig(**options)
        assert cls(3, 4, **levels).config == sab.SABConfig(**levels)


@given(st.fixed_dictionaries(GOOD))
def test_what_is_allowed_runs(options: dict[str, Any]) -> None:
    if options["forward"] == "dense" and options["weighting"].startswith("relu"):
        with pytest.raises(ValueError, match="weighting must be one of softmax, softmax_sink where forward is 'dense'"):
            sab.SABConfig(**options)
        return
    assert sab.SABConfig(**options) == sab.SABConfig(**options)
    output, _ = sab.SABGRU(1, 2, **options)(torch.randn(5, 1, 1))
    assert output.isfinite().all()


def mistake_of(options: dict[str, Any]) -> UserError | None:
    try:
        sab.SABConfig(**options)
    except UserError as mistake:
        return mistake
    return None


@given(st.sampled_from(sorted(GOOD)), JUNK)
def test_anything_else_is_refused_by_name(option: str, value: Any) -> None:
    """Either it is allowed, and then a layer runs with it, or a sentence names it."""
    junk: dict[str, Any] = {option: value}
    mistake = mistake_of(junk)
    if mistake is None:
        sab.SABLSTM(2, 2, **junk)(torch.randn(3, 1, 2))
        return
    assert isinstance(mistake, ValueError | TypeError)
    assert mistake.option == option
    assert str(mistake).startswith(f"{option} must be ")
    assert str(mistake).endswith(f"got {value!r}.")
    with pytest.raises(type(mistake)) as caught:
        sab.SABLSTM(3, 4, **junk)
    assert str(caught.value) == str(mistake)


def test_a_configuration_is_a_value() -> None:
    config = sab.SABConfig(k_top=3)
    assert hash(config) == hash(sab.SABConfig(k_top=3))
    assert dataclasses.replace(config, k_top=10) == sab.SABConfig()
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.k_top = 4  # type: ignore[misc]
    with pytest.raises(ValueError, match="k_att"):
        dataclasses.replace(config, k_att=0)

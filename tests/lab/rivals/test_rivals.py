"""Every rival as a model: it trains on every task, does not see later inputs, and streams as it reads a whole."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sab.errors import UserValueError
from sab.lab import cli
from sab.lab.models import ModelConfig, SequenceModel
from sab.lab.rivals import ONLINE, RIVALS, RivalState
from sab.lab.rivals.base import load
from sab.lab.rivals.packages import slstm_step
from sab.lab.rivals.recurrent import scan
from sab.lab.tasks import TASKS, Copying
from sab.lab.training import Run, RunConfig, TrainConfig, train
from sab.lab.training.evaluation import predict_on
from sab.lab.training.text import character_task, sample
from tests.ops.cases import assert_close, randn

SIZE = 8
STEPS = 12


def of_package(method: str) -> Any:
    package = RIVALS[method].package
    is_missing = package is not None and importlib.util.find_spec(package) is None
    return pytest.param(method, marks=pytest.mark.skipif(is_missing, reason=f"needs {package}, extra `rivals`"))


EVERY = [of_package(method) for method in RIVALS]
MODELS = [of_package(method) for method, rival in RIVALS.items() if not rival.is_like_torch]


def make_model(method: str, layers: int = 2, **options: Any) -> SequenceModel:
    torch.manual_seed(0)
    layers = min(layers, RIVALS[method].most_layers or layers)
    config = ModelConfig(method=method, hidden_size=SIZE, num_layers=layers, **options)
    model = SequenceModel(config, encoding="vector", input_size=3, output_size=4, steps=STEPS)
    with torch.no_grad():  # away from starts at 0, at which some inputs would make no difference
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def inputs(steps: int = STEPS, rows: int = 2, seed: int = 1) -> Tensor:
    return randn(steps, rows, 3, seed=seed).float()


# The layers


@pytest.mark.parametrize("method", EVERY)
def test_the_output_at_a_step_does_not_depend_on_later_inputs(method: str) -> None:
    model = make_model(method)

    @settings(max_examples=8, deadline=None)
    @given(st.integers(1, STEPS), st.data())
    def check(steps: int, data: st.DataObject) -> None:
        cut = data.draw(st.integers(0, steps - 1))
        x = inputs(steps)
        other = torch.cat([x[:cut], inputs(steps, seed=2)[cut:]])
        with torch.no_grad():
            one, two = model(x)[0], model(other)[0]
        assert_close(one[:cut], two[:cut], method)
        assert (one[cut] - two[cut]).abs().max() > 1e-4, "an input makes a difference at its own step"

    check()


@pytest.mark.parametrize("method", EVERY)
def test_rows_do_not_mix(method: str) -> None:
    model, x = make_model(method), inputs(rows=3)
    with torch.no_grad():
        assert_close(model(x)[0][:, 1:2], model(x[:, 1:2])[0], method, 1e-4)


@pytest.mark.parametrize("pieces", [[1] * STEPS, [5, 1, 6]])
@pytest.mark.parametrize("method", EVERY)
def test_a_stream_is_the_whole_sequence(method: str, pieces: list[int]) -> None:
    model, x = make_model(method), inputs()
    if not RIVALS[method].streams:
        with pytest.raises(UserValueError, match="method must be one that can read a stream"):
            model.first_state()
        return
    with torch.no_grad():
        whole = model(x)[0]
        state, found = model.first_state(), []
        for piece in x.split(pieces):
            outputs, state = model(piece, state)
            found.append(outputs)
        assert_close(torch.cat(found), whole, method, 1e-4)
        assert state is not None
        rows = state.select([1])
        again = model(inputs(3, 2, 5)[:, 1:], rows)[0]
        assert_close(again, model(inputs(3, 2, 5), state)[0][:, 1:], method, 1e-4)
    if model.is_rival:
        assert isinstance(state, RivalState)
        assert state.parts is not None
        longest = max(part.shape[-2] for part in state.parts)
        assert RIVALS[method].grows == (longest == STEPS)
        if state.grows:
            assert {part.shape[-2] for part in state.recent(4).parts or ()} == {4}
        else:
            assert state.recent(4) is state


@pytest.mark.parametrize("method", MODELS)
def test_a_longer_sequence_than_in_training(method: str) -> None:
    model, x = make_model(method), inputs(2 * STEPS + 1)
    with torch.no_grad():
        without = model(x)[0]
    assert without.shape == (2 * STEPS + 1, 2, 4)
    assert_close(without, model(x)[0].detach(), method, 1e-4)


def test_chrono_starts_with_memories_of_every_length() -> None:
    n, steps = 400, 300
    for cell, keeps in (("lstm", slice(n, 2 * n)), ("gru", slice(n, 2 * n))):
        config = ModelConfig(method="chrono", cell=cell, hidden_size=n, num_layers=2)
        layers = SequenceModel(config, encoding="vector", input_size=3, output_size=2, steps=steps).layers
        for number in (0, 1):
            bias = (getattr(layers, f"bias_ih_l{number}") + getattr(layers, f"bias_hh_l{number}")).detach()
            spans = bias[keeps].exp()
            assert 1 <= spans.min() < 20
            assert 280 < spans.max() <= steps - 1
            assert 130 < spans.mean() < 170, "uniform"
            if cell == "lstm":
                assert_close(bias[:n], -bias[keeps])
        assert type(layers) is {"lstm": nn.LSTM, "gru": nn.GRU}[cell]


@pytest.mark.parametrize("steps", [1, 2, 7, 16])
def test_the_scan_is_the_recurrence(steps: int) -> None:
    factor, values = (
        torch.complex(randn(3), randn(3, seed=2)) / 2,
        torch.complex(randn(2, steps, 3), randn(2, steps, 3)),
    )
    state, expected = torch.zeros_like(values[:, 0]), []
    for t in range(steps):
        state = factor * state + values[:, t]
        expected.append(state)
    assert_close(torch.view_as_real(scan(factor, values)), torch.view_as_real(torch.stack(expected, 1)))


# Training

TINY_TASKS: dict[str, dict[str, Any]] = {
    "copying": {"length": 3},
    "adding": {"length": 6},
    "recall": {"length": 9, "pairs": 2, "keys": 3},
    "mnist": {},
    "ptb": {"length": 12},
}


needs_xlstm = pytest.mark.skipif(importlib.util.find_spec("xlstm") is None, reason="needs xlstm, extra `rivals`")


@needs_xlstm
@pytest.mark.parametrize("is_first", [False, True])
def test_a_step_of_an_slstm_is_the_packages_own(is_first: bool) -> None:
    packages_own = importlib.import_module("xlstm.blocks.slstm.src.vanilla.slstm").slstm_forward_pointwise
    gates, states = [randn(5, 32, seed=seed) for seed in (1, 2)], randn(4, 5, 8)
    states[2] = 0.0 if is_first else states[2].abs()
    given = [tensor.requires_grad_() for tensor in (*gates, randn(32, seed=3), states)]
    found: list[list[Tensor]] = []
    steps: list[Any] = [slstm_step, packages_own]
    for step in steps:
        made = step(*given, {})
        total = torch.stack([(tensor * tensor.detach().cos()).sum() for tensor in made]).sum()
        found.append([*made, *torch.autograd.grad(total, given)])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


@needs_xlstm
def test_xlstm_reads_no_value_of_the_device() -> None:
    """On `meta` there is none; the package's own step reads one, and stays as it is for other models."""
    with torch.device("meta"):
        model = make_model("xlstm")
        outputs = model(torch.empty(STEPS, 2, 3))[0]
        outputs.sum().backward()
        state = model(torch.empty(1, 2, 3), model.first_state())[1]
        model(torch.empty(1, 2, 3), state)
    assert outputs.is_meta
    registry = importlib.import_module("xlstm.blocks.slstm.src.vanilla").slstm_pointwise_function_registry
    assert slstm_step not in registry.values()


@pytest.mark.usefixtures("tiny_data")
@pytest.mark.parametrize("method", EVERY)
def test_it_trains_on_every_task(method: str, tmp_path: Path) -> None:
    for name, options in TINY_TASKS.items():
        if name == "mnist" and method in ONLINE:
            continue  # they are not meant for so many steps
        task = TASKS[name](**options)
        rows = 2 if name == "mnist" else 12  # some have a matrix of all pairs of steps
        training = TrainConfig(2, rows, eval_every=2, eval_batches=1, threads=1, device="cpu")
        layers = 2 if method == "xlstm" else 1
        config = RunConfig(task, ModelConfig(method=method, hidden_size=SIZE, num_layers=layers), training)
        before = config.build_model(torch.device("cpu"))
        result = train(task, config.model, training, tmp_path / name)
        assert (result.status, result.iterations) == ("finished", 2), name
        if name == "ptb":
            assert ("bits_per_character_carried" in result.metrics) == RIVALS[method].streams
        assert before.state_dict().keys() == config.build_model(torch.device("cpu")).state_dict().keys()


@pytest.mark.parametrize("method", ["uoro", "lru"])
def test_a_resumed_run_equals_the_uninterrupted_one(method: str, tmp_path: Path) -> None:
    task, model = Copying(length=3), ModelConfig(method=method, hidden_size=SIZE)
    options: dict[str, Any] = {"batch_size": 2, "eval_every": 2, "eval_batches": 1, "threads": 1, "device": "cpu"}
    for folder, iterations in (("whole", [4]), ("parts", [2, 4])):
        for number, count in enumerate(iterations):
            train(task, model, TrainConfig(count, **options), tmp_path / folder, resume=number > 0)
    one, two = (Run.open(tmp_path / folder).evaluations() for folder in ("whole", "parts"))
    for line in (*one, *two):
        for clock in ("elapsed", "iterations_per_second"):
            line.pop(clock)  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert one == two


def test_online_credit_learns_a_short_copying_problem(tmp_path: Path) -> None:
    """All of the exact kind, to see that it is wired as bptt is: the same batches and start give the same losses."""
    task = Copying(length=2)
    training = TrainConfig(12, 4, lr=1e-2, eval_every=4, eval_batches=1, precision="float64", device="cpu", threads=1)
    losses = {}
    for method in ("rtrl", "torch"):
        train(task, ModelConfig(method=method, cell="gru", hidden_size=5), training, tmp_path / method)
        losses[method] = [line["loss"] for line in Run.open(tmp_path / method).evaluations()]
    assert losses["rtrl"] == pytest.approx(losses["torch"], rel=1e-6)


@pytest.mark.usefixtures("tiny_data")
def test_sampled_text_is_what_the_whole_text_says() -> None:
    task, config = TASKS["ptb"](), TrainConfig(device="cpu")
    torch.manual_seed(0)
    model = RunConfig(task, ModelConfig(method="lru", hidden_size=SIZE), config).build_model(torch.device("cpu"))
    sampled = "".join(sample(model, task, config, prompt="the", length=6, temperature=0))
    characters = character_task(task)
    text = "the"
    for _ in range(6):
        with torch.no_grad():
            said = model(characters.encode(text, "prompt").long().unsqueeze(1))[0][-1, 0]
        text += characters.decode([int(said.argmax())])
    assert text == f"the{sampled}"


# Options


def test_options_that_make_no_difference_have_their_defaults() -> None:
    given = ModelConfig.from_options({"method": "lru", "cell": "gru", "k_top": 3, "k_trunc": 4})
    assert given.effective() == ModelConfig(method="lru")
    given = ModelConfig.from_options({"method": "dni", "cell": "gru", "k_top": 3, "k_trunc": 4})
    assert given.effective() == ModelConfig.from_options({"method": "dni", "cell": "gru", "k_trunc": 4})
    given = ModelConfig.from_options({"method": "uoro", "cell": "gru", "k_trunc": 4})
    assert given.effective() == ModelConfig(method="uoro", cell="gru")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"method": "chrono", "cell": "rnn_tanh"}, "cell must be one of lstm, gru where method is 'chrono'; got"),
        ({"method": "xlstm", "hidden_size": 10}, "hidden_size must be a multiple of 4 where method is 'xlstm'; got 10"),
        ({"method": "uoro", "num_layers": 2}, "num_layers must be at most 1 where method is 'uoro'; got 2."),
        ({"method": "lru", "layer_norm": True}, "layer_norm must be False where method is 'lru'; got True."),
        ({"method": "knitting"}, "method must be one of sab, bptt, "),
    ],
)
def test_mistakes_are_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserValueError, match=sentence):
        ModelConfig.from_options(options)


def test_a_missing_package_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    out = str(tmp_path / "run")
    assert cli.main(["train", "copying", "--method", "mamba", "--iterations", "1", "--out", out]) == 2
    assert "sab: mambapy is missing; install the extra 'rivals': pip install" in capsys.readouterr().err


def test_a_package_makes_its_constants_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is imported while a model is built that has no values."""
    (tmp_path / "package_with_a_constant.py").write_text("import torch\nCONSTANT = torch.ones(2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with torch.device("meta"):
        package = load("package_with_a_constant")
    assert package.CONSTANT.tolist() == [1, 1]


def test_no_attention_of_a_model_without_a_memory() -> None:
    model = make_model("lru")
    with pytest.raises(UserValueError, match="return_attention must be False where method is 'lru'"):
        model(inputs(), return_attention=True)
    outputs, state = predict_on(model, inputs(), None, TrainConfig())
    assert state is None
    assert outputs.shape == (STEPS, 2, 4)

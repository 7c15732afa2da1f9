"""Updates that nobody looks at one by one, and their graphs: stand-ins on the CPU, real ones where there is a GPU."""

from __future__ import annotations

import json
import logging
import math
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sab.config import SABConfig
from sab.errors import UserError
from sab.lab.models import ModelConfig
from sab.lab.tasks import Adding, Copying
from sab.lab.training import Result, Run, RunConfig, TrainConfig, graph, train, train_seeds, trainer, updates
from sab.lab.training import checkpoint as checkpoints
from sab.lab.training.batches import Batches
from sab.lab.training.checkpoint import TrainingState, load_model
from sab.lab.training.graph import Graphs
from sab.lab.training.updates import DeviceUpdates, build_capturable_optimizer, build_optimizer
from tests.lab.training.runs import PressCtrlC, lines, newest

CPU = torch.device("cpu")


class Recorder:
    """Records in name only: a replay calls the function again."""

    def __init__(self) -> None:
        self.recordings = 0

    def __call__(self, function: Callable[[], None]) -> Callable[[], Any]:
        self.recordings += 1
        return function


def weights(out: Path) -> dict[str, Tensor]:
    checkpoint = newest(out)
    return load_file(checkpoint / "model.safetensors") | load_file(checkpoint / "training.safetensors")


def assert_same(one: Path, other: Path) -> None:
    """Two runs that computed the same, to the last bit."""
    assert lines(one) == lines(other)
    assert json.loads((one / "result.json").read_text())["metrics"] == Run.open(other).result().metrics  # pyright: ignore
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def assert_close(one: Path, other: Path, tolerance: float) -> None:
    """Two runs whose losses and gradient norms differ by little."""
    assert len(lines(one)) == len(lines(other)) > 0
    for ours, theirs in zip(lines(one), lines(other), strict=True):
        for name in ("loss", "grad_norm", "grad_norm_max"):
            assert ours[name] == pytest.approx(theirs[name], rel=tolerance), name


# The cache of graphs


@pytest.fixture
def called() -> list[tuple[Tensor, Tensor]]:
    return []


@pytest.fixture
def update(called: list[tuple[Tensor, Tensor]]) -> Callable[[Tensor, Tensor], None]:
    return lambda inputs, targets: called.append((inputs.clone(), targets.clone()))


def batch(steps: int, value: float) -> tuple[Tensor, Tensor]:
    return torch.full((steps, 2), value), torch.full((steps,), int(value))


def test_a_shape_is_recorded_after_its_warm_up_and_every_batch_is_seen_once(called: list, update: Any) -> None:
    recorder = Recorder()
    graphs = Graphs(update, CPU, recorder)
    order = [3, 3, 5, 3, 5, 5, 3, 5]
    for value, steps in enumerate(order):
        graphs(*batch(steps, value))
    assert recorder.recordings == 2
    assert [len(inputs) for inputs, _ in called] == order
    assert [inputs[0, 0].item() for inputs, _ in called] == list(range(8))
    assert [targets[0].item() for _, targets in called] == list(range(8))


def test_the_cache_has_a_bound(called: list, update: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "LARGEST_CACHE", 2)
    recorder = Recorder()
    graphs = Graphs(update, CPU, recorder)
    for value in range(5):
        for steps in (1, 2, 3, 4):
            graphs(*batch(steps, value))
    assert recorder.recordings == 2
    assert len(called) == 20


def test_where_recording_fails_one_line_says_so_and_updates_go_on(
    called: list, update: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tried = 0

    def fails(function: Callable[[], None]) -> Any:
        nonlocal tried
        tried += 1
        raise RuntimeError("operation not permitted when stream is capturing\nand a page of advice")

    graphs = Graphs(update, CPU, fails)
    with caplog.at_level(logging.INFO, "sab"):
        for value in range(4):
            for steps in (2, 3):
                graphs(*batch(steps, value))
    assert (tried, len(called)) == (1, 8)
    (record,) = caplog.records
    assert record.getMessage() == (
        "the training step cannot be made a CUDA graph and runs without: "
        "operation not permitted when stream is capturing"
    )


# Batches drawn ahead


def test_a_mistake_in_the_data_comes_through(monkeypatch: pytest.MonkeyPatch, config: RunConfig) -> None:
    adding = replace(config, task=Adding(length=3))
    draw = Adding.draw
    monkeypatch.setattr(Adding, "draw", lambda *arguments: tuple(x * math.nan for x in draw(*arguments)))
    batches = Batches(adding, 0)
    with pytest.raises(UserError, match="train batch 0 is not"):
        batches.take()
    batches.close()


# The updates of a GPU, on the CPU


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def pretend(monkeypatch: pytest.MonkeyPatch, capture: Recorder | None) -> None:
    """Makes trainers make their updates as on a GPU, and look at them only when they have to."""

    def build(self: trainer.Trainer) -> DeviceUpdates:
        return DeviceUpdates(self.config, self.model, self.optimizer, self.state, None, capture)

    monkeypatch.setattr(trainer.Trainer, "_build_updates", build)
    monkeypatch.setattr(trainer, "build_optimizer", build_capturable_optimizer)
    monkeypatch.setattr(updates, "SECONDS_UNREAD", math.inf)


@pytest.fixture(params=["graphs", "no graphs"])
def like_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    pretend(monkeypatch, recorder if request.param == "graphs" else None)


@pytest.fixture
def plain(tmp_path: Path, run_training: Callable[..., Result]) -> Path:
    """The same run, made as on the CPU."""
    run_training(tmp_path / "plain", lr_decay=0.5)
    return tmp_path / "plain"


@pytest.mark.usefixtures("like_a_gpu")
@pytest.mark.parametrize(
    ("lengths", "options"),
    [("fixed", {}), ("uniform", {}), ("uniform", {"memory_lr": 0.2}), ("fixed", {"dropout": 0.3})],
)
def test_updates_that_are_not_looked_at_equal_those_that_are(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch, lengths: Any, options: dict[str, float]
) -> None:
    task = Copying(length=3, train_lengths=lengths)
    training = replace(config.training, iterations=20, lr_decay=0.3, **options)
    train(task, config.model, training, tmp_path / "device")
    monkeypatch.undo()
    train(task, config.model, training, tmp_path / "host")
    assert_close(tmp_path / "device", tmp_path / "host", 1e-5)


@pytest.mark.usefixtures("like_a_gpu")
@pytest.mark.parametrize(("at", "memory_lr"), [(3, 1.0), (4, 1.0), (6, 1.0), (3, 0.2)])
def test_interrupted_and_resumed(
    tmp_path: Path, run_training: Callable[..., Result], at: int, memory_lr: float
) -> None:
    options: dict[str, Any] = {"lr_decay": 0.5, "memory_lr": memory_lr}
    run_training(tmp_path / "whole", **options)
    result = run_training(tmp_path / "pieces", progress=PressCtrlC(at), **options)
    assert (result.status, result.iterations) == ("interrupted", at)
    assert run_training(tmp_path / "pieces", resume=True, **options).status == "finished"
    assert_same(tmp_path / "pieces", tmp_path / "whole")


@pytest.mark.usefixtures("like_a_gpu")
def test_ctrl_c_counts_what_was_made_but_not_yet_read(
    tmp_path: Path, run_training: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = DeviceUpdates.make

    def press(self: DeviceUpdates, step: int) -> None:
        make(self, step)
        if step == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(DeviceUpdates, "make", press)
    result = run_training(tmp_path / "run")
    assert (result.status, result.iterations, result.message) == (
        "interrupted",
        2,
        "interrupted after 2 iterations.",
    )


@pytest.mark.usefixtures("like_a_gpu")
def test_more_updates_than_there_is_room_for_are_read_in_between(
    tmp_path: Path, run_training: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_training(tmp_path / "whole")
    monkeypatch.setattr(updates, "MOST_UNREAD", 2)
    run_training(tmp_path / "read")
    assert_same(tmp_path / "read", tmp_path / "whole")


def test_a_checkpoint_goes_from_one_kind_of_adam_to_the_other(plain: Path, config: RunConfig) -> None:
    stored = Run.open(plain).config
    model = stored.build_model(CPU)
    adam = build_capturable_optimizer(stored.training, model, CPU)
    with torch.random.fork_rng([]):
        state = checkpoints.load(plain / "checkpoint", stored, model, adam)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    adam.step()
    assert all(adam.state[parameter]["step"] == state.step + 1 for parameter in model.parameters())
    checkpoints.save(plain / "other", stored, model, adam, TrainingState(step=9))
    with torch.random.fork_rng([]):
        checkpoints.load(plain / "other", stored, model, build_optimizer(stored.training, model, CPU))


# On a GPU


@pytest.fixture
def gpu_config() -> RunConfig:
    training = TrainConfig(iterations=20, batch_size=8, eval_every=5, eval_batches=1, checkpoint_every=7, device="cuda")
    return RunConfig(Copying(length=10), ModelConfig(hidden_size=32, memory=SABConfig(k_top=3, k_trunc=4)), training)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", ["fixed", "uniform"])
@pytest.mark.parametrize("options", [{}, {"memory_lr": 0.2, "weight_decay": 0.1}, {"dropout": 0.3}])
def test_graphs_equal_eager_on_a_gpu(
    tmp_path: Path, gpu_config: RunConfig, lengths: Any, options: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    task = Copying(length=4, train_lengths=lengths)
    for name, cuda_graph in (("graph", True), ("eager", False)):
        training = replace(gpu_config.training, cuda_graph=cuda_graph, iterations=40, lr_decay=0.5, **options)
        train(task, gpu_config.model, training, tmp_path / name)
    assert "cannot be made a CUDA graph" not in caplog.text
    assert_close(tmp_path / "graph", tmp_path / "eager", 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
def test_torchs_own_layers_are_graphs_on_a_gpu(
    tmp_path: Path, gpu_config: RunConfig, cell: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = replace(gpu_config.model, method="torch", cell=cell)
    for name, cuda_graph in (("graph", True), ("eager", False)):
        training = replace(gpu_config.training, cuda_graph=cuda_graph, iterations=40)
        train(gpu_config.task, model, training, tmp_path / name)
    assert "cannot be made a CUDA graph" not in caplog.text
    assert_close(tmp_path / "graph", tmp_path / "eager", 1e-4)
    load_model(Run.open(tmp_path / "graph"), torch.device("cuda"))


@pytest.mark.gpu
def test_what_cannot_be_a_graph_trains_all_the_same_on_a_gpu(
    tmp_path: Path, gpu_config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    model = gpu_config.model.with_options(backend="reference")
    assert train(gpu_config.task, model, gpu_config.training, tmp_path / "graph").status == "finished"
    assert caplog.text.count("cannot be made a CUDA graph") == 1
    train(gpu_config.task, model, replace(gpu_config.training, cuda_graph=False), tmp_path / "eager")
    assert_close(tmp_path / "graph", tmp_path / "eager", 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"memory_lr": 0.2, "weight_decay": 0.1}, {"dropout": 0.3}])
def test_a_run_goes_from_device_to_device(
    tmp_path: Path, gpu_config: RunConfig, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", "ieee")  # as exact as the CPU
    task, model, training = gpu_config.task, gpu_config.model, replace(gpu_config.training, **options)
    train(task, model, training, tmp_path / "whole")
    out = tmp_path / "pieces"
    for iterations, device in ((5, "cpu"), (10, "cuda"), (15, "cpu"), (20, "cuda")):
        at = replace(training, iterations=iterations, device=device)
        assert train(task, model, at, out, resume=out.exists()).iterations == iterations
    assert_close(out, tmp_path / "whole", 1e-3)
    load_model(Run.open(out), CPU)


@pytest.mark.gpu
def test_seeds_side_by_side_on_a_gpu(tmp_path: Path, gpu_config: RunConfig) -> None:
    train_seeds(gpu_config.task, gpu_config.model, gpu_config.training, [0, 1], tmp_path / "many")
    for seed in (0, 1):
        training = replace(gpu_config.training, seed=seed)
        train(gpu_config.task, gpu_config.model, training, tmp_path / str(seed))
        assert_close(tmp_path / "many" / f"seed-{seed}", tmp_path / str(seed), 1e-5)

"""Training on a text with the state carried from one sequence to the next."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sab.errors import UserError
from sab.lab.models import ModelConfig
from sab.lab.tasks import PTB, CharacterTask, Copying, Text8
from sab.lab.training import RunConfig, TrainConfig, train, updates
from sab.lab.training.checkpoint import TrainingState
from sab.lab.training.evaluation import predict_on
from sab.lab.training.updates import HostUpdates, build_optimizer
from sab.state import SABState
from tests.lab.training.runs import PressCtrlC, newest
from tests.lab.training.test_graph import assert_same, pretend

pytestmark = pytest.mark.usefixtures("tiny_data")
CPU = torch.device("cpu")
TASK = PTB(length=20, carried=7)
SIZE = 8
TRAINING = TrainConfig(
    iterations=8, batch_size=SIZE, eval_every=4, eval_batches=1, checkpoint_every=3, threads=1, precision="float64"
)
MODEL = ModelConfig.from_options({"hidden_size": 7, "k_top": 3, "k_trunc": 4})


def batches_of(task: CharacterTask, size: int = SIZE) -> int:
    return task.batches_per_epoch(size)


@given(st.integers(1, 12), st.integers(3, 40), st.booleans(), st.integers(0, 2), st.integers(0, 10**6))
def test_a_batch_goes_on_where_the_one_before_it_ended(
    size: int, length: int, shifted: bool, epoch: int, seed: int
) -> None:
    task = Text8(length=length, part="prefix", carried=7, shifted=shifted)
    count = batches_of(task, size)
    last = (task.count("train") - 1) * length
    first = epoch * count
    assert [task.continues(first + place, size) for place in range(count)] == [
        bool(place % 7) for place in range(count)
    ]
    before = None
    for index in range(first, first + count):
        inputs, targets = task.batch(seed, index, size)
        assert torch.equal(inputs[1:], targets[:-1])
        if before is not None:
            ends_early = inputs[0] != before  # a shifted stream must not go beyond the text
            if ends_early.any():
                assert shifted
                assert index == first + count - 1
                assert ends_early.nonzero().flatten().tolist() == [size - 1]
                (sent,) = task.send(seed, index, size, "train", torch.float32)
                assert sent[-1] == last
        before = targets[-1]


def test_an_epoch_reads_as_much_of_the_text_as_without_it() -> None:
    count = batches_of(TASK)
    sent = [TASK.send(0, index, SIZE, "train", torch.float32)[0] for index in range(count)]
    assert torch.cat(sent).sort().values.tolist() == list(range(count * SIZE))
    plain = replace(TASK, carried=1)
    assert torch.equal(
        TASK.send(0, 1, SIZE, "valid", torch.float32)[0], plain.send(0, 1, SIZE, "valid", torch.float32)[0]
    )
    assert not plain.continues(1, SIZE)
    assert not Copying().continues(1, SIZE)
    assert TASK.label == "ptb-20-carried7"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cell": "gru"},
        {"max_memory": 6, "forget": "most_read"},
        {"method": "tbptt"},
        {"method": "torch"},
        {"num_layers": 2, "readout": "hidden+summary"},
    ],
    ids=str,
)
def test_an_update_begins_with_the_detached_state_of_the_one_before(options: dict[str, Any]) -> None:
    config = RunConfig(TASK, MODEL.with_options(**options), replace(TRAINING, iterations=100))
    torch.manual_seed(0)
    model, count = config.build_model(CPU), batches_of(TASK)
    host = HostUpdates(config, model, build_optimizer(TRAINING, model, CPU), TrainingState())
    state: Any = None
    for step in range(count - 2, count + 2):
        if not TASK.continues(step, SIZE):
            state = None
        inputs, targets = TASK.batch(TRAINING.seed, step, SIZE, dtype=torch.float64)
        outputs, end = predict_on(copy.deepcopy(model), inputs, state, TRAINING)
        state = (end if "max_memory" in options else end.recent(TASK.length // config.model.memory.k_att)).detach()
        host.make(step)
        counted = TrainingState()
        assert host.read(counted) is None
        assert counted.loss_sum == pytest.approx(TASK.loss(outputs, targets).item(), rel=1e-12)
        carried = host.carried
        assert carried is not None
        assert torch.equal(carried.h, state.h)
        assert torch.equal(carried.numbers, state.numbers)
        assert not carried.microstates.requires_grad


@pytest.mark.parametrize(
    "options", [{}, {"cell": "gru", "max_memory": 6, "forget": "most_read"}, {"method": "tbptt"}], ids=str
)
@pytest.mark.parametrize("like_a_gpu", [False, True])
@pytest.mark.parametrize("from_start", [False, True], ids=["in an epoch", "at its end"])
def test_interrupted_and_resumed_equals_uninterrupted(
    options: dict[str, Any], like_a_gpu: bool, from_start: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if like_a_gpu:
        pretend(monkeypatch, None)
        monkeypatch.setattr(updates, "SECONDS_UNREAD", 0.0)
    count = batches_of(TASK)
    training = replace(TRAINING, iterations=count + 2, eval_every=count + 2, checkpoint_every=count + 2, dropout=0.2)
    model = MODEL.with_options(**options)
    train(TASK, model, training, tmp_path / "whole")
    at = count if from_start else 5
    result = train(TASK, model, training, tmp_path / "pieces", progress=PressCtrlC(at))
    assert (result.status, result.iterations) == ("interrupted", at)
    train(TASK, model, training, tmp_path / "pieces", resume=True)
    assert_same(tmp_path / "pieces", tmp_path / "whole")
    train(replace(TASK, carried=1), model, training, tmp_path / "plain")
    with pytest.raises(AssertionError):
        assert_same(tmp_path / "plain", tmp_path / "whole")


def test_a_damaged_state_is_like_a_damaged_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(TASK, MODEL, TRAINING, tmp_path / "whole")
    train(TASK, MODEL, replace(TRAINING, iterations=5), tmp_path / "pieces")
    (newest(tmp_path / "pieces") / "carried.safetensors").write_bytes(b"{}")
    train(TASK, MODEL, TRAINING, tmp_path / "pieces", resume=True)
    assert "carried.safetensors' must be as it was written" in caplog.text
    assert "step-00000003 is used instead" in caplog.text
    assert_same(tmp_path / "pieces", tmp_path / "whole")


def test_what_cannot_be_carried_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^carried must be a whole number of at least 1; got 0\.$"):
        PTB(carried=0)
    with pytest.raises(UserError, match=r"^carried must be 1 where method is 'uoro'\.$"):
        RunConfig(TASK, MODEL.with_options(method="uoro"), TRAINING)
    with pytest.raises(
        UserError, match=r"^on_nan must be stop or rollback where carried is more than 1; got 'skip'\.$"
    ):
        RunConfig(TASK, MODEL, replace(TRAINING, on_nan="skip"))
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_PORT": 1, "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match=r"^carried must be 1 where several processes make a run"):
        train(TASK, MODEL, TRAINING, tmp_path / "run")


def test_the_state_of_a_checkpoint_is_a_layers_state(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    train(TASK, MODEL, TRAINING, tmp_path / "run")
    tensors = load_file(newest(tmp_path / "run") / "carried.safetensors")
    state = SABState(**tensors)  # pyright: ignore[reportArgumentType]
    assert state.h.shape == (1, SIZE, 7)
    assert state.microstates.shape[2] == TASK.length // MODEL.memory.k_att
    assert state.steps.tolist() == [TRAINING.iterations % batches_of(TASK) % TASK.carried * TASK.length] * SIZE

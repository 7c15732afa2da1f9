from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sab.lab.training import Result, Run, RunConfig
from sab.lab.training import checkpoint as checkpoints
from sab.lab.training.checkpoint import TrainingState, load_model

Train = Callable[..., Result]


@pytest.fixture
def folder(tmp_path: Path, run_training: Train) -> Path:
    """The only checkpoint of a finished run."""
    run_training(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint" / "step-00000004")
    return tmp_path / "run" / "checkpoint" / "step-00000008"


def load(folder: Path, config: RunConfig) -> TrainingState:
    return checkpoints.load(folder.parent, config, config.build_model(torch.device("cpu")))


def sign(folder: Path) -> None:
    """Makes state.json vouch for the files as they are."""
    contents = json.loads((folder / "state.json").read_text())
    for name in contents["sha256"]:
        contents["sha256"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    contents["digest"] = checkpoints._digest_of_contents(contents)
    (folder / "state.json").write_text(json.dumps(contents))


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


def test_weights_moments_and_random_state_come_back(folder: Path, config: RunConfig) -> None:
    model = config.build_model(torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters())
    with torch.random.fork_rng([]):
        state = checkpoints.load(folder.parent, config, model, optimizer)
        assert torch.equal(torch.get_rng_state(), load_file(folder / "training.safetensors")["rng.cpu"])
    assert state.step == 8
    weights = load_file(folder / "model.safetensors")
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert all(optimizer.state[parameter]["step"] == 8 for parameter in model.parameters())


def test_loading_changes_no_file_and_the_model_alone_when_only_that_is_asked_for(
    folder: Path, config: RunConfig
) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    model = config.build_model(torch.device("cpu"))
    random = torch.get_rng_state()
    checkpoints.load(folder.parent, config, model)
    assert torch.equal(random, torch.get_rng_state())
    assert before == {path: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_truncated(folder: Path, config: RunConfig, name: str, share: float) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ValueError, match=rf"{name}' must be as it was written; it is truncated or was altered\.$"):
        load(folder, config)
    sign(folder)
    with pytest.raises(ValueError, match=f"{name}' must be a safetensors file; "):
        load(folder, config)


def test_one_flipped_bit(folder: Path, config: RunConfig) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="truncated or was altered"):
        load(folder, config)


@pytest.mark.parametrize(("name", "value"), [("loss_sum", 0.5), ("step", 7), ("best", 0.5)])
def test_a_number_that_somebody_changed(folder: Path, config: RunConfig, name: str, value: float) -> None:
    contents = json.loads((folder / "state.json").read_text())
    contents["state"][name] = value
    (folder / "state.json").write_text(json.dumps(contents))
    with pytest.raises(ValueError, match=r"state\.json' must be as it was written; it was altered\.$"):
        load(folder, config)


def test_a_step_that_is_not_its_own(folder: Path, config: RunConfig) -> None:
    folder = folder.rename(folder.with_name("step-00000009"))
    with pytest.raises(ValueError, match=r"state\.json' must be as it was written; it was altered\.$"):
        load(folder, config)


def test_a_missing_file(folder: Path, config: RunConfig) -> None:
    (folder / "training.safetensors").unlink()
    with pytest.raises(ValueError, match=r"must be a complete checkpoint; training\.safetensors is missing"):
        load(folder, config)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": "another program"}', '{"format": "sab checkpoint 1", "state": 3}']
)
def test_a_foreign_state(folder: Path, config: RunConfig, text: str) -> None:
    (folder / "state.json").write_text(text)
    with pytest.raises(ValueError, match=r"state\.json' must be the state of a checkpoint of sab; "):
        load(folder, config)
    (folder / "state.json").unlink()
    with pytest.raises(ValueError, match="FileNotFoundError"):
        load(folder, config)


@pytest.mark.parametrize("name", ["step", "best", "best_at", "since_best"])
def test_a_state_with_words_for_numbers(folder: Path, config: RunConfig, name: str) -> None:
    contents = json.loads((folder / "state.json").read_text())
    contents["state"][name] = "../8"
    (folder / "state.json").write_text(json.dumps(contents))
    with pytest.raises(ValueError, match=rf"state\.json' must be .*; ValueError: its {name} is '\.\./8'\.$"):
        load(folder, config)


def test_a_checkpoint_of_another_run(folder: Path, config: RunConfig) -> None:
    other = replace(config, model=replace(config.model, hidden_size=7))
    with pytest.raises(ValueError, match=r"must be a checkpoint of this run; .* with hidden_size 6 and not 7"):
        load(folder, other)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda tensors: tensors.pop("readout.bias"), "'readout.bias' is missing"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "'extra' is none of its tensors"),
        (lambda tensors: tensors.update({"readout.bias": torch.zeros(3)}), r"'readout.bias' is \[3\] float32 and not"),
        (
            lambda tensors: tensors.update({"readout.bias": torch.zeros(9, dtype=torch.float64)}),
            r"'readout.bias' is \[9\] float64 and not \[9\] float32",
        ),
    ],
)
def test_tensors_of_another_model(
    folder: Path, config: RunConfig, change: Callable[[dict[str, torch.Tensor]], object], complaint: str
) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    sign(folder)
    with pytest.raises(ValueError, match=f"must hold the tensors of this run's model; {complaint}"):
        load(folder, config)


def test_none_at_all(folder: Path, config: RunConfig) -> None:
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match="must hold a checkpoint; there is none in 'checkpoint'"):
        load(folder, config)


def test_a_complete_checkpoint_exists_at_every_moment(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every call that changes the disk, the newest complete checkpoint loads."""
    model = config.build_model(torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters())
    folder = tmp_path / "checkpoint"
    checkpoints.save(folder, config, model, optimizer, TrainingState(step=1))
    steps: list[int] = []

    def watched(function: Callable) -> Callable:
        def call(*arguments: object, **options: object) -> object:
            steps.append(load(folder / "any", config).step)
            result = function(*arguments, **options)
            steps.append(load(folder / "any", config).step)
            return result

        return call

    monkeypatch.setattr(checkpoints, "save_file", watched(checkpoints.save_file))
    monkeypatch.setattr(os, "rename", watched(os.rename))
    monkeypatch.setattr(shutil, "rmtree", watched(shutil.rmtree))
    checkpoints.save(folder, config, model, optimizer, TrainingState(step=2))
    checkpoints.save(folder, config, model, optimizer, TrainingState(step=3))
    assert steps == sorted(steps)
    assert set(steps) == {1, 2, 3}
    assert steps_in(folder) == [2, 3]


def test_what_a_crash_left_behind_is_ignored_and_cleared(tmp_path: Path, config: RunConfig) -> None:
    model = config.build_model(torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters())
    folder = tmp_path / "checkpoint"
    checkpoints.save(folder, config, model, optimizer, TrainingState(step=1))
    (folder / ".writing").mkdir()
    (folder / ".writing" / "model.safetensors").write_bytes(b"half")
    assert load(folder / "any", config).step == 1
    checkpoints.save(folder, config, model, optimizer, TrainingState(step=2))
    assert steps_in(folder) == [1, 2]


# The newest and the one before it


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit of the weights": lambda folder: flip(folder / "model.safetensors"),
    "a bit of Adam's": lambda folder: flip(folder / "training.safetensors"),
    "a bit of the state": lambda folder: flip(folder / "state.json"),
    "half of the state": lambda folder: (folder / "state.json").write_text('{"format": "sab'),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "nothing left": lambda folder: [path.unlink() for path in folder.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_where_the_newest_is_damaged_the_one_before_it_is_used(
    tmp_path: Path, run_training: Train, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object]
) -> None:
    out = tmp_path / "run"
    result = run_training(out)
    newest = out / "checkpoint" / "step-00000008"
    assert steps_in(newest.parent) == [4, 8]
    undamaged = {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}
    damage(newest)
    weights = load_model(Run.open(out), torch.device("cpu")).state_dict()
    older = load_file(newest.with_name("step-00000004") / "model.safetensors")
    assert all(torch.equal(tensor, older[name]) for name, tensor in weights.items())
    (warning,) = caplog.messages
    assert "step-00000008" in warning
    assert warning.endswith("; the checkpoint step-00000004 is used instead.")
    again = run_training(out, resume=True)
    assert len(caplog.messages) == 2
    assert (again.metrics, again.iterations) == (result.metrics, 8)
    assert steps_in(newest.parent) == [4, 8]
    assert {path.name: path.read_bytes() for path in newest.glob("*.safetensors")} == undamaged


def test_where_both_are_damaged_one_sentence_says_so_and_nothing_changes(
    tmp_path: Path, run_training: Train, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "run"
    run_training(out)
    for folder in (out / "checkpoint").iterdir():
        flip(folder / "model.safetensors")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    both = r"^'.*step-00000008.model\.safetensors' must .* was altered; and '.*step-00000004.* must .* was altered\.$"
    with pytest.raises(ValueError, match=both):
        load_model(Run.open(out), torch.device("cpu"))
    with pytest.raises(ValueError, match=both):
        run_training(out, resume=True, iterations=9)
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert not caplog.messages

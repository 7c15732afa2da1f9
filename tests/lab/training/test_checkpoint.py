from __future__ import annotations

import hashlib
import json
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
from tests.lab.training.runs import steps

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
    contents["digest"] = checkpoints.StateFile(**contents).own_digest()
    (folder / "state.json").write_text(json.dumps(contents))


def test_the_random_state_comes_back(folder: Path, config: RunConfig) -> None:
    model = config.build_model(torch.device("cpu"))
    with torch.random.fork_rng([]):
        torch.rand(3)
        checkpoints.load(folder.parent, config, model, torch.optim.Adam(model.parameters()))
        assert torch.equal(torch.get_rng_state(), load_file(folder / "training.safetensors")["rng.cpu"])


def flip(path: Path, place: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)


def truncate(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def set_state(folder: Path, name: str, value: object) -> None:
    contents = json.loads((folder / "state.json").read_text())
    contents["state"][name] = value
    (folder / "state.json").write_text(json.dumps(contents))


ALTERED = "' must be as it was written; it is truncated or was altered.$"
STATE_ALTERED = "state.json' must be as it was written; it was altered.$"
FOREIGN = "state.json' must be the state of a checkpoint of sab; "


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        *(
            (lambda folder, name=name, share=share: truncate(folder / name, share), name + ALTERED)
            for name in ("model.safetensors", "training.safetensors")
            for share in (0.0, 0.5, 0.99)
        ),
        (lambda folder: flip(folder / "model.safetensors", 0.9999), "model.safetensors" + ALTERED),
        (lambda folder: set_state(folder, "loss_sum", 0.5), STATE_ALTERED),
        (lambda folder: set_state(folder, "step", 7), STATE_ALTERED),
        (lambda folder: folder.rename(folder.with_name("step-00000009")), STATE_ALTERED),
        (
            lambda folder: (folder / "training.safetensors").unlink(),
            "must be a complete checkpoint; training.safetensors is missing",
        ),
        *(
            (lambda folder, text=text: (folder / "state.json").write_text(text), FOREIGN)
            for text in ("", "{", "[]", "{}", '{"format": "other"}', '{"format": "sab checkpoint 1", "state": 3}')
        ),
        (lambda folder: (folder / "state.json").unlink(), f"{FOREIGN}FileNotFoundError"),
        *(
            (lambda folder, name=name: set_state(folder, name, "../8"), f"{FOREIGN}ValueError: its {name} is '../8'.$")
            for name in ("step", "best", "best_at", "since_best")
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused(
    folder: Path, config: RunConfig, damage: Callable[[Path], object], complaint: str
) -> None:
    damage(folder)
    with pytest.raises(ValueError, match=complaint.replace(".", r"\.")):
        load(folder, config)


@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors"])
def test_a_file_that_is_no_safetensors(folder: Path, config: RunConfig, name: str) -> None:
    truncate(folder / name, 0.5)
    sign(folder)
    with pytest.raises(ValueError, match=f"{name}' must be a safetensors file; "):
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


# The newest and the one before it


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
    assert steps(out) == [4, 8]
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
    assert steps(out) == [4, 8]
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

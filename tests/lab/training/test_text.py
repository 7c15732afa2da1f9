"""Character models: all of a text, with and without its past, made-up text, and a user's."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sab.config import SABConfig
from sab.errors import UserError
from sab.lab.models import ModelConfig, SequenceModel
from sab.lab.tasks import MNIST, PTB, Copying, Task, Text8
from sab.lab.training import RunConfig, TrainConfig, evaluate, train
from sab.lab.training.evaluation import carried_bits, evaluate_fully
from sab.lab.training.text import sample, score
from sab.state import SABState
from tests.lab.training.test_graph import Recorder, assert_close, assert_same, pretend

pytestmark = pytest.mark.usefixtures("tiny_data")
CPU = torch.device("cpu")
TRAINING = TrainConfig(
    iterations=6, batch_size=8, eval_every=3, eval_batches=None, checkpoint_every=4, threads=1, precision="float64"
)
MODEL = ModelConfig(hidden_size=7, memory=SABConfig(k_top=3, k_trunc=4))
SHORT = PTB(length=20)


def build(task: Task = SHORT, **options: Any) -> SequenceModel:
    return RunConfig(task, MODEL.with_options(**options), replace(TRAINING, eval_batches=1)).build_model(CPU).eval()


def bits(model: SequenceModel, text: Tensor) -> Tensor:
    """Of each character of a text but the first, in one piece."""
    with torch.no_grad():
        outputs, _ = model(text[:-1].long().unsqueeze(1))
    return -outputs[:, 0].log_softmax(-1).gather(1, text[1:].long().unsqueeze(1)).squeeze(1) / math.log(2)


def test_an_evaluation_takes_every_character_once_with_a_fresh_state_each_sequence() -> None:
    model = build()
    text = SHORT.characters("valid")
    starts = range(0, len(text) - 1, SHORT.length)
    assert (len(text) - 1) % SHORT.length, "the last one is shorter"
    expected = torch.cat([bits(model, text[start : start + SHORT.length + 1]) for start in starts])
    assert len(expected) == len(text) - 1
    found = evaluate(model, SHORT, TRAINING, "valid")
    assert found["bits_per_character"] == pytest.approx(expected.mean().item(), rel=1e-12)


@pytest.mark.parametrize("scorer", ["mlp", "affine", "affine_tanh"])
@pytest.mark.parametrize("streams", [1, 3, 8])
def test_the_state_is_carried_from_a_places_start_to_the_next_ones(scorer: str, streams: int) -> None:
    model = build(scorer=scorer)
    text = SHORT.characters("valid")[:304]
    steps = 303 // streams
    edges = [place * steps for place in range(streams)] + [303]
    expected = torch.cat([bits(model, text[a : b + 1]) for a, b in pairwise(edges)])
    assert len(expected) == 303
    found = carried_bits(model, SHORT, TRAINING, text, streams, max_memory=10_000)
    assert found == pytest.approx(expected.mean().item(), rel=1e-10)


@pytest.mark.parametrize(("memory", "kept"), [(None, 10), (4, 4), (0, 0)])
def test_a_text_goes_on_with_the_latest_microstates(memory: int | None, kept: int) -> None:
    model, text = build(), SHORT.characters("valid")[:102].long()
    expected: list[Tensor] = []
    state = None
    for start in range(0, 101, 5):  # a quarter of a sequence
        said = text[start + 1 : start + 6].unsqueeze(1)
        with torch.no_grad():
            outputs, state = model(text[start : start + len(said)].unsqueeze(1), state)
        oldest = max(state.numbers.shape[-1] - kept, 0)
        fields = ("microstates", "keys", "numbers")
        state = replace(state, **{name: getattr(state, name)[:, :, oldest:] for name in fields})
        expected.append(-outputs[:, 0].log_softmax(-1).gather(1, said) / math.log(2))
    found = carried_bits(model, SHORT, TRAINING, text, 1, memory)
    assert found == pytest.approx(torch.cat(expected).mean().item(), rel=1e-10)
    assert found != carried_bits(model, SHORT, TRAINING, text, 1, 10_000)


@pytest.mark.parametrize("forget", ["recent", "most_read"])
def test_a_model_with_a_bound_carries_its_own_memory(forget: str) -> None:
    """The bits of a text in pieces are those of the whole in one call: the state is all that is carried."""
    model, text = build(max_memory=15, forget=forget), SHORT.characters("valid")[:102]  # a sequence has 10
    found = carried_bits(model, SHORT, TRAINING, text, 1)
    assert found == pytest.approx(bits(model, text).mean().item(), rel=1e-10)
    assert found != pytest.approx(carried_bits(model, SHORT, TRAINING, text, 1, max_memory=2), rel=1e-10)


def test_the_full_evaluation_has_both_ways_for_texts_alone() -> None:
    model = build()
    found = evaluate_fully(model, SHORT, TRAINING, "test")
    assert list(found) == ["bits_per_character", "bits_per_character_carried"]
    expected = carried_bits(model, SHORT, TRAINING, SHORT.characters("test"), TRAINING.batch_size)
    assert found["bits_per_character_carried"] == expected
    assert evaluate_fully(model, SHORT, replace(TRAINING, eval_batches=1), "test") == found, "all of the text"
    task = MNIST()
    assert list(evaluate_fully(build(task), task, TRAINING)) == ["accuracy", "cross_entropy"]


@pytest.mark.parametrize("option", ["streams", "max_memory"])
def test_what_is_about_texts_alone_is_refused_elsewhere(option: str) -> None:
    task = Copying(length=2)
    with pytest.raises(UserError, match=f"^{option} must be None for task copying, which is no text; got 3"):
        evaluate_fully(build(task), task, replace(TRAINING, eval_batches=1), "test", **{option: 3})


def test_data_without_an_end_cannot_be_evaluated_whole() -> None:
    task = Copying(length=2)
    with pytest.raises(UserError, match=r"^batches must be a whole number for task copying"):
        evaluate(build(task), task, TRAINING)
    with pytest.raises(UserError, match=r"^eval_batches must be a whole number for task copying"):
        RunConfig(task, MODEL, TRAINING)


def test_a_smaller_last_batch_counts_less() -> None:
    task = MNIST()
    model = build(task)
    inputs, targets = next(task.whole("test", 12, CPU, torch.float64))
    with torch.no_grad():
        expected = task.metrics(model(inputs)[0], targets)
    assert len(targets) == 12, "a batch of 8 and one of 4"
    found = evaluate(model, task, TRAINING, "test")
    assert found == pytest.approx({name: value.item() for name, value in expected.items()}, rel=1e-12)


@pytest.mark.parametrize("task", [PTB(length=9), Text8(length=5, part="prefix")], ids=lambda task: task.title)
def test_batches_taken_on_the_device_by_number_are_those_of_the_host(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(task, MODEL, TRAINING, tmp_path / "host")
    recorder = Recorder()
    pretend(monkeypatch, recorder)
    train(task, MODEL, TRAINING, tmp_path / "device")
    assert recorder.recordings == 1, "what is sent has one shape"
    assert_close(tmp_path / "host", tmp_path / "device", 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("task", [PTB(length=9), MNIST()], ids=lambda task: task.title)
def test_a_graph_takes_its_batches_by_number_on_a_gpu(
    task: Task, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = replace(TRAINING, iterations=12, precision="float32", device="cuda")
    model = replace(MODEL, hidden_size=32)
    train(task, model, training, tmp_path / "graph")
    assert "cannot be made a CUDA graph" not in caplog.text
    train(task, model, replace(training, cuda_graph=False), tmp_path / "eager")
    assert_close(tmp_path / "graph", tmp_path / "eager", 1e-5)
    train(task, model, replace(training, device="cpu"), tmp_path / "host")
    assert_close(tmp_path / "graph", tmp_path / "host", 5e-2)  # sums in another order, and 12 updates on top of it


def test_resuming_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    whole = replace(TRAINING, iterations=12)
    train(SHORT, MODEL, whole, tmp_path / "whole")
    train(SHORT, MODEL, TRAINING, tmp_path / "pieces")
    train(SHORT, MODEL, whole, tmp_path / "pieces", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "pieces")


# Made-up text


def test_a_sample_depends_on_its_seed_alone_and_goes_on_from_its_prompt() -> None:
    model = build()

    def text(**options: Any) -> str:
        return "".join(
            sample(model, SHORT, TRAINING, **{"prompt": "the cat", "length": 40, "temperature": 0.05, **options})
        )

    assert len(text()) == 40
    assert text() == text()
    assert text() != text(seed=1)
    assert text() != text(prompt="we go")
    assert text(prompt=None) == text(prompt="\n")
    assert text(temperature=0) == text(temperature=0, seed=5)


def test_the_likeliest_text_is_the_one_of_the_model_in_one_piece() -> None:
    for scorer in ("mlp", "affine"):
        model = build(scorer=scorer)
        text = "".join(sample(model, SHORT, TRAINING, "the cat", 30, temperature=0, max_memory=100))
        whole = SHORT.encode("the cat" + text, "prompt").long()
        with torch.no_grad():
            outputs, _ = model(whole[:-1].unsqueeze(1))
        (likeliest, second), (expected, _) = (part.unbind(-1) for part in outputs[6:, 0].topk(2))
        certain = likeliest - second > 1e-4  # pieces add in another order
        assert certain.float().mean() > 0.9
        assert torch.equal(whole[7:][certain], expected[certain])


@pytest.mark.parametrize("scorer", ["mlp", "affine"])
def test_a_sample_needs_no_more_memory_for_more_text(scorer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(scorer=scorer)
    kept: list[int] = []
    recent = SABState.recent

    def watched(state: SABState, count: int) -> SABState:
        found = recent(state, count)
        kept.append(found.numbers.shape[-1])
        return found

    monkeypatch.setattr(SABState, "recent", watched)
    assert len(list(sample(model, SHORT, TRAINING, length=100))) == 100
    assert kept[-1] == 10, "as many as a sequence of 20 has"
    assert len(list(sample(model, SHORT, TRAINING, length=100, max_memory=4))) == 100
    assert kept[-1] == 4


def test_whoever_reads_a_sample_keeps_autograd() -> None:
    made = sample(build(), SHORT, TRAINING, length=2)
    next(made)
    assert torch.is_grad_enabled()


# A text of the user's


def test_a_score_is_what_an_evaluation_gives_of_the_same_text() -> None:
    model = build()
    text = SHORT.text("test").decode()
    found = score(model, SHORT, TRAINING, text)
    assert found["bits_per_character"] == evaluate(model, SHORT, TRAINING, "test")["bits_per_character"]
    assert found["bits_per_character_carried"] == evaluate_fully(model, SHORT, TRAINING, "test", 1).popitem()[1]
    assert (found["characters"], found["skipped"]) == (len(text) - 1, 0)
    short = score(model, SHORT, TRAINING, "A cat", skip_unknown=True)
    assert (short["characters"], short["skipped"]) == (3, 1)
    assert short["bits_per_character"] == pytest.approx(short["bits_per_character_carried"])

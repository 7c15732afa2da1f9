"""Tasks whose examples exist, on data of a few kilobytes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sab.errors import UserError
from sab.lab import data
from sab.lab.data import DATASETS, formats
from sab.lab.tasks import CIFAR10, ECG, IMDB, MNIST, PTB, Series, Split, StoredTask, Text8, stored
from sab.lab.tasks.base import SPLITS
from sab.lab.tasks.mnist import permutation
from tests.lab import tiny

pytestmark = pytest.mark.usefixtures("tiny_data")
CPU, FLOAT = torch.device("cpu"), torch.float32
every_task = pytest.mark.parametrize(
    "task",
    [
        *(PTB(length=7), Text8(), Text8(part="prefix", length=31), MNIST(), CIFAR10()),
        *(Series(), Series("plaid"), ECG(), IMDB()),
    ],
    ids=lambda task: task.title,
)


@every_task
def test_an_epoch_comes_to_every_example_once_in_an_order_of_its_own(task: StoredTask) -> None:
    size = 5
    count = task.count("train")
    batches = task.batches_per_epoch(size)
    assert batches == count // size

    def epoch(number: int, seed: int = 3) -> list[int]:
        sent = [task.send(seed, number * batches + index, size, "train", FLOAT) for index in range(batches)]
        return torch.cat([rows for (rows,) in sent]).tolist()

    first, second = epoch(0), epoch(1)
    assert len(set(first)) == len(first) == batches * size
    assert set(first) <= set(range(count))
    assert first != second
    assert first == epoch(0)
    assert first != epoch(0, seed=4)


def test_ptb_is_lines_without_the_blanks_around_them() -> None:
    task = PTB()
    for place, split in enumerate(SPLITS):
        content = tiny.contents()["ptb"][place].decode()
        expected = "".join(line.strip(" ") + "\n" for line in content.split("\n")[:-1])
        assert task.text(split).decode() == expected
        assert task.decode(task.characters(split).tolist()) == expected
    assert task.input_size == task.output_size == len(set(task.symbols)) == 50


def test_text8_is_split_by_counts() -> None:
    (text,) = tiny.contents()["text8"]
    parts = [Text8().text(split) for split in SPLITS]
    assert parts == [text[:8_000], text[8_000:10_000], text[10_000:]]
    parts = [Text8(part="prefix").text(split) for split in SPLITS]
    assert parts == [text[:6_000], text[6_000:7_500], text[7_500:9_000]]
    assert Text8().input_size == 27
    assert (Text8().title, Text8(part="prefix").title) == ("text8", "text8 prefix")


@pytest.mark.parametrize("length", [1, 7, 100])
@pytest.mark.parametrize("split", SPLITS)
def test_all_of_a_text_is_said_once(length: int, split: Split) -> None:
    task = PTB(length=length)
    text = task.characters(split).long()
    seen, said = [], []
    for inputs, targets in task.whole(split, 6, CPU, FLOAT):
        assert inputs.shape == targets.shape
        assert len(inputs) <= length
        assert inputs.shape[1] <= 6
        seen.append(inputs.t().flatten())
        said.append(targets.t().flatten())
    assert torch.equal(torch.cat(seen), text[:-1])
    assert torch.equal(torch.cat(said), text[1:])


def test_a_characters_loss_is_in_nats_and_its_metric_in_bits() -> None:
    task = PTB(length=3)
    outputs, targets = torch.zeros(3, 2, 50), torch.zeros(3, 2, dtype=torch.int64)
    assert task.loss(outputs, targets).item() == pytest.approx(math.log(50))
    assert task.metrics(outputs, targets)["bits_per_character"].item() == pytest.approx(math.log2(50))


def test_encoding_is_the_inverse_of_decoding() -> None:
    task = PTB()
    assert task.decode(task.encode(task.symbols, "prompt").tolist()) == task.symbols
    assert task.decode(task.encode("of_the\n", "prompt").tolist()) == "of the\n"
    assert task.decode(task.encode("aZ€b\U0001f600", "prompt", skip_unknown=True).tolist()) == "ab"
    assert len(task.encode("", "prompt")) == 0
    for text, sentence in {"a€": "got '€' as character 2", "Q": "got 'Q' as character 1"}.items():
        with pytest.raises(UserError, match=sentence) as caught:
            task.encode(text, "prompt")
        assert caught.value.option == "prompt"


def test_mnist_is_pixels_from_0_to_1_in_scan_lines() -> None:
    task = MNIST()
    images, labels, test_images, test_labels = tiny.contents()["mnist"]
    pixels, digits = formats.read_idx(images), formats.read_idx(labels)
    inputs, targets = next(task.whole("train", 40, CPU, torch.float64))
    assert inputs.shape == (784, 40, 1)
    np.testing.assert_allclose(inputs[:, 7, 0].numpy() * 255, pixels[7].flatten(), rtol=1e-12)
    assert targets.tolist() == digits[:40].tolist()
    inputs, targets = next(task.whole("valid", 40, CPU, FLOAT))
    assert targets.tolist() == digits[40:].tolist()
    assert 0 <= inputs.min() < inputs.max() == 1
    _, targets = next(task.whole("test", 40, CPU, FLOAT))
    assert targets.tolist() == formats.read_idx(test_labels).tolist()
    assert len(formats.read_idx(test_images)) == len(targets)


def test_permuted_mnist_has_the_same_pixels_in_one_other_order() -> None:
    plain, permuted = (MNIST(permuted=permuted).examples("valid")[0] for permuted in (False, True))
    order = permutation()
    assert sorted(order.tolist()) == list(range(784))
    assert order[:4].tolist() == [430, 106, 259, 538], "for ever"
    assert torch.equal(permuted, plain[:, torch.from_numpy(order)])
    assert (MNIST().label, MNIST(permuted=True).label) == ("mnist", "mnist-permuted")


def test_mnist_is_judged_at_the_last_step() -> None:
    task = MNIST()
    outputs, targets = torch.zeros(784, 3, 10), torch.tensor([1, 2, 3])
    outputs[-1, torch.arange(3), torch.tensor([1, 2, 4])] = 50.0
    metrics = task.metrics(outputs, targets)
    assert metrics["accuracy"].item() == pytest.approx(2 / 3)
    assert metrics["cross_entropy"].item() == task.loss(outputs, targets).item() == pytest.approx(50 / 3)


def test_cifar10_is_three_numbers_a_pixel_in_scan_lines() -> None:
    task = CIFAR10()
    *training, test = (np.frombuffer(content, np.uint8).reshape(-1, 3073) for content in tiny.contents()["cifar10"])
    records = np.concatenate(training)
    inputs, targets = next(task.whole("train", 40, CPU, torch.float64))
    assert inputs.shape == (1024, 40, 3)
    red, green, blue = records[15, 1:].reshape(3, 1024)
    np.testing.assert_allclose(inputs[:, 15].numpy() * 255, np.stack([red, green, blue], axis=1), rtol=1e-12)
    assert targets.tolist() == records[:40, 0].tolist()
    assert next(task.whole("valid", 40, CPU, FLOAT))[1].tolist() == records[40:, 0].tolist()
    assert next(task.whole("test", 40, CPU, FLOAT))[1].tolist() == test[:, 0].tolist()
    assert (task.label, task.title, task.batches_per_epoch(5)) == ("cifar10", "cifar10", 8)


def test_the_folder_of_the_data_is_no_part_of_what_a_task_is(tiny_data: Path) -> None:
    task = PTB(data_dir=tiny_data)
    assert task == PTB()
    assert "data_dir" not in task.options()
    assert task.label == "ptb-100"


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for wrong, option in [
        (lambda: PTB(length=0), "length"),
        (lambda: Text8(part="half"), "part"),  # pyright: ignore[reportArgumentType]
        (lambda: MNIST(permuted=1), "permuted"),  # pyright: ignore[reportArgumentType]
        (lambda: PTB(length=10**6).check_data(1), "length"),
        (lambda: MNIST().check_data(41), "batch_size"),
        (lambda: MNIST().batch(0, 0, 13, "valid"), "batch_size"),
        (lambda: Text8(data_dir=tmp_path).check_data(1), "data_dir"),
    ]:
        stored.forget_examples()
        with pytest.raises(UserError, match=f"^{option} must ") as caught:
            wrong()
        assert caught.value.option == option


def test_contents_that_are_not_what_the_data_set_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, counts in {"ptb": (1, 2, 3), "mnist": (3, 3, 3), "cifar10": (3, 3, 3)}.items():
        monkeypatch.setitem(DATASETS, name, replace(DATASETS[name], counts=counts))
    with pytest.raises(UserError, match="the train text of ptb must have 1 characters"):
        PTB().text("train")
    with pytest.raises(UserError, match="the train files of mnist must hold 6 images of 28 by 28"):
        MNIST().examples("train")
    with pytest.raises(UserError, match="the test files of cifar10 must hold 3 images; they hold 12"):
        CIFAR10().examples("test")
    with monkeypatch.context() as patched:
        patched.setattr(data, "load", lambda *_: (bytes(5),) * 6)
        with pytest.raises(UserError, match=r"^the train files of cifar10 must hold its images; its 5 bytes are no"):
            CIFAR10().examples("train")
    monkeypatch.setattr(Text8, "symbols", " abc")
    with pytest.raises(UserError, match="the valid text of text8 must hold its symbols alone"):
        Text8().characters("valid")

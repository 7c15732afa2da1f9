"""Lightning: a SAB layer in a LightningModule, on real recordings of differing lengths.

JapaneseVowels: nine speakers say two vowels; 12 numbers describe each of 7 to 29 moments, and the model says who spoke
(Kudo, Toyama and Shimbo; 270 recordings to train on, 370 to test). The data come with sktime (BSD licence) in its
wheel; nothing is downloaded.

    python examples/lightning_module.py
    python examples/lightning_module.py --precision bf16-mixed

It needs `pip install 'sab-torch[examples]'`. Nothing in it is special to the layer: Lightning clips gradients, keeps
the checkpoint of the best epoch, loads it and tests it, as with `torch.nn.LSTM`. The lengths of a batch go into the
layer, so that padding is not read. It took 9 s of CPU time with one thread: 92.2 % of the test recordings.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from typing import Any, NamedTuple

import lightning
import numpy
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import sab

CHANNELS, SPEAKERS = 12, 9
Recording = tuple[Tensor, int]
"""Numbers [T, CHANNELS] and who spoke."""


class Batch(NamedTuple):
    x: Tensor
    """[B, T, CHANNELS], 0 behind the end of a row."""
    lengths: Tensor
    y: Tensor


class Speakers(lightning.LightningModule):
    """Reads a recording to its end, then says who spoke."""

    def __init__(self, hidden_size: int = 64, learning_rate: float = 5e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.rnn = sab.SABLSTM(CHANNELS, hidden_size, batch_first=True, k_top=5)
        self.out = nn.Linear(hidden_size, SPEAKERS)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        hidden, _ = self.rnn(x, lengths=lengths)
        return self.out(hidden[torch.arange(len(x)), lengths - 1])  # at the last real step of each row

    def training_step(self, batch: Batch) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch.x, batch.lengths), batch.y)
        self.log("loss", loss, batch_size=len(batch.y))
        return loss

    def validation_step(self, batch: Batch) -> None:
        self._log_accuracy("validation", batch)

    def test_step(self, batch: Batch) -> None:
        self._log_accuracy("test", batch)

    def _log_accuracy(self, name: str, batch: Batch) -> None:
        right = self(batch.x, batch.lengths).argmax(-1) == batch.y
        self.log(name, right.float().mean(), batch_size=len(batch.y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.learning_rate)


def load(split: str) -> Any:
    """A list of recordings, which a DataLoader takes, though its annotation asks for a Dataset."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sktime's own
        from sktime.datasets import load_japanese_vowels

        loaded: Any = load_japanese_vowels(split, return_type="nested_univ")
    table, speakers = loaded
    recordings = (numpy.column_stack(row) for row in table.itertuples(index=False))
    return [(torch.tensor(x).float(), int(who) - 1) for x, who in zip(recordings, speakers, strict=True)]


def collate(recordings: list[Recording]) -> Batch:
    rows, speakers = zip(*recordings, strict=True)
    lengths = torch.tensor([len(row) for row in rows])
    return Batch(pad_sequence(list(rows), batch_first=True), lengths, torch.tensor(speakers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="32-true")
    parser.add_argument("--quick", action="store_true", help="hardly any training, to see that it works")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    lightning.seed_everything(0, verbose=False)
    recordings, test = load("train"), load("test")
    validation: Any = recordings[::5]
    training: Any = [one for place, one in enumerate(recordings) if place % 5]
    sets: Any = {"batch_size": 32, "collate_fn": collate}
    with tempfile.TemporaryDirectory() as folder:
        best = ModelCheckpoint(folder, monitor="validation", mode="max")
        trainer = lightning.Trainer(
            max_epochs=2 if options.quick else options.epochs,
            gradient_clip_val=1.0,
            precision=options.precision,
            callbacks=[best],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Speakers(), DataLoader(training, shuffle=True, **sets), DataLoader(validation, **sets))
        model = Speakers.load_from_checkpoint(best.best_model_path)
        (found,) = trainer.test(model, DataLoader(test, **sets), verbose=False)
    print(f"{len(training)} recordings to train on, {len(test)} to test, of 7 to 29 steps; {options.precision}")
    print(f"best epoch {best.best_model_score:.1%} in validation; test {found['test']:.1%}")


if __name__ == "__main__":
    main()

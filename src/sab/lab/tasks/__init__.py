"""The tasks. To add one, write its file and name its class in TASKS: the command line follows from that."""

from __future__ import annotations

from sab.lab.tasks.adding import Adding
from sab.lab.tasks.base import DrawnTask, Headline, Split, Task
from sab.lab.tasks.characters import CharacterTask
from sab.lab.tasks.cifar10 import CIFAR10
from sab.lab.tasks.copying import Copying
from sab.lab.tasks.ecg import ECG
from sab.lab.tasks.images import ImageTask
from sab.lab.tasks.imdb import IMDB
from sab.lab.tasks.labelled import LabelledTask
from sab.lab.tasks.mnist import MNIST
from sab.lab.tasks.ptb import PTB
from sab.lab.tasks.recall import Recall
from sab.lab.tasks.series import Series
from sab.lab.tasks.stored import StoredTask
from sab.lab.tasks.text8 import Text8

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Copying, Adding, Recall, PTB, Text8, MNIST, CIFAR10, Series, ECG, IMDB)
}

__all__ = [
    "CIFAR10",
    "ECG",
    "IMDB",
    "MNIST",
    "PTB",
    "TASKS",
    "Adding",
    "CharacterTask",
    "Copying",
    "DrawnTask",
    "Headline",
    "ImageTask",
    "LabelledTask",
    "Recall",
    "Series",
    "Split",
    "StoredTask",
    "Task",
    "Text8",
]

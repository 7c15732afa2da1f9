"""The tasks. To add one, write its file and name its class in TASKS: the command line follows from that."""

from __future__ import annotations

from sab.tasks.adding import Adding
from sab.tasks.base import DrawnTask, Headline, Split, Task
from sab.tasks.characters import CharacterTask
from sab.tasks.copying import Copying
from sab.tasks.mnist import MNIST
from sab.tasks.ptb import PTB
from sab.tasks.stored import StoredTask
from sab.tasks.text8 import Text8

TASKS: dict[str, type[Task]] = {task.name: task for task in (Copying, Adding, PTB, Text8, MNIST)}

__all__ = [
    "MNIST",
    "PTB",
    "TASKS",
    "Adding",
    "CharacterTask",
    "Copying",
    "DrawnTask",
    "Headline",
    "Split",
    "StoredTask",
    "Task",
    "Text8",
]

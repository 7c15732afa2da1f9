"""The tasks. To add one, write its file and name its class in TASKS: the command line follows from that."""

from __future__ import annotations

from sab.tasks.adding import Adding
from sab.tasks.base import Headline, Split, Task
from sab.tasks.copying import Copying

TASKS: dict[str, type[Task]] = {task.name: task for task in (Copying, Adding)}

__all__ = ["TASKS", "Adding", "Copying", "Headline", "Split", "Task"]

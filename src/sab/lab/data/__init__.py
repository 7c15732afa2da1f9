"""The public data sets: where they come from, where they lie, and how it is known that they are whole."""

from __future__ import annotations

from sab.lab.data.sources import DATASETS, DataFile, Dataset
from sab.lab.data.store import folder_of, get, has, load, state_of

__all__ = ["DATASETS", "DataFile", "Dataset", "folder_of", "get", "has", "load", "state_of"]

"""The public data sets: their sources, their folder and their checksums."""

from __future__ import annotations

from sab.lab.data.sources import DATASETS, DataFile, Dataset
from sab.lab.data.store import folder_of, get, has, load, state_of

__all__ = ["DATASETS", "DataFile", "Dataset", "folder_of", "get", "has", "load", "state_of"]

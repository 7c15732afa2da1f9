"""Reading data sets that are text: labelled time series in .ts files, tables in .csv files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sab.lab.data.formats import Unreadable


class LabelledSeries(NamedTuple):
    """The time series of a .ts file."""

    values: list[np.ndarray]
    """One array of float64 for each series; their lengths may differ."""
    labels: np.ndarray
    """The number of each series' class, in the order in which the file's header lists the classes."""
    classes: int
    """How many classes the header lists."""


def read_ts(content: bytes) -> LabelledSeries:
    """The series of a .ts file of one variable, with class labels and without time stamps or missing values."""
    lines = _lines(content)
    header = _header(lines)
    for key, wanted in {"univariate": "true", "timestamps": "false", "missing": "false"}.items():
        if header.get(key, wanted).lower() != wanted:
            raise Unreadable(f"its @{key} is {header[key]!r} and not {wanted!r}")
    has_labels, *names = header.get("classlabel", "false").split()
    if has_labels.lower() != "true" or not names or len(set(names)) < len(names):
        raise Unreadable("its @classLabel does not list its classes")
    values: list[np.ndarray] = []
    labels: list[int] = []
    for number, line in lines:
        series, colon, label = line.rpartition(":")
        if not colon or label.strip() not in names:
            raise Unreadable(f"line {number} does not end in one of its classes")
        values.append(_numbers(series.split(","), number))
        labels.append(names.index(label.strip()))
    if not values:
        raise Unreadable("it holds no series")
    return LabelledSeries(values, np.array(labels), len(names))


def _lines(content: bytes) -> Iterator[tuple[int, str]]:
    """The lines that are neither empty nor comments, with their numbers from 1."""
    for number, line in enumerate(_text(content).split("\n"), start=1):
        if (stripped := line.strip()) and not stripped.startswith("#"):
            yield number, stripped


def _header(lines: Iterator[tuple[int, str]]) -> dict[str, str]:
    """The lines `@key value` up to `@data`, with keys in lower case."""
    header: dict[str, str] = {}
    for number, line in lines:
        key, _, value = line.partition(" ")
        if not key.startswith("@"):
            raise Unreadable(f"line {number} is no part of a header")
        if key.lower() == "@data":
            return header
        header[key[1:].lower()] = value.strip()
    raise Unreadable("it has no line @data")


def read_csv(content: bytes, columns: Sequence[str]) -> list[list[str]]:
    """The rows of a .csv file with exactly these columns, which its first line names."""
    reader = csv.reader(io.StringIO(_text(content), newline=""), strict=True)
    try:
        rows = list(reader)
    except csv.Error as error:
        raise Unreadable(f"line {reader.line_num} is no part of a table: {error}") from error
    if not rows or rows[0] != list(columns):
        raise Unreadable(f"its first line does not name the columns {', '.join(columns)}")
    for number, row in enumerate(rows[1:], start=1):
        if len(row) != len(columns):
            raise Unreadable(f"row {number} has {len(row)} columns and not {len(columns)}")
    return rows[1:]


def read_column(content: bytes, columns: Sequence[str], column: str) -> np.ndarray:
    """The numbers in one column of such a file, float64."""
    place = list(columns).index(column)
    rows = read_csv(content, columns)
    if not rows:
        raise Unreadable("it holds no rows")
    return _numbers([row[place] for row in rows], None)


def _text(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"it is no text in UTF-8: {error.reason} at byte {error.start:,}") from error


def _numbers(words: Sequence[str], line: int | None) -> np.ndarray:
    where = "it" if line is None else f"line {line}"
    try:
        numbers = np.array(words, dtype=np.float64)
    except ValueError as error:
        raise Unreadable(f"{where} holds something else than numbers") from error
    if not np.isfinite(numbers).all():
        raise Unreadable(f"{where} holds a number that is not finite")
    return numbers

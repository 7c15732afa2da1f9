"""The folder of the data sets: loading them from there, and getting them into it.

The checksum of every file is compared each time that it is read. A file with another checksum is never used: `load`
raises an error, and `get` renames it to a name that ends in .broken before it gets the file again.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError
from urllib.request import Request, urlopen

from sab.errors import UserTypeError, UserValueError, check_choice
from sab.lab.data import formats
from sab.lab.data.formats import Unreadable
from sab.lab.data.sources import DATASETS, DataFile, Dataset
from sab.lab.files import replacing, writing

VARIABLE = "SAB_DATA"
TIMEOUT = 30.0
"""Seconds after which a source that does not answer is given up."""
OnProgress = Callable[[DataFile, int, int | None], None]
"""Called with how many bytes of a file have come, and of how many if that is known."""


class DataState(NamedTuple):
    """What is known of a data set in a folder."""

    is_intact: bool
    message: str


def folder_of(data_dir: Path | str | None = None) -> Path:
    """The folder of all data: the one given, or the environment's SAB_DATA, or one in the user's cache."""
    if data_dir is not None:
        if not isinstance(data_dir, Path | str):
            raise UserTypeError(f"data_dir must be a path; got {data_dir!r}.", "data_dir")
        return Path(data_dir)
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "sab" / "data"


def versions(folder: str) -> list[Dataset]:
    """The versions of a data set that share a name on the command line, the best first."""
    return [dataset for dataset in DATASETS.values() if dataset.folder == folder]


def folders() -> list[str]:
    """The names of the data sets on the command line."""
    return list(dict.fromkeys(dataset.folder for dataset in DATASETS.values()))


def load(name: str, data_dir: Path | str | None = None) -> tuple[bytes, ...]:
    """The contents of a data set's files, in their order; their checksums are checked."""
    return _load(DATASETS[check_choice("name", name, DATASETS)], folder_of(data_dir))


def has(name: str, data_dir: Path | str | None = None) -> bool:
    """Whether all files of a data set are there, intact or not."""
    dataset = DATASETS[check_choice("name", name, DATASETS)]
    return all(_find(folder_of(data_dir) / dataset.folder, file.names) for file in dataset.files)


@functools.lru_cache(maxsize=4)
def _load(dataset: Dataset, folder: Path) -> tuple[bytes, ...]:
    return tuple(_load_file(dataset, file, folder) for file in dataset.files)


def _load_file(dataset: Dataset, file: DataFile, folder: Path) -> bytes:
    path = _find(folder / dataset.folder, file.names)
    if path is None:
        where = str(folder / dataset.folder)
        problem = f"{file.name!r} is not in {where!r}: get it with: sab data get {dataset.folder}"
        raise UserValueError(f"data_dir must hold {dataset.name}; {problem}.", "data_dir")
    try:
        content = formats.read(path, file.size)
        _check(file, content)
    except Unreadable as trouble:
        advice = f"get it again with: sab data get {dataset.folder}"
        raise UserValueError(f"{str(path)!r} must be {file.name} of {dataset.name}; {trouble}: {advice}.") from trouble
    return content


def state_of(dataset: Dataset, folder: Path) -> DataState:
    """Whether a data set is there and intact."""
    missing = [file.name for file in dataset.files if _find(folder / dataset.folder, file.names) is None]
    if len(missing) == len(dataset.files):
        return DataState(False, "not here")
    if missing:
        return DataState(False, f"incomplete: {', '.join(missing)} missing")
    for file in dataset.files:
        path = _find(folder / dataset.folder, file.names)
        assert path is not None
        try:
            _check(file, formats.read(path, file.size))
        except Unreadable as trouble:
            return DataState(False, f"broken: {path.name}: {trouble}")
    return DataState(True, "here, as its checksums say")


def get(
    folder: str,
    data_dir: Path | str | None = None,
    source: Path | str | None = None,
    on_progress: OnProgress | None = None,
) -> tuple[Dataset, list[Path]]:
    """Gets a data set into the folder of all data; returns its version and the paths of its files.

    It comes from `source`, a folder or an archive or, for a data set of one file, that file; or from its public source.
    Intact files that are there already are left as they are.
    """
    check_choice("name", folder, folders())
    target = folder_of(data_dir) / folder
    chosen = versions(folder)
    downloads = _Downloads(target, on_progress or (lambda *_: None))
    read: Callable[[Dataset, DataFile], bytes]
    if source is None:
        dataset = next((one for one in chosen if all(_is_intact(target, file) for file in one.files)), chosen[0])
        read = downloads.read
    else:
        origin = Path(source)
        dataset, read = _version_in(origin, chosen), functools.partial(_from_local, origin)
    with writing(target, "data_dir"):
        target.mkdir(parents=True, exist_ok=True)
    try:
        paths = [_get_file(dataset, file, target, read) for file in dataset.files]
    finally:
        downloads.close()
    _load.cache_clear()
    return dataset, paths


def _get_file(dataset: Dataset, file: DataFile, target: Path, read: Callable[[Dataset, DataFile], bytes]) -> Path:
    """The path of a file in the folder of its data set, where `read` gets it unless it is there and intact."""
    if not _is_intact(target, file):
        _set_aside(_find(target, file.names))
        content = read(dataset, file)
        with replacing(target / file.name, "data_dir") as temporary:
            temporary.write_bytes(content)
    found = _find(target, file.names)
    assert found is not None
    return found


def _find(folder: Path, names: Iterable[str]) -> Path | None:
    """The path of the file of one of these names, plain or packed."""
    for name in names:
        for suffix in ("", *formats.PACKED):
            path = folder / (name + suffix)
            if path.is_file():
                return path
    return None


def _is_intact(folder: Path, file: DataFile) -> bool:
    path = _find(folder, file.names)
    try:
        if path is not None:
            _check(file, formats.read(path, file.size))
    except Unreadable:
        return False
    return path is not None


def _check(file: DataFile, content: bytes) -> None:
    if len(content) != file.size:
        raise Unreadable(f"it holds {len(content):,} bytes and not {file.size:,}")
    digest = hashlib.sha256(content).hexdigest()
    if digest != file.sha256:
        raise Unreadable(f"its SHA-256 is {digest} and not {file.sha256}")


def _set_aside(path: Path | None) -> None:
    """Renames a broken file to a name that is not looked for."""
    if path is not None:
        with writing(path, "data_dir"):
            os.replace(path, path.with_name(f"{path.name}.broken"))


def _version_in(source: Path, chosen: list[Dataset]) -> Dataset:
    """The first version of a data set that a local source has a file of."""
    if not source.exists():
        raise UserValueError(f"from {str(source)!r} must be a folder or an archive; there is no such file.", "from")
    for dataset in chosen:
        if any(_holds(source, dataset, file) for file in dataset.files):
            return dataset
    wanted = " or ".join(", ".join(file.name for file in dataset.files) for dataset in chosen)
    packed = "plain or as .gz or .xz, in a folder, a .zip, a .whl or a .tar.gz"
    raise UserValueError(f"from {str(source)!r} must hold {wanted}, {packed}; it holds none of them.", "from")


def _holds(source: Path, dataset: Dataset, file: DataFile) -> bool:
    names = [*file.names, *(() if file.other_form is None else file.other_form.names[:1])]
    if not _is_archive(source):
        return _path_in(source, dataset, names) is not None
    try:
        return not formats.names_in_archive(source).isdisjoint(names)
    except Unreadable as trouble:
        raise UserValueError(f"from {str(source)!r} must be an archive; {trouble}.", "from") from trouble


def _is_archive(source: Path) -> bool:
    return formats.is_archive(source) and not source.is_dir()


def _path_in(source: Path, dataset: Dataset, names: Iterable[str]) -> Path | None:
    """The path of the file of one of these names in the user's folder; that of an archive, whatever it holds."""
    if source.is_dir():
        return _find(source, names) or _find(source / dataset.folder, names)
    return source if _is_archive(source) or formats.plain_name(source.name) in names else None


def _read_in(source: Path, dataset: Dataset, names: Iterable[str], most: int) -> bytes | None:
    """The content of such a file, of at most `most` bytes; None where there is none."""
    path = _path_in(source, dataset, names)
    if path is None:
        return None
    return formats.read_from_archive(source, names, most) if _is_archive(source) else formats.read(path, most)


def _from_local(source: Path, dataset: Dataset, file: DataFile) -> bytes:
    """The content of a file from the user's own folder or archive, or made from what that has in its place."""
    names = file.names
    try:
        content = _read_in(source, dataset, names, file.size)
        if content is None and (form := file.other_form) is not None:
            names = form.names
            parts = [_read_in(source, dataset, (name,), form.most) for name in names]
            content = None if None in parts else form.make(*parts)
        if content is None:
            raise UserValueError(f"from {str(source)!r} must hold {file.name} too; it does not.", "from")
        _check(file, content)
    except Unreadable as trouble:
        path = _path_in(source, dataset, names) or source
        raise UserValueError(
            f"from {str(path)!r} must hold {file.name} of {dataset.name}; {trouble}, so it was not used.", "from"
        ) from trouble
    return content


class _Downloads:
    """Public sources; an archive that several files come from is downloaded once."""

    def __init__(self, target: Path, on_progress: OnProgress):
        self._target, self._on_progress = target, on_progress
        self._fetched: dict[str, Path] = {}

    def read(self, dataset: Dataset, file: DataFile) -> bytes:
        """The content of a file from the first public source that has it."""
        target = self._target
        troubles: list[str] = []
        for url in file.urls:
            try:
                return self._read_from(url, file)
            except Unreadable as trouble:
                broken = target / f"{_name_of(url)}.broken"
                with writing(broken, "data_dir"):
                    os.replace(self._fetched.pop(url), broken)
                troubles.append(f"what {url} gave is not it ({trouble}; kept as {str(broken)!r})")
            except (OSError, HTTPException) as error:
                self._fetched.pop(url).unlink(missing_ok=True)
                reason = error.reason if isinstance(error, URLError) else error
                troubles.append(f"{url} cannot be reached ({reason})")
        missing = ", ".join(other.name for other in dataset.files if not _is_intact(target, other))
        raise UserValueError(
            f"{file.name} of {dataset.name} could not be got: {', '.join(troubles) or 'it has no public source'}; put "
            f"{missing}, plain or as .gz or .xz, into {str(target)!r}, or give a folder or an archive with --from."
        )

    def _read_from(self, url: str, file: DataFile) -> bytes:
        if url not in self._fetched:
            with writing(self._target, "data_dir"):
                descriptor, partial = tempfile.mkstemp(prefix=".", suffix=f".part-{_name_of(url)}", dir=self._target)
                os.close(descriptor)
            self._fetched[url] = Path(partial)
            _fetch(url, Path(partial), file, self._on_progress)
        path = self._fetched[url]
        if formats.is_archive(path):
            content = formats.read_from_archive(path, file.names, file.size)
            if content is None:
                raise Unreadable(f"it holds no {file.name}")
        else:
            content = formats.read(path, file.size)
        _check(file, content)
        return content

    def close(self) -> None:
        """Removes what was downloaded."""
        for path in self._fetched.values():
            path.unlink(missing_ok=True)


def _name_of(url: str) -> str:
    return url.rpartition("/")[2]


def _fetch(url: str, path: Path, file: DataFile, on_progress: OnProgress) -> None:
    """Downloads an address into a file, unless it is larger than the expected content or archive."""
    most = max(file.size, file.archive_size) + 2**20
    with urlopen(Request(url, headers={"User-Agent": "sab"}), timeout=TIMEOUT) as response, path.open("wb") as out:
        length = response.headers.get("Content-Length")
        total = int(length) if length and length.isdecimal() else None
        come = 0
        while chunk := response.read(formats.CHUNK):
            come += len(chunk)
            if come > most:
                raise Unreadable(f"it is larger than {most:,} bytes")
            out.write(chunk)
            on_progress(file, come, total)
    if total is not None and come != total:
        raise Unreadable(f"{come:,} of its {total:,} bytes came")

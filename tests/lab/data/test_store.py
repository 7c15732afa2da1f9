"""The folder of the data: what is in it is what its checksums say, or it is not used."""

from __future__ import annotations

import io
import lzma
import urllib.error
from dataclasses import replace
from email.message import Message
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from sab.errors import UserError
from sab.lab import data
from sab.lab.data import DATASETS, store
from sab.lab.data.progress import Bar
from tests.lab import tiny
from tests.lab.data.test_formats import tar, zipped

PTB = tiny.contents()["ptb"]
NAMES = ["ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"]
pytestmark = pytest.mark.usefixtures("tiny_data")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """An empty folder of data."""
    return tmp_path / "here"


def told(call: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    return str(caught.value)


def test_the_folder_is_the_one_given_or_the_environments_or_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAB_DATA", "/some/where")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data.folder_of("given") == Path("given")
    assert data.folder_of() == Path("/some/where")
    monkeypatch.delenv("SAB_DATA")
    assert data.folder_of() == tmp_path / "sab" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data.folder_of() == Path.home() / ".cache" / "sab" / "data"
    assert told(data.folder_of, 3) == "data_dir must be a path; got 3."


def test_loading_reads_packed_files_where_they_are() -> None:
    for name, contents in tiny.contents().items():
        assert data.load(name) == tuple(contents)
        assert data.has(name)
        assert data.state_of(DATASETS[name], data.folder_of()) == (True, "here, as its checksums say")


def test_what_is_missing_is_named_with_what_to_do(here: Path) -> None:
    sentence = told(data.load, "ptb", here)
    assert sentence.startswith(f"data_dir must hold ptb; 'ptb.train.txt' is not in '{here}/ptb'")
    assert sentence.endswith("get it with: sab data get ptb.")
    assert data.state_of(DATASETS["ptb"], here) == (False, "not here")
    (here / "ptb").mkdir(parents=True)
    (here / "ptb" / NAMES[0]).write_bytes(PTB[0])
    assert data.state_of(DATASETS["ptb"], here) == (False, "incomplete: ptb.valid.txt, ptb.test.txt missing")
    assert not data.has("ptb", here)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (PTB[0][:-5], "bytes and not"),
        (PTB[0] + b"x", "it holds more than"),
        (PTB[0].replace(b"cat", b"dog"), "its SHA-256 is"),
        (b"", "it holds 0 bytes and not"),
    ],
)
def test_a_broken_file_is_never_used_and_kept_aside(here: Path, tiny_data: Path, content: bytes, reason: str) -> None:
    data.get("ptb", here, tiny_data)
    path = here / "ptb" / NAMES[0]
    path.write_bytes(content)
    sentence = told(data.load, "ptb", here)
    assert sentence.startswith(f"'{path}' must be ptb.train.txt of ptb; ")
    assert reason in sentence
    assert sentence.endswith("get it again with: sab data get ptb.")
    assert data.state_of(DATASETS["ptb"], here)[1].startswith("broken: ptb.train.txt: ")
    data.get("ptb", here, tiny_data)
    assert path.read_bytes() == PTB[0]
    assert path.with_name("ptb.train.txt.broken").read_bytes() == content
    assert data.load("ptb", here) == tuple(PTB)


def test_from_a_folder_of_data_or_one_with_the_files(here: Path, tmp_path: Path, tiny_data: Path) -> None:
    dataset, paths = data.get("ptb", here, tiny_data)
    assert dataset.name == "ptb"
    assert [path.read_bytes() for path in paths] == PTB
    assert sorted(path.name for path in (here / "ptb").iterdir()) == sorted(NAMES)
    data.get("ptb", tmp_path / "other", tiny_data / "ptb")
    assert data.load("ptb", tmp_path / "other") == tuple(PTB)


def test_what_is_whole_is_left_as_it_is(here: Path, tiny_data: Path) -> None:
    _, paths = data.get("ptb", here, tiny_data)
    before = [path.stat().st_mtime_ns for path in paths]
    data.get("ptb", here)  # and no source is asked
    data.get("ptb", here, tiny_data)
    assert [path.stat().st_mtime_ns for path in paths] == before


@pytest.mark.parametrize("kind", ["zip", "tgz", "whl"])
def test_from_an_archive(here: Path, tmp_path: Path, kind: str) -> None:
    inside = {f"simple-examples/data/{name}": content for name, content in zip(NAMES, PTB, strict=True)}
    path = tmp_path / f"packed.{kind}"
    (tar if kind == "tgz" else zipped)(path, {"simple-examples/README": b"...", **inside})
    data.get("ptb", here, path)
    assert data.load("ptb", here) == tuple(PTB)


def test_from_the_one_file_that_a_data_set_is(here: Path, tmp_path: Path) -> None:
    text, prefix = (tiny.contents()[name][0] for name in ("text8", "text8 prefix"))
    path = tmp_path / "text8.prefix74090640.xz"
    path.write_bytes(lzma.compress(prefix))
    dataset, _ = data.get("text8", here, path)
    assert dataset.name == "text8 prefix"
    assert data.load("text8 prefix", here) == (prefix,)
    assert data.get("text8", here)[0].name == "text8 prefix", "it is there, so no source is asked"
    data.get("text8", here, zipped(tmp_path / "text8.zip", {"text8": text}))
    assert data.load("text8", here) == (text,)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: None, "must be a folder or an archive; there is no such file."),
        (lambda path: path.mkdir(), "must hold ptb.train.txt, ptb.valid.txt, ptb.test.txt, plain or as .gz or .xz, in"),
        (lambda path: path.write_bytes(b"?"), "must be an archive; it is not a whole archive"),
        (lambda path: zipped(path, {"other": b""}), "must hold ptb.train.txt, ptb.valid.txt, ptb.test.txt, plain"),
        (lambda path: zipped(path, {NAMES[0]: PTB[0]}), "must hold ptb.valid.txt too; it does not."),
        (lambda path: zipped(path, dict.fromkeys(NAMES, b"x")), "it holds 1 bytes and not"),
        (lambda path: zipped(path, dict.fromkeys(NAMES, bytes(10**5))), "it holds more than"),
    ],
)
def test_a_source_that_has_it_not(here: Path, tmp_path: Path, make: Any, sentence: str) -> None:
    path = tmp_path / "source.zip"
    make(path)
    mistake = told(data.get, "ptb", here, path)
    assert mistake.startswith(f"from '{path}' ")
    assert sentence in mistake
    assert not list(here.rglob("ptb.valid.txt*")), "nothing of it was used"


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, tiny_data: Path) -> None:
    (tmp_path / "file").write_text("precious")
    assert told(data.get, "ptb", tmp_path / "file", tiny_data).startswith("data_dir ")
    names = "ptb, text8, mnist, cifar10, osuleaf, plaid, ecg, imdb"
    assert told(data.get, "knitting") == f"name must be one of {names}; got 'knitting'."


# Public sources, which are files here


def published(monkeypatch: pytest.MonkeyPatch, urls: dict[str, tuple[str, ...]]) -> None:
    files = [replace(file, urls=urls.get(file.name, ())) for file in DATASETS["ptb"].files]
    monkeypatch.setitem(DATASETS, "ptb", replace(DATASETS["ptb"], files=tuple(files)))


def test_download(here: Path, tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = zipped(tmp_path / "ptb.zip", {"data/ptb.test.txt": PTB[2]})
    plain = (tmp_path / "ptb.valid.txt").resolve()
    plain.write_bytes(PTB[1])
    urls = {
        NAMES[0]: ((tmp_path / "nowhere").as_uri(), (tiny_data / "ptb" / f"{NAMES[0]}.xz").as_uri()),
        NAMES[1]: (plain.as_uri(),),
        NAMES[2]: (archive.as_uri(),),
    }
    published(monkeypatch, urls)
    heard: list[tuple[str, int, int | None]] = []
    data.get("ptb", here, on_progress=lambda file, come, total: heard.append((file.name, come, total)))
    assert data.load("ptb", here) == tuple(PTB)
    assert sorted(path.name for path in (here / "ptb").iterdir()) == sorted(NAMES)
    assert (NAMES[1], len(PTB[1]), len(PTB[1])) in heard


def test_a_file_from_a_package_that_is_far_larger(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (content,) = tiny.contents()["ecg"]
    others = np.random.default_rng(0).bytes(2 * 2**20)
    wheel = zipped(tmp_path / "sktime.whl", {"sktime/other.bin": others, "sktime/data/mitdb/mitdb.csv": content})
    for size, reason in ((0, "it is larger than"), (wheel.stat().st_size, None)):
        file = replace(DATASETS["ecg"].files[0], urls=(wheel.as_uri(),), archive_size=size)
        monkeypatch.setitem(DATASETS, "ecg", replace(DATASETS["ecg"], files=(file,)))
        if reason is None:
            assert data.get("ecg", here)[1] == [here / "ecg" / "mitdb.csv"]
        else:
            assert reason in told(data.get, "ecg", here)
    assert data.load("ecg", here) == (content,)


def test_a_download_that_is_something_else_is_kept_aside(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "ptb.train.txt"
    page.write_bytes(b"<html>log in first</html>")
    empty = zipped(tmp_path / "ptb.zip", {"readme": b""})
    published(monkeypatch, {NAMES[0]: (page.as_uri(), empty.as_uri())})
    sentence = told(data.get, "ptb", here)
    assert sentence.startswith("ptb.train.txt of ptb could not be got: what file://")
    assert f"kept as '{here}/ptb/ptb.train.txt.broken'" in sentence
    assert "it holds no ptb.train.txt" in sentence
    assert sorted(path.name for path in (here / "ptb").iterdir()) == ["ptb.train.txt.broken", "ptb.zip.broken"]


class Response(io.BytesIO):
    """What a server says."""

    def __init__(self, content: bytes, length: int | None):
        super().__init__(content)
        self.headers = Message()
        if length is not None:
            self.headers["Content-Length"] = str(length)


@pytest.mark.parametrize(
    ("content", "length", "reason"),
    [
        (PTB[0][:100], len(PTB[0]), "100 of its "),
        (PTB[0][:100], None, "it holds 100 bytes and not"),
        (bytes(3 * 2**20), None, "it is larger than"),
    ],
)
def test_a_partial_or_endless_download(
    here: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, length: int | None, reason: str
) -> None:
    published(monkeypatch, {NAMES[0]: ("http://localhost/ptb.train.txt",)})
    monkeypatch.setattr(store, "urlopen", lambda *arguments, **options: Response(content, length))
    assert reason in told(data.get, "ptb", here)
    assert [path.name for path in (here / "ptb").iterdir()] == ["ptb.train.txt.broken"]


def test_without_a_network_one_sentence_says_which_file_to_put_where(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*arguments: Any, **options: Any) -> None:
        raise urllib.error.URLError("Name or service not known")

    published(monkeypatch, {NAMES[0]: ("https://localhost/ptb.train.txt",)})
    monkeypatch.setattr(store, "urlopen", unreachable)
    assert told(data.get, "ptb", here) == (
        "ptb.train.txt of ptb could not be got: https://localhost/ptb.train.txt cannot be reached (Name or service not "
        "known); put ptb.train.txt, ptb.valid.txt, ptb.test.txt, plain or as .gz or .xz, into "
        f"'{here}/ptb', or give a folder or an archive with --from."
    )
    assert not list((here / "ptb").iterdir())


def test_a_person_sees_how_much_has_come() -> None:
    told = io.StringIO()
    file = DATASETS["ptb"].files[0]
    with Bar(Console(file=told, force_terminal=True, width=100)) as bar:
        bar.update(file, 500, 1000)
        bar.update(file, 1000, 1000)
    assert file.name in told.getvalue()
    assert "1.0/1.0 kB" in told.getvalue()

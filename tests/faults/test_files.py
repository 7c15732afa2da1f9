"""Damaged files of every kind that is read; `make fuzz` tries many more of them.

A kind is made in its own folder: a strategy for contents, and a function that reads one and uses what it has read. It
ends as if nothing was wrong, or in a `UserError` (`Unreadable` below the level of sentences). All else is a bug.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import lzma
import shutil
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from sab.config import SABConfig
from sab.errors import UserError
from sab.lab.data import DATASETS, cifar10, formats, store
from sab.lab.data.formats import Unreadable
from sab.lab.experiments import costs, dropin, records, reproduce, rivals, selection
from sab.lab.experiments.tables import ROWS
from sab.lab.models import ModelConfig
from sab.lab.report import performance, results, tables
from sab.lab.report.page import document, material
from sab.lab.tasks import Copying, Text8
from sab.lab.training import Run, TrainConfig, checkpoint, text, train
from sab.lab.training.progress import show_headline, show_seconds
from tests.faults.damage import damaged, damaged_json, damaged_lines, damaged_tensors, damaged_value
from tests.faults.watch import watching
from tests.lab import tiny
from tests.lab.report.made_up import drop_in_record, rival_cost, rival_record
from tests.lab.report.made_up import record as made_up_record
from tools import distance, rows, summary
from tools import rivals as rivals_page
from tools.dropin import page_part as drop_in_part
from tools.performance import page_part as bench_page_part
from tools.results import page_part

Kind = tuple[st.SearchStrategy[Any], Callable[[Any], object]]
BOMB = bytes(3_000_000)
SMALL = 2000
"""How many bytes whoever reads an archive expects at most."""
CPU = torch.device("cpu")


def _trained(folder: Path, **training: Any) -> Run:
    """A run of two iterations."""
    options = {"iterations": 2, "batch_size": 2, "eval_every": 1, "eval_batches": 1, "checkpoint_every": 1}
    model = ModelConfig(hidden_size=2, memory=SABConfig(k_top=1, k_att=1, k_trunc=2, scorer="dot", attention_size=1))
    config = TrainConfig(**options, threads=1, device="cpu", **training)
    train(Copying(length=1), model, config, folder / "run")
    return Run.open(folder / "run")


def _newest(folder: Path) -> Path:
    """The newest checkpoint in a folder, with the others removed, so that nobody falls back on them."""
    *older, newest = sorted(folder.iterdir())
    for one in older:
        one.rename(folder.parent / f"{folder.name}-{one.name}")
    _unsign(newest / "state.json")
    return newest


def _unsign(path: Path, **changes: Any) -> None:
    """Removes the digest of a state.json itself, so that what changes in it gets further, and changes something."""
    contents = json.loads(path.read_text())
    contents.pop("digest", None)
    path.write_text(json.dumps(contents | changes))


def put_signed(path: Path, content: bytes) -> None:
    """Writes a file of a checkpoint, and its digest into the checkpoint's state: who makes the one makes the other."""
    path.write_bytes(content)
    state = path.with_name("state.json")
    if path != state:
        digests = json.loads(state.read_text())["sha256"]
        _unsign(state, sha256={**digests, path.name: hashlib.sha256(content).hexdigest()})


# Runs


def config_json(folder: Path) -> Kind:
    """A run's config.json, and what `sab info` and a resumption do first."""
    run = _trained(folder)

    def read(content: bytes) -> None:
        (run.path / "config.json").write_bytes(content)
        opened = Run.open(run.path)
        opened.config.default_out()
        repr(opened.config.options())
        opened.check_resumable(run.config)

    return damaged_json(run.config.to_json()), read


def run_folder(folder: Path) -> Kind:
    """A run whose configuration is another one in config.json and in the checkpoint alike."""
    run = _trained(folder)
    state = _newest(run.checkpoints) / "state.json"

    def read(config: Any) -> None:
        (run.path / "config.json").write_text(json.dumps(config))
        _unsign(state, config=config)
        checkpoint.load_kept(Run.open(run.path), CPU)

    return damaged_value(run.config.to_json()), read


def checkpoint_file(name: str, folder: Path) -> Kind:
    """A file of the checkpoint that a run is resumed from; those with tensors have a right checksum."""
    run = _trained(folder)
    path = _newest(run.checkpoints) / name
    model = run.config.build_model(CPU)
    optimizer = torch.optim.Adam(model.parameters())

    def read(content: bytes) -> None:
        put_signed(path, content)
        checkpoint.load(run.checkpoints, run.config, model, optimizer)

    return _damaged_file(path), read


def best_folder(folder: Path) -> Kind:
    """The best weights of a run that keeps them: one of their files."""
    run = _trained(folder, keep="best")
    best = _newest(run.best)
    good = {path.name: path.read_bytes() for path in best.iterdir()}
    model, step = run.config.build_model(CPU), int(best.name.removeprefix("step-"))

    def read(change: tuple[str, bytes]) -> None:
        for name, content in good.items():
            (best / name).write_bytes(content)
        put_signed(best / change[0], change[1])
        checkpoint.load_best(run.best, run.config, model, step)

    return st.one_of([st.tuples(st.just(name), _damaged_file(best / name)) for name in good]), read


def _damaged_file(path: Path) -> st.SearchStrategy[bytes]:
    content = path.read_bytes()
    return damaged_json(json.loads(content)) if path.suffix == ".json" else damaged_tensors(content)


def metrics_jsonl(folder: Path) -> Kind:
    """A run's metrics.jsonl, as a record and a person's eyes get it."""
    run = _trained(folder)
    path = run.path / "metrics.jsonl"
    good = [json.loads(line) for line in path.read_text().splitlines()]

    def read(content: bytes) -> None:
        path.write_bytes(content)
        found = run.evaluations()
        records.thinned(found)
        for line in found:
            show_headline(run.config.task.headline, line["metrics"])

    return damaged_lines(good), read


def result_json(folder: Path) -> Kind:
    """A run's result.json."""
    run = _trained(folder)
    path = run.path / "result.json"
    good = json.loads(path.read_text())

    def read(content: bytes) -> None:
        path.write_bytes(content)
        result = run.result()
        assert result is not None
        show_headline(run.config.task.headline, result.metrics)
        show_seconds(result.wall_time)
        (result.message + result.device + "".join(result.versions)).encode()

    return damaged_json(good), read


def page_of_runs(folder: Path) -> Kind:
    """A run whose files are hostile, on one page with a good one, which is there whatever the other holds."""
    run = _trained(folder)
    state = _newest(run.checkpoints) / "state.json"
    shutil.copytree(run.path, folder / "good", ignore=shutil.ignore_patterns("checkpoint*"))
    files = [run.path / "metrics.jsonl", run.path / "result.json", state.with_name("model.safetensors")]
    original = {path: path.read_bytes() for path in (*files, run.path / "config.json", state)}
    lines = [json.loads(line) for line in original[files[0]].splitlines()]

    def read(change: tuple[Path | None, Any]) -> None:
        for path, content in original.items():
            path.write_bytes(content)
        changed, content = change
        if changed is None:
            (run.path / "config.json").write_text(json.dumps(content))
            _unsign(state, config=content)
        elif changed.parent == state.parent:
            put_signed(changed, content)
        else:
            changed.write_bytes(content)
        found = material.gather([folder / "good", run.path])
        explored = document.explorers(found)
        page = document.part(document.parts(found, explored))
        assert all(str(path) in page for path in (folder / "good", run.path))
        page.encode()
        for mistake in found.left_out.values():
            raise mistake
        if not any(one.moments for one in explored):
            raise UserError(explored[-1].about)

    kinds = [damaged_lines(lines), damaged_json(json.loads(original[files[1]])), damaged_tensors(original[files[2]])]
    changes = [st.tuples(st.just(path), kind) for path, kind in zip(files, kinds, strict=True)]
    return st.one_of([*changes, st.tuples(st.none(), damaged_value(run.config.to_json()))]), read


# Records


def results_jsonl(folder: Path) -> Kind:
    """The records of a task, as the report gets them."""
    row = next(row for row in ROWS.values() if row.task == "mnist")
    path = records.path_of("mnist", folder)

    def read(content: bytes) -> None:
        path.write_bytes(content)
        by_row = results.load(folder)
        if len(content) % 5 == 0:  # it takes long
            page_part(by_row).encode()
            distance.part(by_row).encode()
            rows.text(by_row).encode()
        elif len(content) % 5 == 1:
            found = material.Material(by_row=dict(by_row))
            document.part(document.parts(found, document.explorers(found))).encode()
        else:
            json.dumps(tables.table_cells([row], by_row)).encode()

    return damaged_lines([made_up_record(row.id, seed) for seed in (0, 1)]), read


def drop_in_jsonl(folder: Path) -> Kind:
    """The records of the drop-in table, as its page and the choice of a learning rate get them."""
    problem = dropin.PROBLEMS["mnist"]
    path = records.path_of(dropin.TABLE.file, folder)

    def read(content: bytes) -> None:
        path.write_bytes(content)
        known = dropin.load(folder)
        drop_in_part(known).encode()
        selection.states(dropin.Part(("mnist",)), folder)

    seeds = (selection.SELECTION_SEED, 0)
    return damaged_lines([drop_in_record(problem, 2e-3, seed, 0.5, 0.5) for seed in seeds]), read


def rivals_jsonl(folder: Path) -> Kind:
    """The records of the rivals' table, as its page and the choice of a learning rate get them."""
    path = records.path_of(rivals.TABLE.file, folder)

    def read(content: bytes) -> None:
        path.write_bytes(content)
        rivals_page.page_part(rivals.load(folder), []).encode()
        summary.part({}, rivals.load(folder)).encode()
        selection.states(rivals.Part(("mnist",), methods=("lstm",)), folder)

    seeds, problem = (selection.SELECTION_SEED, 0), rivals.PROBLEMS["mnist"]
    return damaged_lines([rival_record(problem, "lstm", 2e-3, seed, 0.5, 0.5) for seed in seeds]), read


def costs_jsonl(folder: Path) -> Kind:
    """The records of what rivals cost, as the page gets them."""
    path = records.path_of(costs.FILE, folder)

    def read(content: bytes) -> None:
        path.write_bytes(content)
        rivals_page.page_part([], costs.load(folder)).encode()

    stream = {"kind": "grows", "steps": 100, "microseconds": 3.5, "bytes": 1_000}
    return damaged_lines([rival_cost("copying-300", name, stream=stream) for name in ("lstm", "sab")]), read


def notes_json(folder: Path) -> Kind:
    """What a runner noted of a run: seed0.json."""
    (job,) = reproduce.jobs_of([ROWS["copying-100-bptt"]], [0], folder)
    path = job.folder.with_suffix(".json")
    path.parent.mkdir(parents=True)
    table = [[0.5, None], [0.25, 0.75]]
    good = {"together": 2, "other_lengths": {"200": {"accuracy_last10": 0.5}}}
    good["attention"] = {"k_att": 2, "first": 1, "moments": {"100": table, "200": table}}

    def read(content: bytes) -> None:
        path.write_bytes(content)
        noted = job.noted()
        max(2, noted.get("together", 1))
        noted.get("attention", {"moments": {}})["moments"]["300"] = table
        json.dumps(noted, allow_nan=False).encode()

    return damaged_json(good), read


def bench_jsonl(folder: Path) -> Kind:
    """What the benchmark measured, as its page gets it."""
    kept = (Path(__file__).parents[2] / "benchmarks" / "results").glob("*.jsonl")
    lines = [json.loads(line) for path in sorted(kept) for line in path.read_text().splitlines()]
    path = folder / "bench.jsonl"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        bench_page_part(performance.load([path])).encode()

    return damaged_lines(list({line["kind"]: line for line in lines}.values())), read


# Data


def idx_file(folder: Path) -> Kind:
    """An array as MNIST has it."""
    good = [*tiny.images(2, 0), bytes([0, 0, 0x0D, 1, 0, 0, 0, 1, 0, 0, 1, 2]), b"\0\0\x08\0\1"]
    return damaged(good), lambda content: formats.read_idx(content).sum()


def png_file(folder: Path) -> Kind:
    """Images as a package of CIFAR-10 has them, with their list of labels."""
    content = tiny.photographs(2, 0)
    images, labels = cifar10.read_batch(content)
    listed = json.dumps(labels.tolist()).encode()
    image = tiny.png(images, [1, 4])

    def read(change: tuple[bytes, bytes]) -> None:
        made = cifar10.batch_from_png(*change, first=0, count=2)
        assert len(made) == len(content)
        if made != content:  # as the checksum would tell
            raise Unreadable("it is another one")

    both = st.tuples(damaged([image]), st.just(listed)), st.tuples(st.just(image), damaged([listed]))
    return st.one_of(both), read


def packed_file(name: str, pack: Callable[[bytes], bytes], folder: Path) -> Kind:
    """Packed files, bombs among them."""
    good = [pack(one) for one in (b"the cat sat \n" * 20, b"", BOMB, pack(BOMB))]
    path = folder / name

    def read(content: bytes) -> None:
        path.write_bytes(content)
        assert len(formats.read(path, SMALL)) <= SMALL

    return damaged([*good, good[0] + good[1]]), read


TRAVERSAL = ("../../outside/a.txt", "/outside/a.txt", "..\\..\\outside\\a.txt", "a.txt/", "a\x00.txt", "", ".", "..")


def zip_file(folder: Path) -> Kind:
    """Archives with bombs in them, names that point elsewhere, the same name twice and other ways to pack."""
    good = [
        _zipped({"folder/a.txt": b"the cat sat " * 20, "b.txt.gz": gzip.compress(b"b")}),
        _zipped(dict.fromkeys(TRAVERSAL, b"a")),
        _zipped({"a.txt": BOMB}),
        _zipped({"a.txt.gz": gzip.compress(BOMB), "nested.zip": _zipped({"a.txt": b"a"})}),
        _zipped({"a.txt": b"a" * 100}, zipfile.ZIP_LZMA),
        _zipped({"a.txt": b"a" * 100}, zipfile.ZIP_BZIP2),
        _zipped({"a.txt": b"a" * 100}, zipfile.ZIP_STORED, twice=True),
    ]
    return _archive([folder / "packed.zip"], [good])


def tar_file(folder: Path) -> Kind:
    """The same as .tar, plain or packed, with links, sparse files and heads that go on for long."""
    plain = [
        _tarred({"folder/a.txt": b"the cat sat " * 20, "b.txt.gz": gzip.compress(b"b")}),
        _tarred(dict.fromkeys(TRAVERSAL[:4], b"a"), link="/etc/passwd"),
        _tarred({"x" * 300: b"long", "a.txt": b"a"}, pax={"comment": "x" * 3000}),
        _tarred({"x" * 300: b"long", "a.txt": b"a"}, format=tarfile.GNU_FORMAT),
        _tarred({"a.txt": b"a"}, pax={"size": "99999999999"}),
        _tarred({"a.txt": b"a"}, pax={"GNU.sparse.map": "0,1", "GNU.sparse.size": "9999999999"}),
    ]
    bombs = [_tarred({"first": BOMB, "a.txt": b"a"}), _tarred({"a.txt": b"a"}, pax={"comment": "x" * 1_000_000})]
    paths = [folder / name for name in ("packed.tar", "packed.tar.gz", "packed.txz")]
    return _archive(
        paths, [plain, *([pack(one) for one in (*plain, *bombs)] for pack in (gzip.compress, lzma.compress))]
    )


def _archive(paths: Sequence[Path], good: Sequence[Sequence[bytes]]) -> Kind:
    def read(change: tuple[Path, bytes]) -> None:
        path, content = change
        path.write_bytes(content)
        formats.names_in_archive(path)
        found = formats.read_from_archive(path, ["a.txt", "b.txt"], SMALL)
        assert found is None or len(found) <= SMALL

    return st.one_of([st.tuples(st.just(path), damaged(some)) for path, some in zip(paths, good, strict=True)]), read


def _zipped(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED, twice: bool = False) -> bytes:
    made = io.BytesIO()
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(made, "w", method) as packed:
        for name, content in [*members.items()] * (1 + twice):
            entry = zipfile.ZipInfo(name)
            entry.compress_type = method
            packed.writestr(entry, content)
    return made.getvalue()


def _tarred(
    members: dict[str, bytes],
    link: str | None = None,
    pax: dict[str, str] | None = None,
    format: int = tarfile.PAX_FORMAT,
) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=format) as packed:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.pax_headers = len(content), pax or {}
            packed.addfile(entry, io.BytesIO(content))
        if link is not None:
            entry = tarfile.TarInfo("a.txt")
            entry.type, entry.linkname = tarfile.SYMTYPE, link
            packed.addfile(entry)
    return made.getvalue()


def data_get(folder: Path) -> Kind:
    """`sab data get --from`: a file, an archive or a folder of files, into the folder of the data."""
    content = tiny.contents()["text8 prefix"][0][:500]
    dataset = replace(tiny.described(DATASETS["text8 prefix"], [content]), name="text8")
    name = dataset.files[0].name
    data, source = folder / "data", folder / "source"
    source.mkdir()
    good = {
        f"{name}.gz": gzip.compress(content),
        f"{name}.xz": lzma.compress(content),
        "packed.zip": _zipped({f"../../{name}": content}),
        "packed.tar.gz": gzip.compress(_tarred({name: content}, link="../../outside")),
        name: content,
    }

    def read(change: tuple[str, bytes, bool]) -> None:
        chosen, content, is_in_a_folder = change
        path = source / chosen
        path.write_bytes(content)
        try:
            with pytest.MonkeyPatch.context() as patched:
                patched.setitem(DATASETS, "text8", dataset)
                store.get("text8", data, source if is_in_a_folder and chosen.startswith(name) else path)
        finally:
            for one in (path, *data.rglob("*")):
                if one.is_file():
                    one.unlink()

    files = [st.tuples(st.just(name), damaged([content]), st.booleans()) for name, content in good.items()]
    return st.one_of(files), read


def text_file(folder: Path) -> Kind:
    """A text of the user's, as `sab score` reads it."""
    good = [b"the cat sat on the mat " * 3, "schöne neue welt".encode(), "\ufeffa".encode(), "a b".encode("utf-16")]
    paths = {"text.txt": good, "text.gz": [gzip.compress(one) for one in good], "text.xz": [lzma.compress(good[0])]}
    task = Text8()

    def read(change: tuple[str, bytes, bool]) -> None:
        name, content, skip_unknown = change
        (folder / name).write_bytes(content)
        task.encode(text.read_text(folder / name, task), "file", skip_unknown=skip_unknown)

    return st.one_of([st.tuples(st.just(name), damaged(some), st.booleans()) for name, some in paths.items()]), read


KINDS: dict[str, Callable[[Path], Kind]] = {
    "config.json": config_json,
    "config.json and state.json alike": run_folder,
    "checkpoint/state.json": functools.partial(checkpoint_file, "state.json"),
    "checkpoint/model.safetensors": functools.partial(checkpoint_file, "model.safetensors"),
    "checkpoint/training.safetensors": functools.partial(checkpoint_file, "training.safetensors"),
    "best/": best_folder,
    "metrics.jsonl": metrics_jsonl,
    "result.json": result_json,
    "sab report": page_of_runs,
    "results/*.jsonl": results_jsonl,
    "results/dropin.jsonl": drop_in_jsonl,
    "results/rivals.jsonl": rivals_jsonl,
    "results/rivals-costs.jsonl": costs_jsonl,
    "seed*.json": notes_json,
    "benchmarks/*.jsonl": bench_jsonl,
    "IDX": idx_file,
    "PNG": png_file,
    ".gz": functools.partial(packed_file, "text.gz", gzip.compress),
    ".xz": functools.partial(packed_file, "text.xz", lzma.compress),
    ".zip": zip_file,
    ".tar": tar_file,
    "sab data get --from": data_get,
    "texts": text_file,
}


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files(kind: str, tmp_path: Path) -> None:
    contents, read = KINDS[kind](tmp_path)
    sentences: list[str | None] = []

    @settings(max_examples=4 * settings().max_examples, phases=[Phase.generate])  # shrinking would take minutes
    @given(contents)
    def attempt(content: Any) -> None:
        try:
            with watching(tmp_path):
                read(content)
            sentences.append(None)
        except (UserError, Unreadable) as error:
            sentences.append(str(error))
        assert sentences[-1] is None or (sentences[-1] and sentences[-1].isprintable())

    attempt()
    assert 3 * sentences.count(None) < 2 * len(sentences)

"""The files that are fuzzed: for each kind a good one, and what reads it and goes on with what it read.

A target is made in a folder of its own and then called with random numbers: it damages the good file and has it read.
It ends as if nothing was wrong, or in a `UserError` (`Unreadable` below the level of sentences). All else is a bug.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import lzma
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch

from sab.config import SABConfig
from sab.lab.data import DATASETS, formats, store
from sab.lab.experiments import records, reproduce
from sab.lab.experiments.tables import ROWS
from sab.lab.models import ModelConfig
from sab.lab.report import performance, results, tables
from sab.lab.tasks import Copying, Text8
from sab.lab.training import Run, TrainConfig, checkpoint, text, train
from sab.lab.training.progress import show_headline, show_seconds
from tests.faults.fuzz_mutations import mutated_bytes, mutated_json, mutated_value
from tests.lab import tiny
from tests.lab.report.made_up import record as made_up_record
from tools.performance import page_part as bench_page_part
from tools.results import page_part

Attempt = Callable[[Random], None]
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
    digests = json.loads(state.read_text())["sha256"]
    _unsign(state, sha256={**digests, path.name: hashlib.sha256(content).hexdigest()})


def _resumption(run: Run) -> Callable[[], Any]:
    """What reads the checkpoint that a run goes on from."""
    model = run.config.build_model(CPU)
    optimizer = torch.optim.Adam(model.parameters())
    return functools.partial(checkpoint.load, run.checkpoints, run.config, model, optimizer)


# Runs


def config_json(folder: Path) -> Attempt:
    """A run's config.json, and what `sab info` and a resumption do first."""
    run = _trained(folder)
    good = run.config.to_json()

    def attempt(random: Random) -> None:
        (run.path / "config.json").write_bytes(mutated_json(random, good))
        opened = Run.open(run.path)
        opened.config.default_out()
        repr(opened.config.options())
        opened.check_resumable(run.config)

    return attempt


def run_folder(folder: Path) -> Attempt:
    """A run whose configuration is another one in config.json and in the checkpoint alike."""
    run = _trained(folder)
    good, state = run.config.to_json(), _newest(run.checkpoints) / "state.json"

    def attempt(random: Random) -> None:
        config = mutated_value(random, good)
        (run.path / "config.json").write_text(json.dumps(config))
        _unsign(state, config=config)
        checkpoint.load_kept(Run.open(run.path), CPU)

    return attempt


def state_json(folder: Path) -> Attempt:
    """The state.json of a checkpoint that a run is resumed from."""
    run = _trained(folder)
    path = _newest(run.checkpoints) / "state.json"
    good, resume = json.loads(path.read_text()), _resumption(run)

    def attempt(random: Random) -> None:
        path.write_bytes(mutated_json(random, good))
        resume()

    return attempt


def tensors(name: str, folder: Path) -> Attempt:
    """One of the two files with tensors that a run is resumed from, with a right checksum."""
    run = _trained(folder)
    path = _newest(run.checkpoints) / name
    good, resume = [path.read_bytes()], _resumption(run)

    def attempt(random: Random) -> None:
        put_signed(path, _mutated_tensors(random, good))
        resume()

    return attempt


def best_folder(folder: Path) -> Attempt:
    """The best weights of a run that keeps them: both of their files."""
    run = _trained(folder, keep="best")
    best = _newest(run.best)
    state, weights = best / "state.json", best / "model.safetensors"
    good, good_weights = json.loads(state.read_text()), [weights.read_bytes()]
    model, step = run.config.build_model(CPU), int(best.name.removeprefix("step-"))

    def attempt(random: Random) -> None:
        weights.write_bytes(good_weights[0])
        if random.random() < 0.5:
            state.write_bytes(mutated_json(random, good))
        else:
            state.write_text(json.dumps(good))
            put_signed(weights, _mutated_tensors(random, good_weights))
        checkpoint.load_best(run.best, run.config, model, step)

    return attempt


def _mutated_tensors(random: Random, good: Sequence[bytes]) -> bytes:
    """A safetensors file with something wrong; half of the time it is an entry of its head, which stays one."""
    content = good[0]
    if random.random() < 0.5:
        return mutated_bytes(random, good)
    size = int.from_bytes(content[:8], "little")
    head = mutated_json(random, json.loads(content[8 : 8 + size]))
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head + content[8 + size :]


def metrics_jsonl(folder: Path) -> Attempt:
    """A run's metrics.jsonl, as a record and a person's eyes get it."""
    run = _trained(folder)
    path = run.path / "metrics.jsonl"
    good = [json.loads(line) for line in path.read_text().splitlines()]

    def attempt(random: Random) -> None:
        path.write_bytes(_mutated_lines(random, good))
        found = run.evaluations()
        records.thinned(found)
        for line in found:
            show_headline(run.config.task.headline, line["metrics"])

    return attempt


def _mutated_lines(random: Random, good: Sequence[Any]) -> bytes:
    lines = [json.dumps(one).encode() for one in good]
    place = random.randrange(len(lines))
    lines[place] = mutated_json(random, good[place])
    content = b"".join(line + b"\n" for line in lines)
    return mutated_bytes(random, [content]) if random.random() < 0.1 else content


def result_json(folder: Path) -> Attempt:
    """A run's result.json."""
    run = _trained(folder)
    path = run.path / "result.json"
    good = json.loads(path.read_text())

    def attempt(random: Random) -> None:
        path.write_bytes(mutated_json(random, good))
        result = run.result()
        assert result is not None
        show_headline(run.config.task.headline, result.metrics)
        show_seconds(result.wall_time)
        (result.message + result.device + "".join(result.versions)).encode()

    return attempt


# Records


def results_jsonl(folder: Path) -> Attempt:
    """The records of a task, as the report gets them."""
    row = next(row for row in ROWS.values() if row.task == "mnist")
    good = [made_up_record(row.id, seed) for seed in (0, 1)]
    path = records.path_of("mnist", folder)

    def attempt(random: Random) -> None:
        path.write_bytes(_mutated_lines(random, good))
        by_row = results.load(folder)
        if random.random() < 0.2:  # it takes long
            page_part(by_row).encode()
        else:
            json.dumps(tables.table_cells([row], by_row)).encode()

    return attempt


def notes_json(folder: Path) -> Attempt:
    """What a runner noted of a run: seed0.json."""
    row = ROWS["copying-100-bptt"]
    (job,) = reproduce.jobs_of([row], [0], folder)
    path = job.folder.with_suffix(".json")
    path.parent.mkdir(parents=True)
    table = [[0.5, None], [0.25, 0.75]]
    good = {"together": 2, "other_lengths": {"200": {"accuracy_last10": 0.5}}}
    good["attention"] = {"k_att": 2, "first": 1, "moments": {"100": table, "200": table}}

    def attempt(random: Random) -> None:
        path.write_bytes(mutated_json(random, good))
        noted = job.noted()
        max(2, noted.get("together", 1))
        noted.get("attention", {"moments": {}})["moments"]["300"] = table
        json.dumps(noted, allow_nan=False).encode()

    return attempt


def bench_jsonl(folder: Path) -> Attempt:
    """What the benchmark measured, as its page gets it."""
    kept = (Path(__file__).parents[2] / "benchmarks" / "results").glob("*.jsonl")
    lines = [json.loads(line) for path in sorted(kept) for line in path.read_text().splitlines()]
    good = list({line["kind"]: line for line in lines}.values())
    path = folder / "bench.jsonl"

    def attempt(random: Random) -> None:
        path.write_bytes(_mutated_lines(random, good))
        bench_page_part(performance.load([path])).encode()

    return attempt


# Data


def idx_file(folder: Path) -> Attempt:
    """An array as MNIST has it."""
    good = [*tiny.images(2, 0), bytes([0, 0, 0x0D, 1, 0, 0, 0, 1, 0, 0, 1, 2]), b"\0\0\x08\0\1"]

    def attempt(random: Random) -> None:
        formats.read_idx(mutated_bytes(random, good)).sum()

    return attempt


def gzip_file(folder: Path) -> Attempt:
    """Packed files, bombs among them."""
    good = [gzip.compress(one) for one in (b"the cat sat \n" * 20, b"", BOMB, gzip.compress(BOMB))]
    return _packed(folder / "text.gz", [*good, good[0] + good[1]])


def xz_file(folder: Path) -> Attempt:
    """The same as .xz."""
    good = [lzma.compress(one) for one in (b"the cat sat \n" * 20, b"", BOMB, lzma.compress(BOMB))]
    return _packed(folder / "text.xz", [*good, lzma.compress(b"the cat sat", preset=9), good[0] + good[1]])


def _packed(path: Path, good: Sequence[bytes]) -> Attempt:
    def attempt(random: Random) -> None:
        path.write_bytes(mutated_bytes(random, good))
        assert len(formats.read(path, SMALL)) <= SMALL

    return attempt


TRAVERSAL = ("../../outside/a.txt", "/outside/a.txt", "..\\..\\outside\\a.txt", "a.txt/", "a\x00.txt", "", ".", "..")


def zip_file(folder: Path) -> Attempt:
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


def tar_file(folder: Path) -> Attempt:
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


def _archive(paths: Sequence[Path], good: Sequence[Sequence[bytes]]) -> Attempt:
    def attempt(random: Random) -> None:
        place = random.randrange(len(paths))
        paths[place].write_bytes(mutated_bytes(random, good[place]))
        formats.names_in_archive(paths[place])
        found = formats.read_from_archive(paths[place], ["a.txt", "b.txt"], SMALL)
        assert found is None or len(found) <= SMALL

    return attempt


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


def data_get(folder: Path) -> Attempt:
    """`sab data get --from`: a file, an archive or a folder of files, into the folder of the data."""
    files = tiny.contents()["text8 prefix"]
    content = files[0][:500]
    dataset = replace(tiny.described(DATASETS["text8 prefix"], [content]), name="text8")
    name = dataset.files[0].name
    data, source = folder / "data", folder / "source"
    source.mkdir()
    link = _tarred({name: content}, link="../../outside")
    good = {
        f"{name}.gz": gzip.compress(content),
        f"{name}.xz": lzma.compress(content),
        "packed.zip": _zipped({f"../../{name}": content}),
        "packed.tar.gz": gzip.compress(link),
        name: content,
    }

    def attempt(random: Random) -> None:
        chosen = random.choice([*good])
        path = source / chosen
        path.write_bytes(mutated_bytes(random, [good[chosen]]) if random.random() < 0.99 else good[chosen])
        is_in_a_folder = chosen.startswith(name) and random.random() < 0.5
        try:
            with mock.patch.dict(DATASETS, {"text8": dataset}, clear=True):
                store.get("text8", data, source if is_in_a_folder else path)
        finally:
            path.unlink()
            for one in data.rglob("*"):
                if one.is_file():
                    one.unlink()

    return attempt


def text_file(folder: Path) -> Attempt:
    """A text of the user's, as `sab score` reads it."""
    good = [b"the cat sat on the mat " * 3, "schöne neue welt".encode(), "\ufeffa".encode(), "a b".encode("utf-16")]
    paths = {"text.txt": good, "text.gz": [gzip.compress(one) for one in good], "text.xz": [lzma.compress(good[0])]}
    task = Text8()

    def attempt(random: Random) -> None:
        name = random.choice([*paths])
        (folder / name).write_bytes(mutated_bytes(random, paths[name]))
        task.encode(text.read_text(folder / name, task), "file", skip_unknown=random.random() < 0.5)

    return attempt


TARGETS: dict[str, Callable[[Path], Attempt]] = {
    "config.json": config_json,
    "config.json and state.json alike": run_folder,
    "checkpoint/state.json": state_json,
    "checkpoint/model.safetensors": functools.partial(tensors, "model.safetensors"),
    "checkpoint/training.safetensors": functools.partial(tensors, "training.safetensors"),
    "best/": best_folder,
    "metrics.jsonl": metrics_jsonl,
    "result.json": result_json,
    "results/*.jsonl": results_jsonl,
    "seed*.json": notes_json,
    "benchmarks/*.jsonl": bench_jsonl,
    "IDX": idx_file,
    ".gz": gzip_file,
    ".xz": xz_file,
    ".zip": zip_file,
    ".tar": tar_file,
    "sab data get --from": data_get,
    "texts": text_file,
}

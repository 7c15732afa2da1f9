"""Every block of the README and the docs: Python runs, commands are those of the real command line.

A block that cannot be run has a line `<!-- not run: why -->` before it. Training is made short, and what takes long or
needs a network, a cluster or a browser is parsed alone; all else happens, one command after the other, as a reader
would have it, in a folder of its own.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import sab
from sab.extras import DISTRIBUTION
from sab.lab import cli
from sab.lab.commands import datasets, pictures, training
from sab.lab.experiments.demo import RECIPE
from sab.lab.training import train
from tests.ops.cases import registries_restored
from tools import pictures as method_pictures

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = ("", "bash", "console")
"""Languages of the blocks that hold command lines."""
PARSED_ALONE = {
    "bench": "measures for minutes",
    "demo": "trains for half a minute",
    "doctor": "tries every backend; test_doctor.py runs it",
    "report": "traces many steps; tests of the page run it",
    "watch": "serves until it is stopped",
    "plot scaling": "reads the records",
    "data get": "needs a network",
}
ELSEWHERE = {"ray": "needs a cluster of several machines"}
LAUNCHERS = r"(srun|torchrun( --[\w-]+ \S+)* -m|python -m) (?=sab )"


class Block(NamedTuple):
    """A block of code of a page."""

    reason: str | None
    """Why it is not run."""
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(
        r"(?:<!-- not run: (.+?) -->\n+)?^( *)```(\w*)[^\n]*\n(.*?)^\2```$", text, re.MULTILINE | re.DOTALL
    )
    return [Block(one[1], one[3], textwrap.dedent(one[4])) for one in found]


def command_lines(block: str) -> Iterator[list[str]]:
    """The commands of a block, a word each, without what only launches them."""
    text = re.sub(r"\\\n\s*", " ", block).replace("$SLURM_ARRAY_TASK_ID", "0")
    text = re.sub(r"\$\([^)]*\)", "", text)  # what a shell would put there
    for line in text.splitlines():
        line = re.sub(LAUNCHERS, "", line.removeprefix("$ "))
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            yield [word.replace("runs/…", "demo/sab") for word in words[:end] if word != "…"]
            words = words[end + 1 :]


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


def having(*languages: str) -> list[Path]:
    return [page for page in PAGES if any(block.language in languages for block in blocks(page))]


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_block_is_of_a_kind_that_is_tested(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(blocks(page)) * 2 == len(re.findall(r"^ *```", text, re.MULTILINE))
    for block in blocks(page):
        assert block.reason or block.language in ("python", "cpp", "text", *COMMANDS), block.text


def test_the_readme_is_short() -> None:
    """About two screens: one table of evidence, one of costs."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^\|[ -]+\|[ |-]+$", text, re.MULTILINE)) == 2
    assert len(text.splitlines()) <= 90


@pytest.mark.parametrize("page", having("python"), ids=ids)
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    with registries_restored():
        for block in blocks(page):  # one after the other, as a reader would
            if block.language == "python" and not block.reason:
                exec(compile(block.text, page.name, "exec"), names)


@pytest.mark.parametrize("page", having(*COMMANDS), ids=ids)
@pytest.mark.usefixtures("tiny_data", "short_command_line")
def test_commands_are_right(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks(page):
        for words in command_lines(block.text) if block.language in COMMANDS and not block.reason else ():
            check_command(words)
            capsys.readouterr()


@pytest.mark.parametrize(
    "line",
    [
        "sab trian copying",
        "sab train copying --k-topp 3",
        "sab plot atention demo/sab",
        "sab eval demo/sab --lengths 3",
        "sab bench --case A",
        "sab reproduce --rows 'copying-99-*'",
        "torchrun --nproc-per-node 4 -m sab train ptb --hidden-sise 3",
        "make nothing",
        "pip install '.[nothing]'",
        "pip install 'sab[train]'",
        "python examples/why.py --nothing",
        "sbatch job.sh",
    ],
)
@pytest.mark.usefixtures("tiny_data", "short_command_line")
def test_wrong_commands_are_noticed(line: str) -> None:
    (words,) = command_lines(line)
    with pytest.raises(AssertionError):
        check_command(words)


def check_command(words: list[str]) -> None:
    program, *arguments = words
    if program == "sab":
        assert exit_status(short(arguments)) == 0, words
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(arguments) <= set(targets), words
    elif program == "pip":
        assert arguments[0] == "install", words
        what = [one for one in arguments[1:] if one != "-e"]
        assert len(what) == 1, words
        wanted = re.fullmatch(rf"(?:\.|{DISTRIBUTION})(?:\[([\w,]+)\])?", what[0])
        assert wanted, words
        assert set(filter(None, (wanted[1] or "").split(","))) <= extras(), words
    elif program == "python":
        script, *options = arguments
        code = (ROOT / script).read_text(encoding="utf-8")  # test_examples.py runs it
        assert all(f'"{option}"' in code for option in options if option.startswith("--")), words
    else:
        assert program in ELSEWHERE, words


def exit_status(arguments: list[str]) -> int:
    try:
        return cli.main(arguments)
    except SystemExit as stop:  # tyro's own way out, for --help
        return int(stop.code or 0)


def short(arguments: list[str]) -> list[str]:
    """The command, but one that would train for hours says what it would train."""
    instead = {"--list", "--status"}
    return [*arguments, "--list"] if arguments[0] == "reproduce" and not instead & set(arguments) else arguments


def extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return set(project["optional-dependencies"])


@pytest.fixture
def short_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real command line in a folder that holds a demonstration's run, whose training is short."""
    monkeypatch.chdir(tmp_path)
    model = replace(RECIPE.model, hidden_size=8)
    train(RECIPE.task, model, replace(RECIPE.training, iterations=2, eval_every=1, batch_size=2), Path("demo/sab"))
    Path("mine.txt").write_text("the cat sat on the mat\n" * 20, encoding="utf-8")
    for name in PARSED_ALONE:
        stub_command(name, monkeypatch)
    for name in ("_train_one", "_train_seeds"):
        monkeypatch.setattr(training, name, shortened(getattr(training, name)))


def stub_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is parsed as ever, and does nothing."""
    kind, _, below = name.partition(" ")
    commands = {"data": datasets.COMMANDS, "plot": pictures.PLOTS}[kind] if below else cli.COMMANDS
    monkeypatch.setitem(commands, below or kind, nothing(commands[below or kind]))


def nothing(command: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(command)
    def done(*_: Any, **__: Any) -> int:
        return 0

    return done


def shortened(command: Callable[..., int]) -> Callable[..., int]:
    """Training into the folder that was asked for, of a small model and with hardly any iterations."""

    def trained(name: str, options: training.TrainOptions, *more: Any) -> int:
        model = options.model.with_options(hidden_size=8, backend="auto")
        training = replace(options.training, iterations=2, batch_size=2, eval_every=1, eval_batches=1, device="cpu")
        if not options.resume:
            shutil.rmtree(options.folder, ignore_errors=True)  # of a block before, where a reader would choose another
        return command(name, replace(options, model=model, training=training, out=options.folder), *more)

    return trained


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_every_page_has_its_place_in_the_site() -> None:
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= listed, "add it to nav in mkdocs.yml"


def test_site_is_made_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="needs the extra `docs`")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    for name in ("SABLSTM", "SABGRU", "SABRNN", "SABState", "SABConfig", "trace"):
        assert f'id="sab.{name}"' in api
    assert 'id="sab.plot.credit_paths"' in api
    signature = " ".join(unescape(re.sub("<.*?>", "", api)).split())
    assert f"k_top: int = {sab.SABConfig.k_top}," in signature, "the default that a call has"
    assert "int = SABConfig" not in signature
    assert signature.count("How many microstates a step may select; 0 makes the layer") == 2, "SABLSTM and SABConfig"
    mathematics = (tmp_path / "mathematics.html").read_text(encoding="utf-8")
    assert mathematics.count('class="arithmatex"') > 100
    for place in re.findall(r'(?:src|href)="([^"]*(?:katex|mathematics\.js|iframe-worker)[^"]*)"', mathematics):
        assert (tmp_path / place).is_file()
    assert "https://unpkg.com" not in mathematics
    assert f"sab {sab.__version__}" in mathematics
    assert mathematics.count("md-footer__link--") == 2, "the pages before and after it"
    assert (tmp_path / "search" / "search_index.js").is_file(), "for a search from the disk"
    assert "@article{ke2017sparse" in unescape(
        re.sub("<.*?>", "", (tmp_path / "index.html").read_text(encoding="utf-8"))
    )
    assert "SABLSTM" in (tmp_path / "examples" / "why.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("short_command_line")
def test_pictures_of_the_method_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "images").mkdir()
    monkeypatch.setattr(sys, "argv", ["pictures.py", "demo/sab", "--out", "images", "--target-step", "48"])
    method_pictures.main()
    for name in ("forward.svg", "backward.svg"):
        kept = (ROOT / "docs" / "images" / name).read_text(encoding="utf-8")
        drawn = (tmp_path / "images" / name).read_text(encoding="utf-8")
        assert "step 48" in drawn
        assert "step 48" not in kept
        assert len(kept) < 300_000

"""The files about the repository itself: they parse, and repeat no version or path wrongly."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import sab

yaml = pytest.importorskip("yaml", reason="needs the extra `docs`")

ROOT = Path(__file__).parents[1]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
TEMPLATES = ROOT / ".github" / "ISSUE_TEMPLATE"
PAGES = ["CONTRIBUTING.md", "RELEASING.md", "SECURITY.md"]


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def pinned() -> dict[str, str]:
    """Versions by package, as constraints.txt has them."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", read("constraints.txt"), re.MULTILINE))


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def test_citation_is_of_this_version() -> None:
    citation = load(ROOT / "CITATION.cff")
    project = tomllib.loads(read("pyproject.toml"))["project"]
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == sab.__version__
    assert citation["license"] == project["license"]
    assert citation["keywords"] == project["keywords"]
    assert "1711.02326" in citation["preferred-citation"]["url"]
    assert len(citation["preferred-citation"]["authors"]) == 7


def test_pre_commit_runs_the_pinned_tools() -> None:
    repositories = load(ROOT / ".pre-commit-config.yaml")["repos"]
    (local,) = (entry for entry in repositories if entry["repo"] == "local")
    programs = {hook["entry"].split()[0] for hook in local["hooks"]}
    assert programs == {".venv/bin/ruff", ".venv/bin/pyright"}
    assert {Path(program).name for program in programs} <= pinned().keys()
    assert all(hook["language"] == "system" and "additional_dependencies" not in hook for hook in local["hooks"])
    assert all("rev" in entry for entry in repositories if entry is not local)


def test_workflow_tests_the_oldest_and_the_pinned_torch() -> None:
    matrix = load(WORKFLOW)["jobs"]["test"]["strategy"]["matrix"]
    oldest, newest = matrix["versions"]
    project = tomllib.loads(read("pyproject.toml"))["project"]
    (torch,) = (line for line in project["dependencies"] if line.startswith("torch"))
    lowest = re.search(r">=([\d.]+)", torch)
    assert lowest
    assert version(oldest["torch"])[:2] == version(lowest[1])[:2]
    assert newest["torch"] == pinned()["torch"]
    assert newest["triton"] == pinned()["triton"]
    assert project["requires-python"] == f">={oldest['python']}"
    assert version(newest["python"]) > version(oldest["python"])


@pytest.mark.parametrize("path", sorted(WORKFLOW.parent.iterdir()), ids=lambda path: path.name)
def test_workflow_may_only_read(path: Path) -> None:
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in steps if "uses" in step)


def test_no_command_installs_the_package_of_another() -> None:
    """`sab` on the public index is something else."""
    files = [
        *ROOT.glob("*.md"),
        *(path for one in ("docs", "examples", "src", "tools") for path in (ROOT / one).rglob("*")),
    ]
    for path in files:
        if path.suffix in (".md", ".py", ".toml"):
            found = re.findall(r"pip install (?:-\S+ )*['\"]?sab\b(?!-torch)", path.read_text(encoding="utf-8"))
            assert found == [], path


def test_issue_forms_have_what_the_host_asks_for() -> None:
    forms = sorted(path.name for path in TEMPLATES.glob("*.yml"))
    assert forms == ["bug_report.yml", "config.yml", "feature_request.yml"]
    assert all(link.keys() == {"name", "url", "about"} for link in load(TEMPLATES / "config.yml")["contact_links"])
    for name in ("bug_report.yml", "feature_request.yml"):
        form = load(TEMPLATES / name)
        assert form.keys() >= {"name", "description", "body"}
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert len({field["id"] for field in fields}) == len(fields)
        assert all(field["attributes"]["label"] for field in fields)


def test_the_map_names_what_exists() -> None:
    found = re.search(r"^## The map of the house$(.*?)^## ", read("CONTRIBUTING.md"), re.MULTILINE | re.DOTALL)
    assert found
    named = re.findall(r"`((?:src|tests|tools|benchmarks|results|docs|examples)/[\w./]*)`", found[1])
    assert len(named) > 20
    for path in named:
        assert (ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file(), path


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", read(page)):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "RELEASING.md", ".github/workflows/ci.yml"])
def test_targets_of_make_exist(page: str) -> None:
    targets = {*re.findall(r"^([\w-]+):", read("Makefile"), re.MULTILINE)}
    assert set(re.findall(r"(?:`|run: )make ([\w-]+)", read(page))) <= targets


def test_example_of_a_part_runs(tmp_path: Path) -> None:
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", read("CONTRIBUTING.md"), re.MULTILINE | re.DOTALL))
    assert "WEIGHTINGS" in code
    # In a process of its own, since the example registers a part.
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)


def test_source_distribution_has_these_files() -> None:
    included = tomllib.loads(read("pyproject.toml"))["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert {*PAGES, "CITATION.cff", ".github", ".pre-commit-config.yaml", "CHANGELOG.md"} <= set(included)

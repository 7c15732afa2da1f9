"""A hook of MkDocs: the version below every page, and pages and examples outside of this folder that pages link to
as a part of the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from sab import __version__

ROOT = Path(__file__).parents[1]
PAGES = {"benchmarks/README.md": "benchmarks.md", "CHANGELOG.md": "changes.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages by where they are in the site."""
EXAMPLES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*.py"))
PLACES = PAGES | {path: path.removesuffix(".py") + ".md" for path in EXAMPLES}


def on_config(config: Any) -> Any:
    """Shows the version below every page."""
    config.copyright = f"sab {__version__}"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds them."""
    for path, place in PLACES.items():
        files.append(File.generated(config, place, content=_content(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads the links of a page there; of what else is outside, only the words are left."""
    if "/" in page.file.src_uri:  # an example's code
        return markdown
    for path, place in PLACES.items():
        markdown = re.sub(rf"\]\((\.\./)?{re.escape(path)}", f"]({place}", markdown)
    markdown = re.sub(r"\]\((\.\./)?docs/", "](", markdown)
    return re.sub(r"\[([^\]]*)\]\((?:\.\./[^)]*|[A-Z]+\.\w+)\)", r"\1", markdown)


def _content(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    return text if path in PAGES else f"# {path}\n\n```python\n{text}```\n"

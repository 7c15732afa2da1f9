"""What the build adds to the packages: absolute links in the README and, if asked for, the compiled CPU backend.

`SAB_BUILD_LIBRARY=1` makes a wheel with the compiled library for this kind of machine; without it the wheel is pure
Python, and the library is built where it is first needed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

CPU = Path("src", "sab", "ops", "cpu")


class LibraryHook(BuildHookInterface):
    """Compiles the loops of the CPU backend into a wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get("SAB_BUILD_LIBRARY") != "1" or version == "editable":
            return
        build = _load(Path(self.root, CPU, "build.py"))
        compiler = build.compiler()
        if compiler is None:
            raise RuntimeError("SAB_BUILD_LIBRARY=1 needs a C++ compiler (c++, g++ or clang++) on the PATH.")
        self._folder = tempfile.TemporaryDirectory()
        library = Path(self._folder.name, build.PACKAGED)
        build.build_portable(compiler, library)
        build_data["force_include"][str(library)] = str(Path(*CPU.parts[1:], build.PACKAGED))
        build_data["pure_python"] = False
        platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
        build_data["tag"] = f"py3-none-{platform}"  # ctypes loads it: any Python does

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()


class ReadmeHook(MetadataHookInterface):
    """Makes the README one that a package index can show."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute_links(text, repository)}


def absolute_links(text: str, repository: str | None) -> str:
    """The README with links to the files on the repository's host; where there is none, without them and images."""

    def replace(found: re.Match[str]) -> str:
        is_image, label, target = found["image"] == "!", found["label"], found["target"]
        if re.match(r"https?://|#", target):
            return found[0]
        if repository is None:
            return "" if is_image else label
        return f"{found['image']}[{label}]({repository}/{'raw' if is_image else 'blob'}/main/{target})"

    def replace_image(found: re.Match[str]) -> str:
        return "" if repository is None else found[0].replace(found["path"], f"{repository}/raw/main/{found['path']}")

    text = re.sub(r'<img src="(?P<path>(?!https?://)[^"]+)"[^>]*>', replace_image, text)
    return re.sub(r"(?P<image>!?)\[(?P<label>[^]]*)\]\((?P<target>[^)\s]+)\)", replace, text)


def _load(path: Path) -> ModuleType:
    """A module of the package, which cannot be imported where torch is missing."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

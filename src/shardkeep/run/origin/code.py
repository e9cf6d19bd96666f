"""The code of a run: digests of shardkeep's own sources and of the files of the user's modules, by name."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import xxhash

from shardkeep.base.plugging.modules import is_installed
from shardkeep.config import JobConfig

PACKAGE = "shardkeep"
"""The name of all of shardkeep's sources, which have one digest: edits without a commit count, too."""
_IMPORT = re.compile(r"^\s*(?:from|import)\s+(.+)", re.MULTILINE)
_ROOT = Path(__file__).resolve().parents[2]


def code_of(config: JobConfig, folder: Path | None) -> dict[str, str]:
    """Digests by file of the modules that the config names as `module:name` and of what these import, relative to
    `folder`, and of shardkeep. Files of installed packages are left out. Read once in a process."""
    return {**_own_of(config, folder), PACKAGE: _package()[0]}


def files_of(config: JobConfig, folder: Path | None) -> dict[str, str]:
    """As `code_of`, with a digest of each file of shardkeep."""
    return {**_own_of(config, folder), **_package()[1]}


def _own_of(config: JobConfig, folder: Path | None) -> Mapping[str, str]:
    modules = [name.partition(":")[0] for name in config.own_modules]
    return _own(tuple(modules), (folder or Path()).resolve(), Path(config.data.root))


@functools.cache
def _package() -> tuple[str, Mapping[str, str]]:
    """The digest of all sources, and of each."""
    folders = os.walk(_ROOT, followlinks=True)  # the rooms of a checkout are links
    paths = [Path(folder, name) for folder, _, names in folders for name in names if name.endswith(".py")]
    digest, each = xxhash.xxh3_64(), {}
    for path in sorted(paths):
        digest.update(f"{path.relative_to(_ROOT)}\0".encode() + (content := path.read_bytes()))
        each[f"{PACKAGE}/{path.relative_to(_ROOT)}"] = xxhash.xxh3_64_hexdigest(content)
    return digest.hexdigest(), each


@functools.cache
def _own(modules: tuple[str, ...], folder: Path, root: Path) -> Mapping[str, str]:
    """By path, relative to `folder`: the modules, their packages, and what a line with `import` names."""
    roots = [Path(entry) for entry in map(str, (*sys.path, folder, root)) if not is_installed(entry)]
    found: dict[str, str] = {}
    seen = {PACKAGE}
    left = {module.partition(".")[0] for module in modules} - seen
    while left:
        seen.add(name := left.pop())
        for path in (file for root in roots for file in (root / f"{name}.py", *(root / name).rglob("*.py"))):
            if path.is_file():
                found[os.path.relpath(path, folder)] = xxhash.xxh3_64_hexdigest(path.read_bytes())
                lines = _IMPORT.findall(path.read_text(encoding="utf-8", errors="replace"))
                left |= {word for line in lines for word in re.findall(r"\w+", line)} - seen
    return dict(sorted(found.items()))

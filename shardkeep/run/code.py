"""The code of a run: digests of shardkeep's own sources and of the files of the user's modules, by name."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import xxhash

from shardkeep.base.modules import is_installed
from shardkeep.config import JobConfig

PACKAGE = "shardkeep"
"""The name of all of shardkeep's sources, which have one digest: edits that no commit has, and those of an installed
package, count as well."""
_ROOT = Path(__file__).resolve().parents[1]


def code_of(config: JobConfig, folder: Path | None) -> dict[str, str]:
    """Digests by file of the modules that the config names as `module:name` and of what these import, relative to
    `folder`, and of shardkeep. Files of installed packages are left out. Read once in a process."""
    modules = [name.partition(":")[0] for name in (config.model.name, config.data.source) if ":" in name]
    root = Path(config.data.root) if ":" in config.data.source else None
    return {PACKAGE: _package(), **_own(tuple(modules), (folder or Path()).resolve(), root)}


def difference(found: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """The first file that differs, the user's before shardkeep; None = the same code."""
    names = [*(name for name in {**found, **now} if name != PACKAGE), PACKAGE]
    return next((name for name in names if found.get(name) != now.get(name)), None)


@functools.cache
def _package() -> str:
    digest = xxhash.xxh3_64()
    for path in sorted(_sources(_ROOT)):
        digest.update(f"{path.relative_to(_ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _sources(root: Path) -> Iterator[Path]:
    for folder, _, files in os.walk(root, followlinks=True):  # the rooms of a checkout are links
        yield from (Path(folder) / name for name in files if name.endswith(".py"))


@functools.cache
def _own(modules: tuple[str, ...], folder: Path, root: Path | None) -> Mapping[str, str]:
    """By path, relative to `folder`."""
    roots = [Path(entry) for entry in map(str, (*sys.path, folder, root or folder)) if not is_installed(entry)]
    found: dict[Path, str] = {}
    left = list(modules)
    while left:
        for path, package in _files(left.pop().split("."), roots):
            if path not in found:
                content = path.read_bytes()
                found[path] = xxhash.xxh3_64_hexdigest(content)
                left += _imports(content, package)
    return {os.path.relpath(path, folder): found[path] for path in sorted(found)}


def _files(parts: list[str], roots: Sequence[Path]) -> Iterator[tuple[Path, list[str]]]:
    """The files that the import of a module runs, and the package that each is in."""
    for depth in range(1, len(parts) + 1) if parts[0] != PACKAGE else ():
        *package, last = parts[:depth]
        for folder in (root.joinpath(*package) for root in roots):
            if (path := folder / last / "__init__.py").is_file():
                yield path, parts[:depth]
                break
            if (path := folder / f"{last}.py").is_file():
                yield path, package
                break


def _imports(content: bytes, package: list[str]) -> Iterator[str]:
    """Names that a file imports, which may be modules. What is no Python imports nothing: its import says so."""
    with contextlib.suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Import):
                yield from (each.name for each in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                module = [*above, *([node.module] if node.module else [])]
                yield from (".".join([*module, each.name]) for each in node.names)

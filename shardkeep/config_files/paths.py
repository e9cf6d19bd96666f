"""Whose folder a relative path starts at: on the command line the shell's, in a file the file's.

In a file `data.train`, `eval`, `test` and `cache` start at `data.root`, which starts at the file's folder.
"""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardkeep.config_files.overrides import Override

FOLDERS = (("data", "root"), ("checkpoint", "dir"))
"""Settings that name a folder, by group and key."""
DATA = (("data", "train"), ("data", "eval"), ("data", "test"), ("data", "cache"))
"""Settings that start at `data.root` in a file."""


def anchored(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The settings of a file in `folder` with absolute FOLDERS and row files. Leaves wrong paths to the model."""
    found = dict(raw)

    def absolute(text: str) -> str:
        return str((folder / Path(text).expanduser()).resolve())

    for group, key in FOLDERS:
        _change(found, group, key, absolute)
    if isinstance(tables := found.get("tables"), Mapping):
        found["tables"] = {name: _with_row_file(table, absolute) for name, table in tables.items()}
    return found


def _with_row_file(table: Any, change: Callable[[str], str]) -> Any:
    """A table with another path of its initial rows, if it has one."""
    if not isinstance(table, Mapping):
        return table
    found = dict(table)
    _change(found, "init", "path", change)
    return found


def below_shell(override: Override) -> Override:
    """The override with absolute paths. Leaves wrong paths to the model."""
    shell = Path.cwd()
    raw: Any = override.value
    for key in reversed(override.keys):
        raw = {key: raw}
    found = anchored(raw, shell)
    for group, key in DATA:
        _change(found, group, key, lambda text: _below(shell, text))
    for key in override.keys:
        found = found[key]
    return replace(override, value=found)


def _change(settings: dict[str, Any], group: str, key: str, change: Callable[[str], str]) -> None:
    """Changes one path, or each of a list."""
    below = settings.get(group)
    if not isinstance(below, Mapping) or key not in below:
        return
    with contextlib.suppress(ValueError, RuntimeError, OSError):
        value = below[key]
        if isinstance(value, str):
            value = change(value)
        elif isinstance(value, list):
            value = [change(one) if isinstance(one, str) else one for one in value]
        settings[group] = {**below, key: value}


def _below(folder: Path, text: str) -> str:
    """A file, folder or pattern. Its links are not followed: a link's name says what it holds."""
    entry = Path(text).expanduser()
    if entry.is_absolute():
        return str(entry)
    while entry.parts[:1] == ("..",):
        folder, entry = folder.parent, Path(*entry.parts[1:])
    base = glob.escape(str(folder)) if glob.has_magic(text) else str(folder)
    return str(Path(base) / entry)

"""Whose folder a relative path starts at: on the command line the shell's, in a file the file's.

The type of a setting says that it is a path (`FilePath` and `DataPath` in `base/settings.py`). Settings that may differ
have marks of the same kind (`MayDiffer` there).
"""

from __future__ import annotations

import contextlib
import enum
import functools
import glob
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel

from shardkeep.base.files import local
from shardkeep.base.settings import Origin
from shardkeep.config.overrides import Override

T = TypeVar("T")
Keys = tuple[str, ...]


def anchored(settings: T, folder: Path, model: type[BaseModel]) -> T:
    """The settings of a file in `folder`, or a model of them, with absolute paths of files. Leaves wrong paths to the
    model."""
    for keys in marked_keys(model, Origin.FILE):
        settings = _changed(settings, keys, lambda text: str((folder / Path(local(text)).expanduser()).resolve()))
    return settings


def below_shell(override: Override, model: type[BaseModel]) -> Override:
    """The override with absolute paths. Leaves wrong paths to the model."""
    shell = Path.cwd()
    found: Any = override.value
    for key in reversed(override.keys):
        found = {key: found}
    found = without_root(anchored(found, shell, model), shell, model)
    for key in override.keys:
        found = found[key]
    return replace(override, value=found)


def without_root(settings: T, root: Path, model: type[BaseModel]) -> T:
    """The settings with paths that need no `data.root`."""
    for keys in marked_keys(model, Origin.DATA_ROOT):
        settings = _changed(settings, keys, lambda text: _below(root, text))
    return settings


@functools.cache
def marked_keys(model: type[BaseModel], mark: enum.Enum) -> tuple[Keys, ...]:
    """The keys of the settings in a model that have a mark in their type; * is any key of a mapping."""
    fields = model.model_fields.items()
    found = ((name, *keys) for name, each in fields for keys in _marked((each.annotation, *each.metadata), mark))
    return tuple(dict.fromkeys(found))  # each kind of a union may have it


def _marked(kinds: Sequence[Any], mark: enum.Enum) -> Iterator[Keys]:
    for kind in kinds:
        if kind is mark:
            yield ()
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from marked_keys(kind, mark)
        else:
            above = ("*",) if get_origin(kind) is dict else ()
            yield from ((*above, *keys) for keys in _marked(get_args(kind), mark))


def covers(marked: Collection[Keys], keys: Keys) -> bool:
    """Whether `keys` are those of a marked setting, or of one in a marked group."""
    return any(len(one) <= len(keys) and all(a in ("*", b) for a, b in zip(one, keys, strict=False)) for one in marked)


def without(settings: Mapping[str, Any], marked: Collection[Keys], above: Keys = ()) -> dict[str, Any]:
    """A copy of the settings that lacks the marked ones."""
    kept = {key: value for key, value in settings.items() if not covers(marked, (*above, key))}
    return {k: without(v, marked, (*above, k)) if isinstance(v, Mapping) else v for k, v in kept.items()}


def _changed(value: Any, keys: Keys, change: Callable[[str], str]) -> Any:
    """A value with another path at `keys`, or others in a list there."""
    if keys and isinstance(value, Mapping):
        return {k: _changed(below, keys[1:], change) if keys[0] in ("*", k) else below for k, below in value.items()}
    if keys and isinstance(value, BaseModel):
        before = getattr(value, keys[0])
        after = _changed(before, keys[1:], change)
        return value if after == before else value.model_copy(update={keys[0]: after})
    with contextlib.suppress(ValueError, RuntimeError, OSError):
        if not keys and isinstance(value, str):
            return change(value)
        if not keys and isinstance(value, list):
            return [change(one) if isinstance(one, str) else one for one in value]
    return value


def _below(folder: Path, text: str) -> str:
    """A file, folder or pattern. Its links are not followed: a link's name says what it holds."""
    entry = Path(local(text)).expanduser()
    if entry.is_absolute():
        return str(entry)
    while entry.parts[:1] == ("..",):
        folder, entry = folder.parent, Path(*entry.parts[1:])
    base = glob.escape(str(folder)) if glob.has_magic(text) else str(folder)
    return str(Path(base) / entry)

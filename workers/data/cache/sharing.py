"""Columns that another entry of the same files and rows has: found, and linked. Links stay when that entry goes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shardkeep.workers.data.cache.entry import BESIDE, Content, FileSet, content_of, mapped_files, read_meta, samples_of
from shardkeep.workers.data.cache.folders import cache_folders, entry_paths, trusted
from shardkeep.workers.data.columnar import checksum
from shardkeep.workers.data.input_files import identity
from shardkeep.workers.data.schema import Schema
from shardkeep.workers.data_config import DataConfig

_text = partial(json.dumps, sort_keys=True)
Other = tuple[bool, int, Path, Mapping[str, Any]]
"""An entry: whether labels, weights and times are other ones, its bytes, its folder, what it says of itself."""


def others(config: DataConfig, files: FileSet) -> list[Other]:
    """Other entries of these files that have the same rows and all features; the first one has the most in common."""
    inputs, entries = [identity(path, of=len(files.paths)) for path in files.paths], list[Other]()
    common, features, labels = parted(files.settings)
    for folder in filter(trusted, cache_folders(config, files.paths[0])):
        for path in sorted(set(folder.glob(f"*-{'?' * 16}*")) - set(entry_paths(folder, files.name))):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                meta = read_meta(path)
                same, held, targets = parted(meta["settings"])
                if meta["inputs"] == inputs and same == common and held >= features:
                    entries.append((targets != labels, sum(meta["sizes"].values()), path, meta))
    return sorted(entries, key=lambda entry: entry[:2])


def link(other: Other, schema: Schema, folder: Path) -> Content:
    """Links the files of an entry into `folder`, but for other labels; what is known of the columns of `schema`.

    Raises OSError where that cannot be, KeyError or ValueError where the entry is damaged or was replaced."""
    relabelled, _, path, meta = other
    for name in meta["sizes"]:
        if not (relabelled and name.endswith(BESIDE)):
            os.link(path / name, folder / name)
    if read_meta(path) != meta:
        raise ValueError(f"{path}: was replaced")
    content = content_of(meta)
    inputs = content.inputs.only(schema)
    named = {f"dense:{c.column}" for c in inputs.layout.scaled} | {f"sparse:{n}" for n in inputs.layout.categories}
    return replace(content, inputs=inputs, notes=[note for note in content.notes if note[0] in named])


def with_checksums(content: Content, schema: Schema, folder: Path) -> Content:
    """The content of the files in `folder` with their checksums. Raises OSError or ValueError where they do not fit."""
    mapped = mapped_files(folder, {path.name: path.stat().st_size for path in folder.iterdir()})
    return replace(content, checksums={n: checksum(part) for n, part in samples_of(mapped, content, schema).items()})


def parted(settings: Mapping[str, Any]) -> tuple[str, set[str], str]:
    """How all columns are read and which rows there are; each feature; the labels, weights and times."""
    settings = dict(settings)
    labels = [settings.pop(key, None) for key in ("labels", "weight", "time")]
    features = [(key, column) for key in ("dense", "sparse", "sequences") for column in settings.pop(key, ())]
    return _text(settings), set(map(_text, features)), _text(labels)

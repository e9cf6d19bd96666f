"""The index of a snapshot, snapshot.json: its tables, and where their rows are. Loads no kernel.

Its `format` is 2 where a table has `admit` or `evict`: rows then have counters, tables may only count ids, and an
increment may say that rows were removed. Else there is no `format`, which means 1: the file has nothing that a reader
of 1 does not know. Versions before 2 look at no number here. They refuse settings of tables that they do not know, and,
by the format of its manifest (ps/checkpoints/folder.py), an increment that may remove rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardkeep.base.errors import CheckpointError
from shardkeep.ps.checkpoints.folder import Checkpoint, FileRecord, unknown_format
from shardkeep.ps.config import TableSpec

INDEX = "snapshot.json"
REMOVED = "removed.safetensors"
"""In an increment: the ids of rows that were removed since its base, by the number of their table."""

_FORMAT, _COUNTING = 1, 2
Indexes = list[tuple[FileRecord, dict[str, Any]]]
"""The indexes of a checkpoint, one of each server that wrote it, with the records of their files."""
POLICY_COUNTS = ("admitted_rows", "refused_rows", "evicted_rows")
"""What the policies of a table did (table/table.py), by name."""


def file_name(number: int) -> str:
    """The name of a file of rows."""
    return f"rows-{number:05d}.safetensors"


def format_of(specs: Iterable[TableSpec]) -> dict[str, Any]:
    """The part of an index that says its format, for tables with these settings."""
    return {"format": _COUNTING} if any(spec.admit or spec.evict for spec in specs) else {}


def specs_of(checkpoint: Checkpoint) -> list[TableSpec]:
    """The tables of a checkpoint, as its servers had them. Raises CheckpointError."""
    specs: dict[str, TableSpec] = {}
    for _, index in indexes(checkpoint):
        for entry in index["tables"]:
            if entry["spec"]["name"] not in specs and not entry.get("counts_for"):
                spec = TableSpec.of_record(entry["spec"])
                specs[spec.name] = spec
    return list(specs.values())


def policy_counts(checkpoint: Checkpoint, table: str) -> dict[str, int]:
    """What the policies of a table did until a checkpoint, over all servers: `admitted_rows`, `refused_rows` and
    `evicted_rows`, where the table counts them. Raises CheckpointError."""
    entries = [entry for _, index in indexes(checkpoint) for entry in index["tables"] if entry["spec"]["name"] == table]
    return {key: sum(e.get(key, 0) for e in entries) for key in POLICY_COUNTS if any(key in e for e in entries)}


def earlier_steps(checkpoint: Checkpoint) -> int:
    """`Tables.earlier_steps` of the servers that wrote the checkpoint. Raises CheckpointError."""
    return max((int(index.get("earlier_steps", 0)) for _, index in indexes(checkpoint)), default=0)


def indexes(checkpoint: Checkpoint) -> Indexes:
    """The indexes of a checkpoint. Raises CheckpointError."""
    records = [file for file in checkpoint.files if file.path.endswith(f"/{INDEX}")]
    return [(record, read_index(record.check(checkpoint.folder))) for record in records]


def read_index(path: Path) -> dict[str, Any]:
    """The index of a snapshot: its parts, their tables and rows. Raises CheckpointError."""
    try:
        index = dict(json.loads(path.read_text(encoding="utf-8")))
        if (number := index.get("format", _FORMAT)) not in (_FORMAT, _COUNTING):
            raise unknown_format(path, number, _COUNTING)
        return index
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged ({error})") from error

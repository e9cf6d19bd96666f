"""The fingerprint of a job's samples: equal for equal content, wherever the files lie and whenever they changed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from shardkeep.workers.data.schema import Schema


def fingerprint(train: Mapping[str, Any], held: Mapping[str, Any] | None) -> str:
    """16 hex digits of what decides the training samples, and after a hyphen 16 of the evaluation samples, if any."""
    parts = [train] if held is None else [train, held]
    return "-".join(xxhash.xxh3_64_hexdigest(json.dumps(p, sort_keys=True, default=str).encode()) for p in parts)


def content_fingerprint(schema: Schema, checksums: Sequence[str], transform: Mapping[str, Sequence[float]]) -> str:
    """That of stored samples: their checksums (train, maybe eval), the names of columns, the scaling.

    Tables and pooling are the model's, not the data's.
    """
    common = {"dense": schema.dense, "sparse": [f.name for f in schema.features], "transform": transform}
    parts = [common | {"checksum": checksum} for checksum in checksums]
    return fingerprint(parts[0], parts[1] if len(parts) == 2 else None)

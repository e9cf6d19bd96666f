"""Capacity of tables whose rows go: rows of a placement bucket, from the settings. Loads no kernel."""

from __future__ import annotations

import math
from collections.abc import Iterable

from shardkeep.base.errors import ConfigError
from shardkeep.ps.config import TableSpec
from shardkeep.ps.server.table.layout import RowLayout
from shardkeep.ps.server.table.policies.config import BUCKETS, LEAST_PER_BUCKET

INDEX_BYTES = 8 / 0.7
"""A row's part of an index that is as full as it gets."""


def capacity_of(spec: TableSpec) -> int:
    """Rows of a bucket; 0 = any number. Raises ConfigError where `max_bytes` is too small."""
    config = spec.evict
    if config is None or config.max_bytes is None:
        return (0 if config is None else config.max_rows or 0) // BUCKETS
    row_bytes = 4 * RowLayout.of(spec).width + INDEX_BYTES
    capacity = int(config.max_bytes / row_bytes / BUCKETS)
    if capacity < LEAST_PER_BUCKET:
        least = math.ceil(LEAST_PER_BUCKET * BUCKETS * row_bytes)
        raise ConfigError(
            f"tables.{spec.name}.evict.max_bytes: {config.max_bytes}, rows of {row_bytes:.0f} bytes; allowed: "
            f"{least} or more"
        )
    return capacity


def check_capacities(specs: Iterable[TableSpec]) -> None:
    """Raises ConfigError for the first table whose `max_bytes` is too small."""
    for spec in specs:
        capacity_of(spec)

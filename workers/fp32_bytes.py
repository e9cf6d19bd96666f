"""Bytes that a worker would have sent without compression. Counts nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardkeep.ps.client.row_client import RowClient
from shardkeep.workers.dense.tower import Tower
from shardkeep.workers.telemetry import Telemetry

_VALUE_PARTS = ("values", "scales", "moments", "indices", "flush")
"""Parts of the ledger that fp32 without selection has not, or has in another size."""


def fp32_bytes(client: RowClient, tower: Tower, telemetry: Telemetry, totals: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of pulls, pushes and dense gradients if all values were sent as float32.

    Ids, masks, headers and what torch RPC adds are counted as they were sent, coded or not. Values are four bytes
    each: of all rows of each step's batch, from the cache too, and of all gradients, selected or not. A step that
    was trained again counts once, and its retries as they were sent. Without compression and recoveries it equals
    `bytes`.

    Args:
        totals: Of the worker's ledger.
    """
    sums = tower.sums
    dense = sum(totals["tower"].values()) if sums.plain else telemetry.steps * sums.plain_bytes
    return {
        "pull": _without_values(totals["pull"]) + 4 * client.pulled_values,
        "push": _without_values(totals["push"]) + 4 * client.pushes.num_values,
        "tower": dense,
    }


def _without_values(parts: Mapping[str, int]) -> int:
    return sum(size for part, size in parts.items() if part not in _VALUE_PARTS)

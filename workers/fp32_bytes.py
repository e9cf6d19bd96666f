"""Bytes that a worker would have sent without compression. Counts nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from shardkeep.ps.client.row_client import RowClient
from shardkeep.workers.telemetry import Telemetry

_VALUE_PARTS = ("values", "scales", "moments", "indices", "flush")
"""Parts of the ledger that fp32 without selection has not, or has in another size."""


class DenseSums(Protocol):
    """How dense gradients are summed over the workers."""

    @property
    def plain(self) -> bool:
        """Whether they are not compressed."""
        ...

    @property
    def plain_bytes(self) -> int:
        """Bytes of a step without compression."""
        ...


def fp32_bytes(
    client: RowClient, sums: DenseSums | None, telemetry: Telemetry, totals: Mapping[str, Any]
) -> dict[str, int]:
    """Bytes of pulls, pushes and dense gradients if all values were sent as float32.

    Ids, masks, headers and what torch RPC adds are counted as they were sent, coded or not. Values are four bytes
    each: of all rows of each step's batch, from the cache too, and of all gradients, selected or not. A step that
    was trained again counts once, and its retries as they were sent. Without compression and recoveries it equals
    `bytes`.

    Args:
        sums: Of dense gradients; None = the loop is the user's own, and so are these sums.
        totals: Of the worker's ledger.
    """
    dense = sum(totals["tower"].values())
    if sums is not None and not sums.plain:
        dense = telemetry.steps * sums.plain_bytes
    return {
        "pull": _without_values(totals["pull"]) + 4 * client.pulled_values,
        "push": _without_values(totals["push"]) + 4 * client.pushes.num_values,
        "tower": dense,
    }


def _without_values(parts: Mapping[str, int]) -> int:
    return sum(size for part, size in parts.items() if part not in _VALUE_PARTS)

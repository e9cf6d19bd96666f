"""Settings of the compression room. Apart from the codecs so that reading a config needs no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shardkeep.base.settings import Settings

ValueFormat = Literal["fp32", "fp16", "bf16"]


class PushConfig(Settings):
    """How row gradients travel from a worker to the servers."""

    keep_rows: float = Field(1.0, gt=0.0, le=1.0)
    """Share of a step's rows that are sent, those with the largest gradient norm, at least one per
    table; 1.0 = all. Rows left out are dropped for that step."""
    values: ValueFormat = "fp32"
    """Number format of the gradient values on the wire."""


class PullConfig(Settings):
    """How rows travel from the servers to a worker."""

    values: ValueFormat = "fp32"
    """Number format of the row values on the wire; servers keep fp32."""


class TowerCompressionConfig(Settings):
    """How the tower's gradients travel between workers."""

    name: Literal["none"] = "none"
    """none = fp32 all-reduce (in `sync` an all-gather added in rank order)."""


class CompressionConfig(Settings):
    """What is compressed, in each direction."""

    push: PushConfig = PushConfig()
    """Row gradients, worker to server."""
    pull: PullConfig = PullConfig()
    """Rows, server to worker."""
    tower: TowerCompressionConfig = TowerCompressionConfig()
    """Dense gradients, worker to worker."""

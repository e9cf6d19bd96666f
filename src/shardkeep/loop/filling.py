"""Rows of the user's own, such as pretrained embeddings, as a checkpoint of step 0 that servers load."""

# N = rows, D = embedding dim

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from shardkeep.base.arrays import Ids, Rows
from shardkeep.base.errors import UserError
from shardkeep.base.machine.versions import versions
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.config import TableSpec
from shardkeep.ps.server.snapshot.start_rows import StartRows, write_start_rows
from shardkeep.workers.checkpoint.tower_state import save_tower

BLOCK = 65_536
"""Rows that are converted at once."""


def checked_rows(tables: Sequence[TableSpec], rows: Mapping[str, torch.Tensor]) -> None:
    """Raises UserError for a table that is not there, and for rows of another shape or type."""
    held = {spec.name: spec for spec in tables}
    for name, rows_ND in rows.items():
        if name not in held:
            raise UserError(f"fill: no table {name}; the client has {', '.join(held)}")
        dim = held[name].dim
        if rows_ND.dim() != 2 or rows_ND.shape[1] != dim or not rows_ND.is_floating_point():
            found = f"{str(rows_ND.dtype).removeprefix('torch.')} {tuple(rows_ND.shape)}"
            raise UserError(f"fill: the rows of {name} are {found}; allowed: floats, (rows, {dim})")


def write_rows(tables: Sequence[TableSpec], rows: Mapping[str, torch.Tensor], checkpoints: Checkpoints) -> None:
    """Writes a checkpoint of step 0. `rows`: per table (N, D), of the ids 0 to N - 1. Raises OSError."""
    partial = checkpoints.begin(0)
    files = write_start_rows([_start(spec, rows[spec.name]) for spec in tables if spec.name in rows], partial, shard=0)
    files += save_tower(({}, {"value": None}), partial)
    checkpoints.commit(0, files, {"loop": True, "samples": 0, "servers": 1, "workers": 1, "versions": versions()})


def _start(spec: TableSpec, rows_ND: torch.Tensor) -> StartRows:
    def chunks() -> Iterator[tuple[Ids, Rows]]:
        for start in range(0, len(rows_ND), BLOCK):
            some = rows_ND[start : start + BLOCK].detach().to("cpu", torch.float32).contiguous().numpy()
            yield np.arange(start, start + len(some)), some

    return StartRows(spec, len(rows_ND), chunks, "fill")

"""The gradients of a step's lookups as one push: summed per row, scaled, rows that are not finite left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shardkeep.base.arrays import Rows
from shardkeep.ps.client.request import Request
from shardkeep.ps.client.row_client import RowClient
from shardkeep.workers.embeddings.bags import Pooled
from shardkeep.workers.embeddings.layer import all_finite_rows, scale_rows
from shardkeep.workers.embeddings.loop_lookup import Lookup, finite_only, summed


def gradients_of(
    rows: RowClient, step: int, lookups: Sequence[Lookup], scale: float
) -> tuple[Request, Mapping[str, Rows], int]:
    """The request and its gradients, and the number of rows left out. Raises UserError where there are none."""
    if len(lookups) == 1 and isinstance(alone := lookups[0], Pooled) and alone.reaches_all:
        grads = rows.gradients(step, alone.pull.request)  # maybe the push's own buffer
        alone.collect(grads)
        scale_rows(grads, scale)
        if all_finite_rows(grads):
            return alone.pull.request, grads, 0
    found = summed([one.gradients() for one in lookups])
    finite = {table: finite_only(*gradients) for table, gradients in found.items()}
    dropped = sum(found[table][0].size - ids_U.size for table, (ids_U, _) in finite.items())
    request = rows.request({table: ids_U for table, (ids_U, _) in finite.items()})
    scaled = rows.gradients(step, request)
    for table, (_, grad_UD) in finite.items():
        np.multiply(grad_UD, np.float32(scale), out=scaled[table])
    return request, scaled, dropped

"""ItemNames: the items of a served retrieval model as tensors."""

# N = rows of a request, K = items of a row, M = items

from __future__ import annotations

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.inference.protocol.datatypes import BYTES, Values
from shardkeep.inference.protocol.status import invalid
from shardkeep.inference.protocol.tensors import Output
from shardkeep.workers.retrieval.ranking import Best

TOP = 10
"""Items of a row where a request does not say how many."""


class ItemNames:
    """The names of items, and how many a request may ask for.

    Args:
        values: As in the training files: texts or integers.
        most: The bound that the server sets.
    """

    def __init__(self, values: pa.Array, most: int) -> None:
        texts = pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
        self._texts: list[bytes] | None = values.cast(pa.large_binary()).to_pylist() if texts else None
        self._numbers_M = np.empty(0, np.int64) if texts else values.to_numpy(zero_copy_only=False).astype(np.int64)
        self._most = min(most, len(values))
        self.datatype = BYTES if texts else "INT64"

    def checked(self, top: int | None) -> int:
        """The items of each row. Raises Refusal: there are not so many, or the server allows fewer."""
        if top is None:
            return min(TOP, self._most)
        if not 1 <= top <= self._most:
            raise invalid(f"parameter top: {top}; allowed: 1 to {self._most} (the items, and --most-top)")
        return top

    def tensor(self, name: str, best: Best) -> Output:
        """`items` or `scores`, [N, K]. Where a row has fewer items, the last ones are an empty text or -1, with the
        lowest score of float32: JSON has no infinity."""
        places_V, scores_V = best.places_BK.reshape(-1), best.scores_BK.reshape(-1)
        if name != "items":
            found = np.where(places_V < 0, np.finfo(np.float32).min, scores_V).astype(np.float32)
            return Output(name, "FP32", best.places_BK.shape, found)
        values: Values
        if self._texts is not None:
            values = [self._texts[place] if place >= 0 else b"" for place in places_V.tolist()]
        else:
            values = np.where(places_V < 0, -1, self._numbers_M[places_V])
        return Output(name, self.datatype, best.places_BK.shape, values)

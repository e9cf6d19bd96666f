"""Batch: the samples of one step as plain arrays; what every source yields and every model's input starts from. And
Values: what is stored of a file's rows.

B = batch, I = dense inputs, T = labels, N = ids of one feature over the whole batch, S = numbers of a sequence
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkeep.base.arrays import Floats, Int32s, Ints


@dataclass(frozen=True)
class Ragged:
    """Ids of one feature, sample after sample.

    Attributes:
        values_N: int64 ids of all samples, C-contiguous.
        lengths_B: int32 number of ids of each sample; None = exactly one each (then N == B).
        weights_N: float32 weight of each id; None = all 1.
    """

    values_N: Ints
    lengths_B: Int32s | None = None
    weights_N: Floats | None = None

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.values_N) if self.lengths_B is None else len(self.lengths_B)

    def slice(self, start: int, stop: int) -> Ragged:
        """Samples [start, stop); views, not copies."""
        if self.lengths_B is None:
            first, last = start, stop
        else:
            first = int(self.lengths_B[:start].sum(dtype=np.int64))
            last = first + int(self.lengths_B[start:stop].sum(dtype=np.int64))
        return Ragged(
            self.values_N[first:last],
            None if self.lengths_B is None else self.lengths_B[start:stop],
            None if self.weights_N is None else self.weights_N[first:last],
        )


@dataclass(frozen=True)
class Batch:
    """Samples of one step.

    Attributes:
        dense_BI: float32, C-contiguous; I may be 0.
        ids: the ids of each feature, in the schema's order.
        label_BT: float32 of shape (B, T), a column for each label of the schema: 0 or 1, or any
            number if the loss takes it.
        weight_B: float32 factor on each sample's loss; None = all 1.
        numbers: of each sequence that has some, the numbers beside its ids, float32 (N, S), C-contiguous. Its ids are
            in `ids`, column by column, with the same lengths.
        whole: reads the ids of sequences before they were cut to `max_length`, by column, oldest first; {} = as `ids`.
    """

    dense_BI: Floats
    ids: Mapping[str, Ragged]
    label_BT: Floats
    weight_B: Floats | None = None
    numbers: Mapping[str, Floats] = field(default_factory=dict)
    whole: Callable[[], Mapping[str, Ragged]] = dict

    def __len__(self) -> int:
        """Number of samples; may be 0."""
        return len(self.label_BT)

    def slice(self, start: int, stop: int) -> Batch:
        """Samples [start, stop); views, not copies. Of a part of them without `numbers` and `whole`, which all hold."""
        if start == 0 and stop >= len(self):
            return self
        ids = {name: ragged.slice(start, stop) for name, ragged in self.ids.items()}
        weight_B = None if self.weight_B is None else self.weight_B[start:stop]
        return Batch(self.dense_BI[start:stop], ids, self.label_BT[start:stop], weight_B)


@dataclass(frozen=True)
class Values:
    """Values of one column of a file's rows, as they are stored.

    Attributes:
        values_V: int64 ids, or numbers, nan = missing: one a row, (N, W) of them, or the entries of lists.
        lengths_N: int64, the entries of each row; None = no lists.
        weights_V: float32, one for each entry of a list; None = there are none.
    """

    values_V: NDArray[Any]
    lengths_N: Ints | None = None
    weights_V: Floats | None = None

"""From chunks of raw columns to columnar samples, side by side: statistics, checks. Knows no file format.

N = rows of a chunk
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from shardkeep.base.errors import DataError
from shardkeep.workers.data.columnar import ColumnarWriter
from shardkeep.workers.data.conversion.chunk import Chunk
from shardkeep.workers.data.conversion.labels import Absent, LabelValues, PartCheck, Unlabelled, add_missing
from shardkeep.workers.data.conversion.layout import ColumnLayout, Fitted, PriorFit
from shardkeep.workers.data.conversion.reader import RowReader
from shardkeep.workers.data.conversion.split import SIDES, TRAIN, Split
from shardkeep.workers.data.schema import NO_LABEL
from shardkeep.workers.data_config import LabelColumn


class Converter:
    """Turns chunks into samples: those of `train` first, or with what an earlier conversion of `train` has fitted.

    `prior`: the part that another model's training rows have fitted."""

    def __init__(self, layout: ColumnLayout, fitted: Fitted | None = None, prior: PriorFit | None = None) -> None:
        self.reader = RowReader(layout, fitted, prior)
        self.skipped = 0
        self._absent = Absent(layout.labels, layout.rules)
        self._labels = layout.labels
        self._checked = layout.labels or (LabelColumn(column=NO_LABEL, kind="number"),)  # of which rows are counted

    @property
    def absent(self) -> list[str]:
        """Values that mean 1, and that no row has had yet."""
        return self._absent.told()

    def convert(
        self,
        chunks: Iterable[Chunk],
        writers: Mapping[int, ColumnarWriter],
        *,
        split: Split | None = None,
        origin: str = "",
    ) -> None:
        """Writes every row to the writer of its side: that which `split` finds, or the only one.

        Only rows of training enter the statistics. `origin` names the input where it turns out to be empty.
        Raises DataError for what cannot be a sample.
        """
        checks = {side: [PartCheck(SIDES[side]) for _ in self._checked] for side in writers}
        row, unlabelled = 0, [Unlabelled(label) for label in self._labels]
        for chunk in itertools.chain.from_iterable(chunk.parts() for chunk in chunks):
            row += len(chunk)
            labels = self.reader.labels(chunk)
            self._absent.see(chunk)
            if add_missing(unlabelled, chunk, labels):
                continue  # an error already: only counts
            kept_N = labels.kept(self._labels)
            side_N = np.full(len(chunk), min(writers)) if split is None else split.sides_of(chunk, labels.value_N)
            for side, writer in writers.items():
                own_N = (side_N == side) & kept_N
                if own_N.any():
                    part = chunk.filter(own_N)
                    rows = self.reader.rows(part, labels.value_N[own_N], learn=side == TRAIN)
                    self._check(checks[side], rows.label_N, part)
                    writer.add(rows)
        if not row:
            raise DataError(f"{origin or 'the data'}: has no rows")
        for one in unlabelled:
            one.finish(row)
            self.skipped += one.count if one.label.missing == "skip" else 0
        if split is not None:
            split.check()
        for part_checks in checks.values():
            self._finish(part_checks, f" ({split.record})" if split is not None else "")

    def _finish(self, checks: Sequence[PartCheck], advice: str) -> None:
        for check, label in zip(checks, self._checked, strict=True):
            check.finish(label, advice)

    def _check(self, checks: Sequence[PartCheck], label_N: LabelValues, part: Chunk) -> None:
        columns = label_N.T if label_N.ndim == 2 else [label_N]
        for check, values_N, label in zip(checks, columns, self._checked, strict=True):
            check.add(values_N, part, label)

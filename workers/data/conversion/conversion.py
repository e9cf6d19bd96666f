"""From chunks of raw columns to columnar samples: the split, statistics, checks. Knows no file format.

N = rows of a chunk
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from shardkeep.base.arrays import Bools
from shardkeep.base.errors import DataError
from shardkeep.workers.data.columnar import ColumnarWriter
from shardkeep.workers.data.conversion.chunk import Chunk
from shardkeep.workers.data.conversion.labels import Absent, LabelValues, PartCheck, Unlabelled, add_missing
from shardkeep.workers.data.conversion.layout import ColumnLayout, Fitted, PriorFit
from shardkeep.workers.data.conversion.reader import RowReader
from shardkeep.workers.data.gather_kernels import hold_out
from shardkeep.workers.data.schema import NO_LABEL
from shardkeep.workers.data_config import LabelColumn


@dataclass(frozen=True)
class HoldOut:
    """Which rows are held out for evaluation: a share of them.

    `places`: of each path the name that, with the seed and the row's number in the file, decides about a row."""

    share: float = 0.0
    seed: int = 0
    places: Mapping[str, str] = field(default_factory=dict)

    def held(self, chunk: Chunk) -> Bools:
        """Which rows of a chunk are held out, bool (N,)."""
        held_N = np.empty(len(chunk), np.bool_)
        name = b"eval_fraction" + os.fsencode(self.places.get(chunk.path, ""))
        hold_out(np.uint64(xxhash.xxh3_64_intdigest(name, seed=self.seed)), chunk.rows_N, self.share, held_N)
        return held_N


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
        train: ColumnarWriter | None,
        held: ColumnarWriter | None,
        *,
        split: HoldOut = HoldOut(),
        origin: str = "",
    ) -> None:
        """Writes every chunk: to `train`, or to `held`, or with both the rows that `split` holds out to `held`.

        Only rows written to `train` enter the statistics. `origin` names the input where it turns out to be empty.
        Raises DataError for what cannot be a sample.
        """
        both = train is not None and held is not None
        names = (("training", train), ("evaluation", held))
        checks = {name: [PartCheck(name) for _ in self._checked] for name, writer in names if writer is not None}
        row, unlabelled = 0, [Unlabelled(label) for label in self._labels]
        for chunk in itertools.chain.from_iterable(chunk.parts() for chunk in chunks):
            row += len(chunk)
            labels = self.reader.labels(chunk)
            self._absent.see(chunk)
            if add_missing(unlabelled, chunk, labels):
                continue  # an error already: only counts
            kept_N = labels.kept(self._labels)
            held_N = split.held(chunk) if both else np.full(len(chunk), train is None)
            for writer, name, own_N in ((train, "training", ~held_N), (held, "evaluation", held_N)):
                own_N = own_N & kept_N
                if writer is not None and own_N.any():
                    part = chunk.filter(own_N)
                    rows = self.reader.rows(part, labels.value_N[own_N], learn=writer is train)
                    self._check(checks[name], rows.label_N, part)
                    writer.add(rows)
        if not row:
            raise DataError(f"{origin or 'the data'}: has no rows")
        for one in unlabelled:
            one.finish(row)
            self.skipped += one.count if one.label.missing == "skip" else 0
        for part_checks in checks.values():
            self._finish(part_checks, f" (data.eval_fraction: {split.share})" if both else "")

    def _finish(self, checks: Sequence[PartCheck], advice: str) -> None:
        for check, label in zip(checks, self._checked, strict=True):
            check.finish(label, advice)

    def _check(self, checks: Sequence[PartCheck], label_N: LabelValues, part: Chunk) -> None:
        columns = label_N.T if label_N.ndim == 2 else [label_N]
        for check, values_N, label in zip(checks, columns, self._checked, strict=True):
            check.add(values_N, part, label)

"""Rows of files with which tables begin: `tables: {user: {init: {name: file, path: rows.parquet}}}`.

They become rows of the run's checkpoint of step 0 (warm_start.py), with new optimizer state. The files are not read
again: a server that is replaced, a resume and every reader of the model take the rows from checkpoints.
"""
# N = rows or samples, D = embedding dim

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkeep.base.errors import ConfigError
from shardkeep.base.files import checksum
from shardkeep.config import JobConfig
from shardkeep.ps.config import TableSpec
from shardkeep.row_files.form import Chunk, RowFile
from shardkeep.row_files.registry import form_of, open_rows

if TYPE_CHECKING:
    from shardkeep.ps.server.snapshot.start_rows import StartRows
    from shardkeep.workers.data.samples import Dataset

MAX_SAMPLES, MAX_CHUNKS = 1 << 20, 16
BLOCK = 1 << 14
"""Samples that are read at once."""


@dataclass(frozen=True, slots=True)
class Pretrained:
    """The rows of one file, for one table."""

    spec: TableSpec
    """With all values of a row, as servers hold it."""
    file: RowFile
    seed: int
    """Of the job: the first-order weight of a row has its initial value, if the file has none."""

    @property
    def facts(self) -> dict[str, Any]:
        """For the manifest of the checkpoint: which files the rows are from."""
        form = form_of(self.file.path)
        assert form is not None  # it was opened by its form
        found = {path.name: checksum(path) for path in form.files(self.file.path)}
        return {"path": str(self.file.path), "rows": self.file.rows, "checksums": found}

    def text(self) -> str:
        """One line for the user."""
        return f"{self.file.rows:,} rows of table {self.spec.name} from {self.file.path}"

    def matched(self, dataset: Dataset) -> str:
        """One line for the user, with the number of ids that the training data have. Raises DataError if the file is
        damaged. Looks at samples spread over the data and at the first rows of the file, so that it takes seconds."""
        from shardkeep.workers.data.samples import gathered

        if not self.file.rows:
            return self.text()
        names = [feature.name for feature in dataset.schema.looked_up if feature.table == self.spec.name]
        samples_N = np.arange(0, len(dataset), -(-len(dataset) // MAX_SAMPLES) or 1)
        blocks = (gathered(dataset, samples_N[at : at + BLOCK]).ids for at in range(0, samples_N.size, BLOCK))
        parts = (np.unique(ids[name].values_N) for ids in blocks for name in names)
        known = np.unique(np.concatenate([np.empty(0, np.int64), *parts]))
        found = [np.isin(ids_N, known) for ids_N, _ in islice(self.file.chunks(), MAX_CHUNKS)]
        matches, rows = sum(int(chunk.sum()) for chunk in found), sum(chunk.size for chunk in found)
        where = "the training data" if samples_N.size == len(dataset) else f"{samples_N.size:,} training samples"
        return f"{'' if matches else 'warning: '}{self.text()}; {matches:,} of {rows:,} ids are in {where}"

    def start(self) -> StartRows:
        """The rows as the writer of snapshots takes them."""
        from shardkeep.ps.server.snapshot.start_rows import StartRows

        return StartRows(self.spec, self.file.rows, self._chunks, self._source, self.file.shown)

    @property
    def _source(self) -> str:
        return f"{_key(self.spec.name)}: {self.file.path}"

    def _chunks(self) -> Iterator[Chunk]:
        missing = self.spec.dim - self.file.dim
        if not missing:
            yield from self.file.chunks()
            return
        from shardkeep.ps.server.table.initializers.initial import Initial

        initial = Initial(self.spec.init, seed=self.seed, name=self.spec.name)
        for ids_N, rows_ND in self.file.chunks():
            weights_N1 = initial.rows(ids_N, self.spec.dim)[:, -missing:]
            yield ids_N, np.concatenate([rows_ND, weights_N1], axis=1)


def pretrained_of(config: JobConfig, *, besides: Collection[str] = ()) -> list[Pretrained]:
    """Opens the row files that a config names and checks that they fit; reads no row.

    Args:
        besides: Tables that have their rows already.

    Raises:
        UserError: A file cannot be read, or has no known suffix.
        DataError: It is damaged, or has other columns or types.
        ConfigError: Its rows have another dim.
    """
    names = [name for name in config.row_files if name not in besides]
    return [_opened(config, name) for name in names]


def _opened(config: JobConfig, name: str) -> Pretrained:
    from shardkeep.workers.models.registry import row_dim  # loads torch

    spec = config.table(name)
    full = spec.model_copy(update={"dim": row_dim(config.model.name, spec.dim)})
    file = open_rows(Path(str(spec.init.path)), key=_key(name))
    allowed = sorted({full.dim, spec.dim} if full.dim == spec.dim + 1 else {full.dim})
    if file.rows and file.dim not in allowed:
        raise ConfigError(
            f"{_key(name)}: the rows of {file.path} have {file.dim} values; allowed for table {name}: "
            f"{' or '.join(map(str, allowed))}"
        )
    return Pretrained(full, file, config.seed)


def _key(table: str) -> str:
    return f"tables.{table}.init.path"

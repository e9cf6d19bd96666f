"""The source `orc`: stripes of ORC files, the named columns only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
from pyarrow import orc

from shardkeep.workers.data.sources.forms import sized


def schema(path: Path) -> pa.Schema:
    """The columns of a file. Raises what pyarrow raises."""
    return orc.ORCFile(path).schema


def batches(path: Path, columns: Sequence[str]) -> Iterator[tuple[pa.RecordBatch, float]]:
    """The stripes of a file, and the share of it that is read. Raises what pyarrow raises."""
    file = orc.ORCFile(path)
    stripes = range(count := file.nstripes)
    yield from sized((file.read_stripe(number, columns=list(columns)), (number + 1) / count) for number in stripes)

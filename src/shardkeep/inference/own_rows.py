"""The rows of one side of a run's own data, read from its files: for `shardkeep predict RUN --split SIDE`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from shardkeep.base.errors import UserError
from shardkeep.config import JobConfig
from shardkeep.inference.files import Told, chunks_of_files
from shardkeep.workers.data.conversion.chunk import Chunk
from shardkeep.workers.data.conversion.inputs import Inputs
from shardkeep.workers.data.conversion.split import Split
from shardkeep.workers.data.input_files import find_files, place_of
from shardkeep.workers.data_config import FILE_SOURCES

Side = Literal["train", "eval", "test"]
_NUMBERS: dict[Side, int] = {"train": 0, "eval": 1, "test": 2}


def own_rows(
    config: JobConfig, side: Side, inputs: Inputs, told: Told, *, extra: Sequence[str] = ()
) -> Iterator[Chunk]:
    """The rows of a side, in the order of the files: all rows of its own files, or those of the training files that are
    held out for it, or not at all; without those that lack a label.

    Args:
        inputs: How the model's columns are read, its label included.
        extra: Columns besides those of a sample.

    Raises UserError where there are no such files or rows, DataError for files that cannot be read."""
    data = config.data
    if data.source not in FILE_SOURCES:
        raise UserError(f"--split {side}: the job's source, {data.source}, has no files; allowed: --data FILE")
    record = inputs.fitted.split or data.held_out(config.seed)
    own: list[str] = getattr(data, side)
    entries = own or (data.train if record is not None else [])
    files = find_files(Path(data.root), entries, key=f"data.{side}", kind=data.source) if entries else []
    places = {str(path): place_of(path) for path in files}
    layout = replace(inputs.layout, time=data.time)
    split = None if record is None or entries is not data.train else Split(record, layout, places)
    if not files or (split is not None and _NUMBERS[side] not in split.sides):
        raise UserError(f"--split {side}: the job has no such rows; allowed: --data FILE, or another side")
    columns = [*layout.raw_columns(), *(split.columns if split is not None else []), *extra]
    chunks = chunks_of_files(files, inputs, told, extra=columns)
    return chunks if split is None else _on_side(chunks, inputs, split, _NUMBERS[side])


def _on_side(chunks: Iterator[Chunk], inputs: Inputs, split: Split, side: int) -> Iterator[Chunk]:
    for whole in chunks:
        chunk, label_N = inputs.labelled(whole)
        if len(chunk) and (own_N := split.sides_of(chunk, label_N) == side).any():
            yield chunk.filter(own_N)

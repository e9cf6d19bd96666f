"""Scoring: `shardkeep evaluate` and `shardkeep predict`, over data of any size in bounded memory."""

# B = samples of a block, N = samples, T = labels

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.base.arrays import Floats, Ints
from shardkeep.base.errors import UserError
from shardkeep.config import JobConfig
from shardkeep.inference.export.manifest import is_export
from shardkeep.inference.files import Told, chunks_of_files, score_writer
from shardkeep.inference.loading import load_trained
from shardkeep.inference.trained import LookedUp, Trained, Unseen, inputs_of, trained_of_checkpoint
from shardkeep.run.trained import Which, checkpoint_of, config_of
from shardkeep.run.warm_start import continuing
from shardkeep.workers.collectives.collective import Solo
from shardkeep.workers.data.conversion.chunk import Chunk
from shardkeep.workers.data.input_files import find_files
from shardkeep.workers.data.samples import Data, Dataset, gathered
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.evaluate import groups_of
from shardkeep.workers.metrics.quality import evaluate_over_workers
from shardkeep.workers.prefetch import Prefetch

Split = Literal["eval", "train", "test"]
Item = TypeVar("Item")
AHEAD = 4
"""Blocks that are read and looked up while one is in the dense model."""


@dataclass(frozen=True)
class Scored:
    """What `predict_files` did.

    Attributes:
        unseen: By feature, the number of values whose id training did not see, and of all values.
    """

    step: int
    rows: int
    seconds: float
    unseen: dict[str, tuple[int, int]]


def predict_files(
    run: Path,
    files: Sequence[Path],
    out: Path,
    *,
    which: Which = "last",
    keep: Sequence[str] = (),
    told: Told = lambda _text, _share: None,
) -> Scored:
    """Writes the score of each row of the files, in order, with the columns `keep` beside it. Raises UserError,
    DataError, CheckpointError, and OSError where the disk fails; `out` is complete or as it was before."""
    if out.resolve() in {path.resolve() for path in files}:
        raise UserError(f"--out {out}: is one of the files to score")
    trained = load_trained(run, which)
    inputs = trained.inputs
    assert inputs is not None
    began, rows, unseen = time.monotonic(), 0, Unseen(tuple(feature.name for feature in trained.schema.features))
    blocks = _looked_up(trained, chunks_of_files(files, inputs, told, extra=keep), keep, unseen)
    with score_writer(out, trained.schema.labels, keep) as writer, contextlib.closing(_ahead(blocks)) as coming:
        scores: list[Floats] = []
        for found, kept in coming:
            scores.append(trained.scores(trained.logits_of(found)))
            rows += len(found.batch)
            if kept is not None:
                writer.add(np.concatenate(scores), kept)
                scores.clear()
    return Scored(trained.step, rows, time.monotonic() - began, unseen.counts())


def _looked_up(
    trained: Trained, chunks: Iterator[Chunk], keep: Sequence[str], unseen: Unseen
) -> Iterator[tuple[LookedUp, dict[str, pa.Array] | None]]:
    """The blocks of chunks with their rows; with the last one of a chunk the columns to keep."""
    assert trained.inputs is not None
    size = trained.blocks.size
    for chunk in chunks:
        samples = trained.inputs.samples(chunk)
        for start in range(0, len(samples), size):
            end = min(start + size, len(samples))
            kept = {name: chunk.column(name).values for name in keep} if end == len(samples) else None
            yield trained.looked_up(samples.gather(np.arange(start, end)), unseen), kept


def _ahead(items: Iterator[Item]) -> Generator[Item, None, None]:
    """The items, made by another thread while earlier ones are used."""
    with contextlib.closing(Prefetch(lambda _: next(items, None), start=0, stop=sys.maxsize, depth=AHEAD)) as made:
        while (item := made.next()) is not None:
            yield item


def evaluate_run(
    run: Path,
    *,
    which: Which = "last",
    split: Split = "eval",
    files: Sequence[Path] = (),
    by: str | None = None,
    told: Told = lambda _text, _share: None,
) -> dict[str, Any]:
    """The metrics of a run's model: on `files`, or else on the run's own data.

    Args:
        by: A column of the files: `by` of the result has the metrics of each of its values, the most frequent first.

    Returns:
        `step` of the checkpoint, and what the trainer's evaluation reports: of the run's evaluation data and its last
        checkpoint the same numbers.

    Raises:
        UserError: There is no such run, checkpoint or split.
        DataError: The data cannot be read.
    """
    if split == "test" and not files:
        files = _test_files(run)
    values: list[pa.Array] = []
    if files:
        trained = load_trained(run, which)
        found = list(_of_files(trained, files, told, by, values))
    elif by is not None:
        raise UserError(f"--by {by}: needs files; allowed: with --data FILE, or --split test")
    else:
        trained, dataset = _with_data(run, which, split, told)
        found = list(_of_dataset(trained, dataset, told, trained.config.eval.max_samples))
    parts = _joined(trained, found)
    result = {"step": trained.step} | _metrics(trained, parts)
    return result if by is None else result | {"by": {"column": by, "groups": _by_group(trained, parts, values)}}


def metrics_on(trained: Trained, dataset: Dataset, told: Told) -> dict[str, Any]:
    """The metrics of a model on the first `eval.max_samples` samples of data."""
    return _metrics(
        trained, _joined(trained, list(_of_dataset(trained, dataset, told, trained.config.eval.max_samples)))
    )


def data_of(config: JobConfig, split: Split, told: Told) -> Dataset:
    """A job's own data, by name. Raises UserError, DataError."""
    data: Data = open_data(config.data, seed=config.seed, progress=told)
    dataset = data.eval if split == "eval" else data.train
    if dataset is None:
        raise UserError("the job has no evaluation data; allowed: --data FILE, or --split train")
    return dataset


def _joined(trained: Trained, found: Sequence[tuple[Floats, Floats, Ints]]) -> list[Any]:
    """Logits, labels and groups of all blocks."""
    num_labels = len(trained.schema.labels)
    none = [np.empty((0, num_labels), np.float32)] * 2 + [np.empty(0, np.int64)]
    return [np.concatenate(part) for part in zip(none, *found, strict=True)]


def _metrics(trained: Trained, parts: Sequence[Any]) -> dict[str, Any]:
    return evaluate_over_workers(*parts, names=trained.schema.labels, collective=Solo(), asked=trained.asked)


def _by_group(trained: Trained, parts: Sequence[Any], values: Sequence[pa.Array]) -> list[dict[str, Any]]:
    """`value` and the metrics of each value, the most frequent first."""
    encoded = pa.chunked_array(values or [pa.array([], pa.string())]).cast(pa.string()).dictionary_encode("encode")
    encoded = encoded.combine_chunks()
    encoded = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
    index_N = np.asarray(encoded.indices)
    order_N, groups = np.argsort(index_N, kind="stable"), encoded.dictionary.to_pylist()
    bounds = np.searchsorted(index_N[order_N], np.arange(len(groups) + 1))
    found = []
    for g, value in enumerate(groups):
        rows_N = order_N[bounds[g] : bounds[g + 1]]
        own = [part[rows_N] if len(part) else part for part in parts]
        found.append({"value": value} | _metrics(trained, own))
    return sorted(found, key=lambda group: -int(group["samples"]))


def _test_files(run: Path) -> list[Path]:
    data = config_of(run).data
    if not data.test:
        raise UserError(f"{run}: the job has no data.test; allowed: --data FILE, or --split eval")
    return find_files(Path(data.root), data.test, key="data.test", kind=data.source)


def _of_files(
    trained: Trained, files: Sequence[Path], told: Told, by: str | None, values: list[pa.Array]
) -> Iterator[tuple[Floats, Floats, Ints]]:
    """Logits, labels and groups. Adds the column `by` of the scored rows to `values`."""
    inputs = trained.inputs
    assert inputs is not None
    extra = [inputs.layout.label.column] + ([] if by is None else [by])
    for whole in chunks_of_files(files, inputs, told, extra=extra):
        chunk, label_N = inputs.labelled(whole)
        if len(chunk):
            if by is not None:
                column = chunk.column(by).values
                if pa.types.is_nested(column.type):
                    raise UserError(f"--by {by}: has several values in a row; allowed: a column with one")
                values.append(column.dictionary_decode() if pa.types.is_dictionary(column.type) else column)
            yield from _of_dataset(trained, inputs.samples(chunk, label_N), lambda _text, _share: None)


def _of_dataset(
    trained: Trained, dataset: Dataset, told: Told, most: int | None = None
) -> Iterator[tuple[Floats, Floats, Ints]]:
    """Logits, labels and groups of the first `most` samples; None = of all."""
    size = trained.blocks.size
    end = min(len(dataset), most or len(dataset))
    for start in range(0, end, size):
        batch = gathered(dataset, np.arange(start, min(start + size, end)))
        yield trained.logits(batch), batch.label_BT, groups_of(batch, trained.asked)
        told("scoring", (start + len(batch)) / end)


def _with_data(run: Path, which: Which, split: Split, told: Told) -> tuple[Trained, Dataset]:
    if is_export(run):
        raise UserError(f"{run}: an export has no data of its own; allowed: --data FILE")
    config = config_of(run)
    checkpoint = checkpoint_of(config, run, which)
    data: Data = open_data(continuing(config, checkpoint).data, seed=config.seed, progress=told)
    dataset = data.eval if split == "eval" else data.train
    if dataset is None:
        raise UserError(f"{run}: the job has no evaluation data; allowed: --data FILE, or --split train")
    return trained_of_checkpoint(config, checkpoint, data.train.schema, inputs_of(checkpoint)), dataset

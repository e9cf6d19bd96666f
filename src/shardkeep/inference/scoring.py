"""Scoring: `shardkeep evaluate` and `shardkeep predict`, over data of any size in bounded memory."""

# B = samples of a block, N = samples, T = labels

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.base.arrays import Floats, Ints
from shardkeep.base.errors import UserError
from shardkeep.config import JobConfig
from shardkeep.inference.export.manifest import is_export
from shardkeep.inference.files import Side, Told, as_texts, chunks_of_files, own_rows, score_writer, weigh
from shardkeep.inference.further_items import with_items
from shardkeep.inference.loading import load_trained
from shardkeep.inference.trained import LookedUp, Trained, computing_in, inputs_of, trained_of_checkpoint
from shardkeep.run.origin.warm_start import continuing
from shardkeep.run.trained import Which, checkpoint_of, config_of
from shardkeep.workers.collectives.collective import Solo
from shardkeep.workers.config import Amp
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.conversion.chunk import Chunk
from shardkeep.workers.data.input_files import advising, find_files
from shardkeep.workers.data.samples import Dataset, batches, gathered
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.embeddings.unseen import Counts, Unseen
from shardkeep.workers.evaluation.evaluate import groups_of, weights_of
from shardkeep.workers.evaluation.retrieval import RankSettings
from shardkeep.workers.metrics.quality import evaluate_over_workers
from shardkeep.workers.metrics.ranks import evaluate_ranks
from shardkeep.workers.model_config import RETRIEVAL
from shardkeep.workers.prefetch import Prefetch

Item = TypeVar("Item")
Scores = tuple[Floats | Ints, Floats, Ints, Floats]
"""Logits and labels (N, T), groups and weights (N,); empty = none. Of a retrieval model ranks (N, 1), not logits."""
AHEAD = 4
"""Blocks that are read and looked up while one is in the dense model."""


@dataclass(frozen=True)
class Scored:
    """What `predict_files` did.

    Attributes:
        not_finite: Predictions that are NaN or infinite; the score of an infinite one is 0 or 1.
        unseen: By feature, the number of values whose id has no row, and of all values.
    """

    step: int
    rows: int
    not_finite: int
    seconds: float
    unseen: Counts


def predict_files(
    run: Path,
    files: Sequence[Path] | Side,
    out: Path,
    *,
    which: Which = "last",
    keep: Sequence[str] = (),
    best: BestItems | None = None,
    amp: Amp | None = None,
    told: Told = lambda _text, _share: None,
) -> Scored:
    """Writes the score of each row of the files, or of a side of the run's own data, in order, with the columns `keep`
    beside it; of a retrieval model the `best` items. Raises UserError, DataError, CheckpointError, and JobError where
    the disk fails; `out` is complete or as it was before."""
    trained = load_trained(run, which, amp=amp)
    inputs, answers = trained.inputs, _answers(trained, best, told)
    assert inputs is not None and trained.labelled_inputs is not None
    if isinstance(files, str):
        files, chunks = own_rows(trained.config, files, trained.labelled_inputs, told, extra=keep)
    else:
        chunks = chunks_of_files(files, inputs, told, extra=keep)
    if out.exists() and any(out.samefile(path) for path in files):
        raise UserError(f"--out {out}: is one of the files to score")
    began, rows, not_finite = time.monotonic(), 0, 0
    unseen = Unseen(trained.schema)
    blocks = _looked_up(trained, chunks, unseen)
    with score_writer(out, answers.types, keep) as writer, contextlib.closing(_ahead(blocks)) as coming:
        scores: list[pa.RecordBatch] = []
        for found, chunk in coming:
            logits_BT = trained.logits_of(found)
            scores.append(answers.of(logits_BT, found.batch))
            rows += len(found.batch)
            not_finite += _not_finite(logits_BT)
            if chunk is not None:
                writer.add(scores, chunk)
                scores.clear()
    return Scored(trained.step, rows, not_finite, time.monotonic() - began, unseen.counts())


@dataclass(frozen=True)
class BestItems:
    """What `predict_files` writes of a retrieval model.

    Attributes:
        top: The most items of a row.
        files: Have further items, by their columns.
    """

    top: int
    files: Sequence[Path] = ()


@dataclass(frozen=True)
class _Answers:
    """Columns that are written, and how they follow from what the dense model gives for a batch."""

    types: Mapping[str, pa.DataType]
    of: Callable[[Floats, Batch], pa.RecordBatch]


def _answers(trained: Trained, best: BestItems | None, told: Told) -> _Answers:
    """Raises UserError for a number of items with a model that scores rows, or without one for a retrieval model."""
    name, names = trained.config.model.name, trained.outputs
    if (best is None) != (trained.sides is None):
        what = f"is missing; {name} finds items" if best is None else f"{best.top}: {name} scores rows"
        raise UserError(f"--top {what}; allowed: --top K with {', '.join(RETRIEVAL)}, and only with them")
    if best is None:
        types = dict.fromkeys(names, pa.float32())
        return _Answers(types, lambda logits, _: pa.record_batch([*trained.scores(logits).T.copy()], names=names))
    top, finder = best.top, with_items(trained, best.files, told) if best.files else trained.finder
    finder.check(top)
    return _Answers(finder.types, lambda users, batch: finder.named(finder.top(users, batch, top)))


def _looked_up(trained: Trained, chunks: Iterator[Chunk], unseen: Unseen) -> Iterator[tuple[LookedUp, Chunk | None]]:
    """The blocks of chunks with their rows; with the last one of a chunk the chunk."""
    assert trained.inputs is not None
    for chunk in chunks:
        left = len(chunk)
        for batch in batches(trained.inputs.samples(chunk), trained.blocks.size):
            left -= len(batch)
            yield trained.looked_up(batch, unseen), None if left else chunk


def _ahead(items: Iterator[Item]) -> Generator[Item, None, None]:
    """The items, made by another thread while earlier ones are used."""
    with contextlib.closing(Prefetch(lambda _: next(items, None), start=0, stop=sys.maxsize, depth=AHEAD)) as made:
        while (item := made.next()) is not None:
            yield item


@advising("allowed: --data FILE, wherever the data are now")
def evaluate_run(
    run: Path,
    *,
    which: Which = "last",
    split: Side = "eval",
    files: Sequence[Path] = (),
    by: str | None = None,
    amp: Amp | None = None,
    told: Told = lambda _text, _share: None,
) -> dict[str, Any]:
    """The metrics of a run's model: on `files`, or else on the run's own data.

    Args:
        by: A column of the files: `by` of the result has the metrics of each of its values, the most frequent first.
        amp: Arithmetic of the dense model; None = that of the job.

    Returns:
        `step` of the checkpoint, and what the trainer's evaluation reports: of the run's evaluation data and its last
        checkpoint the same numbers. `not_finite`: the number of predictions that are not finite, if there are any.

    Raises:
        UserError: There is no such run, checkpoint or split.
        DataError: The data cannot be read.
    """
    if split == "test" and not files:
        files = _test_files(run)
    values: list[pa.Array] = []
    if files:
        trained = load_trained(run, which, amp=amp)
        unseen = Unseen(trained.schema)
        found = list(_of_files(trained, files, told, by, values, unseen))
    elif by is not None:
        allowed = "with --data FILE" if split == "test" else "with --data FILE, or --split test"
        raise UserError(f"--by {by}: needs files; allowed: {allowed}")
    else:
        trained, dataset = _with_data(run, which, split, told, amp)
        unseen = Unseen(trained.schema)
        most = None if split == "test" else trained.config.eval.max_samples
        found = list(_of_dataset(trained, dataset, told, most, unseen))
    parts = _joined(trained, found)
    result = {"step": trained.step} | _metrics(trained, parts) | {"unseen": unseen.counts()}
    weight, notes = None if trained.inputs is None else trained.inputs.layout.weight, []
    if weight is not None and len(parts[3]) < len(parts[0]):
        notes.append(f"no file has the column of weights, {weight} (data.weight): all rows weigh the same")
    if split == "train" and not files:
        notes.append("the model was trained on these rows: its metrics on new ones are lower")
    if notes:
        result["note"] = "; ".join(filter(None, [*notes, result.get("note")]))
    if broken := _not_finite(parts[0]):
        result["not_finite"] = broken
    return result if by is None else result | {"by": {"column": by, "groups": _by_group(trained, parts, values)}}


def metrics_on(trained: Trained, dataset: Dataset, told: Told) -> dict[str, Any]:
    """The metrics of a model on the first `eval.max_samples` samples of data."""
    found = list(_of_dataset(trained, dataset, told, trained.config.eval.max_samples))
    return _metrics(trained, _joined(trained, found))


def data_of(config: JobConfig, split: Side, told: Told) -> Dataset | None:
    """A job's own data, by name; None = it has no evaluation data. Raises DataError."""
    data = open_data(config.data, seed=config.seed, progress=told, items=config.items)
    return {"train": data.train, "eval": data.eval, "test": data.test}[split]


def _not_finite(values_NT: Floats) -> int:
    return int(np.count_nonzero(~np.isfinite(values_NT)))


def _joined(trained: Trained, found: Sequence[Scores]) -> list[Any]:
    """Logits, labels, groups and weights of all blocks."""
    num_labels = len(trained.schema.labels)
    none = [np.empty((0, num_labels), np.float32)] * 2 + [np.empty(0, np.int64), np.empty(0, np.float32)]
    return [np.concatenate(part) for part in zip(none, *found, strict=True)]


def _metrics(trained: Trained, parts: Sequence[Any]) -> dict[str, Any]:
    if trained.sides is not None:
        asked = RankSettings.by(trained.config.eval, trained.config.train.loss)
        return evaluate_ranks(parts[0][:, 0].astype(np.int64), parts[3], asked.metrics)
    return evaluate_over_workers(*parts, names=trained.schema.labels, collective=Solo(), asked=trained.asked)


def _by_group(trained: Trained, parts: Sequence[Any], values: Sequence[pa.Array]) -> list[dict[str, Any]]:
    """`value` and the metrics of each value, the most frequent first."""
    encoded = pa.concat_arrays(values or [pa.array([], pa.large_string())]).dictionary_encode("encode")
    index_N = np.asarray(encoded.indices)
    texts = encoded.dictionary.cast(pa.large_binary()).to_pylist()
    groups = [text if text is None else text.decode(errors="backslashreplace") for text in texts]
    order_N = np.argsort(index_N, kind="stable")
    bounds = np.searchsorted(index_N[order_N], np.arange(len(groups) + 1))
    found = []
    for g, value in enumerate(groups):
        rows_N = order_N[bounds[g] : bounds[g + 1]]
        own = [part[rows_N] if len(part) else part for part in parts]
        found.append({"value": value} | _metrics(trained, own))
    return sorted(found, key=lambda group: -int(group["samples"]))


def _test_files(run: Path) -> list[Path]:
    data = config_of(run).data
    if data.split is not None and data.split.test:
        return []
    if not data.test:
        raise UserError(f"{run}: the job has no data.test; allowed: --data FILE, or --split eval")
    return find_files(Path(data.root), data.test, key="data.test", kind=data.source)


def _of_files(
    trained: Trained, files: Sequence[Path], told: Told, by: str | None, values: list[pa.Array], unseen: Unseen
) -> Iterator[Scores]:
    """Logits, labels, groups and weights. Adds the column `by` of the scored rows to `values`."""
    assert trained.labelled_inputs is not None
    inputs = weigh(files, trained.labelled_inputs)
    extra = [name for name in (*inputs.layout.label_columns, inputs.layout.weight, by) if name is not None]
    for whole in chunks_of_files(files, trained.labelled_inputs, told, extra=extra):
        chunk, label_N = inputs.labelled(whole)
        if len(chunk):
            if by is not None:
                values.append(as_texts(chunk.column(by), "for --by a column with one value a row"))
            yield from _of_dataset(trained, inputs.samples(chunk, label_N), lambda _text, _share: None, None, unseen)


def _of_dataset(
    trained: Trained, dataset: Dataset, told: Told, most: int | None = None, unseen: Unseen | None = None
) -> Iterator[Scores]:
    """Logits, or the ranks of targets, labels, groups and weights of the first `most` samples; None = of all."""
    size = trained.blocks.size
    end = min(len(dataset), most or len(dataset))
    for start in range(0, end, size):
        batch = gathered(dataset, np.arange(start, min(start + size, end)))
        ranks = trained.sides is not None
        outputs = trained.ranks(batch, unseen)[:, None] if ranks else trained.logits(batch, unseen)
        yield outputs, batch.label_BT, groups_of(batch, trained.asked), weights_of(batch)
        told("scoring", (start + len(batch)) / end)


def _with_data(run: Path, which: Which, split: Side, told: Told, amp: Amp | None) -> tuple[Trained, Dataset]:
    if is_export(run):
        raise UserError(f"{run}: an export has no data of its own; allowed: --data FILE")
    config = config_of(run)
    checkpoint = checkpoint_of(config, run, which)
    inputs = inputs_of(checkpoint)
    dataset = data_of(continuing(config, checkpoint), split, told)
    if dataset is None:
        raise UserError(f"{run}: the job has no evaluation data; allowed: --data FILE, or --split train")
    return trained_of_checkpoint(computing_in(config, amp), checkpoint, dataset.schema, inputs, run=run), dataset

"""Scoring: `shardkeep evaluate` and `shardkeep predict`, over data of any size in bounded memory."""

# B = samples of a block, N = samples, T = labels

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.base.arrays import Floats, Ints
from shardkeep.base.errors import ConfigError, DataError, UserError
from shardkeep.config import JobConfig
from shardkeep.inference.export.manifest import is_export
from shardkeep.inference.files import Side, Told, as_texts, chunks_of_files, in_dialect, own_rows, score_writer, weigh
from shardkeep.inference.loading import load_trained
from shardkeep.inference.trained import LookedUp, Trained, computing_in, inputs_of, trained_of_checkpoint
from shardkeep.run.origin.warm_start import continuing
from shardkeep.run.trained import Which, checkpoint_of, config_of
from shardkeep.workers.config import Amp
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.conversion.chunk import Chunk
from shardkeep.workers.data.fitting.inputs import Inputs
from shardkeep.workers.data.input_files import advising, own_files
from shardkeep.workers.data.samples import Dataset, batches, gathered
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig
from shardkeep.workers.embeddings.unseen import Counts, Unseen
from shardkeep.workers.evaluation.evaluate import groups_of, weights_of
from shardkeep.workers.evaluation.retrieval import RankSettings
from shardkeep.workers.metrics.quality import MetricSettings, evaluate_labels
from shardkeep.workers.metrics.ranks import evaluate_ranks
from shardkeep.workers.model_config import RETRIEVAL
from shardkeep.workers.prefetch import Prefetch
from shardkeep.workers.split_config import SplitRecord

Item = TypeVar("Item")
Scores = tuple[Floats | Ints, Floats, Ints, Floats]
"""As of `EvaluationScores`."""
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
    run: Path | Trained,
    files: Sequence[Path] | Side,
    out: Path,
    *,
    keep: Sequence[str] = (),
    top: int | None = None,
    told: Told = lambda _text, _share: None,
    settings: Sequence[str] = (),
) -> Scored:
    """Writes the score of each row of the files, or of a side of the run's own data, in order, with the columns `keep`
    beside it; of a retrieval model the `top` items. `settings`: as of `in_dialect`. `out` is complete or as it was
    before. Raises UserError, DataError, ConfigError, CheckpointError, and JobError where the disk fails."""
    trained = load_trained(run) if isinstance(run, Path) else run
    inputs, (types, answer) = trained.inputs, _answers(trained, top)
    assert inputs is not None and trained.labelled_inputs is not None
    written = in_dialect(inputs, [] if isinstance(files, str) else files, settings)
    if isinstance(files, str):
        files, chunks = own_rows(trained.config, files, trained.labelled_inputs, told, extra=keep)
    else:
        chunks = chunks_of_files(files, written, told, extra=keep)
    if out.exists() and any(out.samefile(path) for path in files):
        raise UserError(f"--out {out}: is one of the files to score")
    began, rows, not_finite = time.monotonic(), 0, 0
    unseen = Unseen(trained.schema)
    blocks = _looked_up(trained, chunks, unseen)
    with score_writer(out, types, keep) as writer, contextlib.closing(_ahead(blocks)) as coming:
        scores: list[pa.RecordBatch] = []
        for found, chunk in coming:
            logits_BT = trained.logits_of(found)
            scores.append(answer(logits_BT, found.batch))
            rows += len(found.batch)
            not_finite += _not_finite(logits_BT)
            if chunk is not None:
                writer.add(scores, chunk)
                scores.clear()
    return Scored(trained.step, rows, not_finite, time.monotonic() - began, unseen.counts())


def _answers(trained: Trained, top: int | None) -> tuple[dict[str, Any], Callable[[Floats, Batch], pa.RecordBatch]]:
    """The types of the columns that are written, and how they follow from what the dense model gives for a batch.

    Raises UserError for a number of items with a model that scores rows, or without one for a retrieval model."""
    name, names = trained.config.model.name, trained.outputs
    if (top is None) != (trained.sides is None):
        what = f"is missing; {name} finds items" if top is None else f"{top}: {name} scores rows"
        raise UserError(f"--top {what}; allowed: --top K with {', '.join(RETRIEVAL)}, and only with them")
    if top is None:
        types = dict.fromkeys(names, pa.float32())
        return types, lambda logits, _: pa.record_batch([*trained.scores(logits).T.copy()], names=names)
    finder = trained.finder
    finder.check(top)
    return finder.types, lambda users, batch: finder.named(finder.top(users, batch, top))


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


@dataclass(frozen=True)
class EvaluationScores:
    """What a model says of labelled rows, in their order: outputs (N, T), of a retrieval model ranks (N, 1), labels
    (N, T), groups, of a retrieval model the targets, and weights (N,); empty = none. `asked`: metrics of the labels
    `names`."""

    outputs_NT: Floats
    labels_NT: Floats
    groups_N: Ints
    weights_N: Floats
    asked: MetricSettings | RankSettings
    names: Sequence[str] = ("",)

    @property
    def binary(self) -> bool:
        """Whether there is one label of 0 and 1, with logits that are all finite."""
        classes = isinstance(self.asked, MetricSettings) and len(self.names) == 1 and not self.asked.numbers
        return classes and bool(np.isfinite(self.outputs_NT).all())

    def metrics(self, rows_K: Ints | None = None) -> dict[str, Any]:
        """The metrics of all rows, or of some, which may repeat."""
        parts: Any = (self.outputs_NT, self.labels_NT, self.groups_N, self.weights_N)
        if rows_K is not None:
            parts = [part[rows_K] if len(part) else part for part in parts]
        outputs, labels, groups, weights = parts
        if isinstance(self.asked, RankSettings):
            return evaluate_ranks(outputs[:, 0].astype(np.int64), weights, self.asked.metrics)
        return evaluate_labels(self.names, outputs, labels, groups, weights, self.asked)


@dataclass(frozen=True)
class EvaluationRows:
    """A model, and labelled rows for it: the first `most` of each data set, None = all. `values`: of the column `by`, a
    part for each data set that was read. `seen`: those on which the model was trained, in words."""

    trained: Trained
    datasets: Iterable[Dataset]
    most: int | None
    told: Told
    by: str | None = None
    values: Sequence[pa.Array] = ()
    seen: str = ""

    def scores(self, unseen: Unseen | None = None) -> EvaluationScores:
        """Scores the rows. Counts values in `unseen`."""
        batches = (gathered(each, rows_B) for each in self.datasets for rows_B in self.blocks(each))
        return self.joined([self.scored(batch, batch, unseen) for batch in batches])

    def count(self, dataset: Dataset) -> int:
        """How many samples of a data set are scored."""
        return min(len(dataset), self.most or len(dataset))

    def blocks(self, dataset: Dataset) -> Iterator[Ints]:
        """The numbers of these samples, in blocks of what the model takes at once."""
        size, end = self.trained.blocks.size, self.count(dataset)
        for start in range(0, end, size):
            yield np.arange(start, min(start + size, end))
            self.told("scoring", min(start + size, end) / end)

    def scored(self, batch: Batch, own: Batch, unseen: Unseen | None = None) -> Scores:
        """What the model says of a batch, with labels, groups and weights of `own`. Counts values in `unseen`."""
        trained = self.trained
        if trained.sides is None:
            return trained.logits(batch, unseen), own.label_BT, groups_of(own, trained.asked), weights_of(own)
        targets_B = own.ids[trained.sides.item.name].values_N
        return trained.ranks(batch, unseen)[:, None], own.label_BT, targets_B, weights_of(own)

    def joined(self, found: Sequence[Scores]) -> EvaluationScores:
        """The scores of batches, one after the other."""
        trained = self.trained
        none_0T, empty = np.empty((0, len(trained.schema.labels)), np.float32), np.empty(0, np.float32)
        start: Scores = (none_0T, none_0T, np.empty(0, np.int64), empty)
        outputs, labels, groups, weights = [np.concatenate(part) for part in zip(start, *found, strict=True)]
        ranks = None if trained.sides is None else RankSettings.by(trained.config.eval, trained.config.train.loss)
        return EvaluationScores(outputs, labels, groups, weights, ranks or trained.asked, trained.schema.labels)

    def evaluate(self) -> dict[str, Any]:
        """The metrics, as `evaluate_run` returns them."""
        unseen, trained = Unseen(self.trained.schema), self.trained
        scores = self.scores(unseen)
        result = {"step": trained.step} | scores.metrics() | {"unseen": unseen.counts()}
        weight, notes = None if trained.inputs is None else trained.inputs.layout.weight, []
        if weight is not None and len(scores.weights_N) < len(scores.outputs_NT):
            notes.append(f"no file has the column of weights, {weight} (data.weight): all rows weigh the same")
        if self.seen:
            notes.append(f"the model was trained on {self.seen}: its metrics on new ones are lower")
        if notes:
            result["note"] = "; ".join(filter(None, [*notes, result.get("note")]))
        if broken := _not_finite(scores.outputs_NT):
            result["not_finite"] = broken
        return result if self.by is None else result | {"by": {"column": self.by, "groups": _by_group(scores, self)}}


def evaluate_run(run: Path, **where: Any) -> dict[str, Any]:
    """The metrics of a run's model on the rows that `evaluation_rows` finds. Raises as that.

    Returns:
        `step` of the checkpoint, and what the trainer's evaluation reports: of the run's evaluation data and the
        same step the same numbers. `not_finite`: the number of predictions that are not finite, if there are any.
    """
    return evaluation_rows(run, **where).evaluate()


@advising("allowed: --data FILE, wherever the data are now")
def evaluation_rows(
    run: Path,
    *,
    which: Which = "auto",
    split: Side = "eval",
    files: Sequence[Path] = (),
    by: str | None = None,
    amp: Amp | None = None,
    told: Told = lambda _text, _share: None,
    settings: Sequence[str] = (),
) -> EvaluationRows:
    """A run's model and rows: `files`, or else the run's own data.

    Args:
        settings: How CSV files are written, as of `in_dialect`.
        by: A column of the files: `by` of the metrics has those of each of its values, the most frequent first.
        amp: Arithmetic of the dense model; None = that of the job.

    Raises:
        UserError: There is no such run, checkpoint or split.
        DataError: The data cannot be read; of files, while they are scored.
    """
    if split == "test" and not files:
        files = _test_files(run)
    if files:
        trained, values = load_trained(run, which, amp=amp), list[pa.Array]()
        assert trained.labelled_inputs is not None
        inputs = in_dialect(trained.labelled_inputs, files, settings)
        rows = _of_files(inputs, files, told, by, values)
        seen = _trained_on(trained.config.data, files)
        return EvaluationRows(trained, rows, None, lambda _text, _share: None, by, values, seen)
    if by is not None:
        allowed = "with --data FILE" if split == "test" else "with --data FILE, or --split test"
        raise UserError(f"--by {by}: needs files; allowed: {allowed}")
    if settings:
        raise UserError(f"--set {settings[0]}: needs files; allowed: with --data FILE")
    trained, dataset = _with_data(run, which, split, told, amp)
    most = None if split == "test" else trained.config.eval.max_samples
    return EvaluationRows(trained, [dataset], most, told, seen="these rows" if split == "train" else "")


def metrics_on(trained: Trained, dataset: Dataset, told: Told) -> dict[str, Any]:
    """The metrics of a model on the first `eval.max_samples` samples of data."""
    return EvaluationRows(trained, [dataset], trained.config.eval.max_samples, told).scores().metrics()


def data_of(config: JobConfig, split: Side, told: Told, record: SplitRecord | None = None) -> Dataset | None:
    """A job's own data, by name; None = it has no evaluation data. `record`: how training parted them; files that
    changed since are parted at its borders. Raises DataError."""
    data = open_data(config.data, seed=config.seed, progress=told, items=config.items)
    if record is not None and record.borders and (data.inputs or {}).get("split") != record.model_dump(mode="json"):
        parted = config.data.model_copy(update={"split": record})
        data = open_data(parted, seed=config.seed, progress=told, items=config.items)
    return {"train": data.train, "eval": data.eval, "test": data.test}[split]


def _not_finite(values_NT: Floats) -> int:
    return int(np.count_nonzero(~np.isfinite(values_NT)))


def _by_group(scores: EvaluationScores, rows: EvaluationRows) -> list[dict[str, Any]]:
    """`value` and the metrics of each value, the most frequent first."""
    encoded = pa.concat_arrays(rows.values or [pa.array([], pa.large_string())]).dictionary_encode("encode")
    index_N = np.asarray(encoded.indices)
    texts = encoded.dictionary.cast(pa.large_binary()).to_pylist()
    groups = [text if text is None else text.decode(errors="backslashreplace") for text in texts]
    order_N = np.argsort(index_N, kind="stable")
    bounds = np.searchsorted(index_N[order_N], np.arange(len(groups) + 1))
    found = [{"value": value} | scores.metrics(order_N[bounds[g] : bounds[g + 1]]) for g, value in enumerate(groups)]
    return sorted(found, key=lambda group: -int(group["samples"]))


def _test_files(run: Path) -> list[Path]:
    data = config_of(run).data
    if data.split is not None and data.split.test:
        return []
    if not data.test:
        raise UserError(f"{run}: the job has no data.test; allowed: --data FILE, or --split eval")
    return own_files(data, "test")


def _trained_on(data: DataConfig, files: Sequence[Path]) -> str:
    """The files that are training files of the job, in words; "" = none, or those are gone."""
    own = set[Path]()
    with contextlib.suppress(DataError, ConfigError):  # the source may have none
        own = {path.resolve() for path in own_files(data, "train")}
    seen = [path.name for path in files if path.resolve() in own]
    return f"rows of {seen[0]}{f' and {len(seen) - 1} more' if seen[1:] else ''}" if seen else ""


def _of_files(
    raw: Inputs, files: Sequence[Path], told: Told, by: str | None, values: list[pa.Array]
) -> Iterator[Dataset]:
    """The labelled rows, chunk by chunk. Adds their column `by` to `values`."""
    inputs = weigh(files, raw)
    extra = [name for name in (*inputs.layout.label_columns, inputs.layout.weight, by) if name is not None]
    for whole in chunks_of_files(files, raw, told, extra=extra):
        chunk, label_N = inputs.labelled(whole)
        if len(chunk):
            if by is not None:
                values.append(as_texts(chunk.column(by), "for --by a column with one value a row"))
            yield inputs.samples(chunk, label_N)


def _with_data(run: Path, which: Which, split: Side, told: Told, amp: Amp | None) -> tuple[Trained, Dataset]:
    if is_export(run):
        raise UserError(f"{run}: an export has no data of its own; allowed: --data FILE")
    config = config_of(run)
    checkpoint = checkpoint_of(config, run, which)
    inputs = inputs_of(checkpoint)
    dataset = data_of(continuing(config, checkpoint), split, told, None if inputs is None else inputs.fitted.split)
    if dataset is None:
        raise UserError(f"{run}: the job has no evaluation data; allowed: --data FILE, or --split train")
    return trained_of_checkpoint(computing_in(config, amp), checkpoint, dataset.schema, inputs, run=run), dataset

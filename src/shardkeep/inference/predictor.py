"""Predictor: scores samples in memory with a trained model. What `shardkeep.load` returns."""

# N = samples, T = labels, D = embedding dim

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from shardkeep.base.arrays import Floats
from shardkeep.base.errors import DataError, UserError
from shardkeep.base.files import local
from shardkeep.inference.export.manifest import is_export
from shardkeep.inference.frames import chunks_of, ids_of
from shardkeep.inference.loading import load_trained
from shardkeep.inference.trained import Trained
from shardkeep.run.trained import Which
from shardkeep.workers.config import Amp
from shardkeep.workers.data.fitting.inputs import Inputs
from shardkeep.workers.data.samples import batches
from shardkeep.workers.embeddings.unseen import Counts, Unseen


class Predictor:
    """A trained model in this process. Needs neither servers nor the training data.

    Scores equal those of the trainer's evaluation bit for bit on the same type of CPU, with `amp: off`.
    """

    def __init__(self, trained: Trained, path: Path | None = None) -> None:
        """`path`: the folder of a run or an export that has the model."""
        self._trained = trained
        self._path = path
        self._unseen = Unseen(trained.schema)

    @classmethod
    def load(
        cls, path: str | Path, model: Which = "auto", *, verify: bool = False, amp: Amp | None = None
    ) -> Predictor:
        """Loads the model of a run or an export. `shardkeep.load` is the same.

        Args:
            path: The run folder, of a job that may still be running, or the folder of `shardkeep export`.
            model: Of a run: "last" = the newest checkpoint, "best" = that of the best evaluation, or the step of one;
                "auto" = the best where early stopping found one, and else the last.
            verify: Of an export: read all of its files and compare their checksums first.
            amp: Arithmetic of the dense model, as `tower.amp`: "bf16" is faster on CPUs that compute in it and changes
                scores in the third digit; None = that of the job.

        Raises:
            UserError: There is no such run, checkpoint or export.
            CheckpointError: A file is damaged.
        """
        return cls(load_trained(Path(local(path)), model, verify=verify, amp=amp), Path(path).absolute())

    def __reduce__(self) -> tuple[Callable[[Path, int, Amp], Predictor], tuple[Path, int, Amp]]:
        if self._path is None:
            raise TypeError("this predictor cannot be pickled: its model is in no folder that `shardkeep.load` takes")
        return _again, (self._path, self.step, self._trained.config.tower.amp)

    @property
    def step(self) -> int:
        """The training step of the model's checkpoint."""
        return self._trained.step

    @property
    def module(self) -> nn.Module:
        """The dense model, in eval mode. It takes dense columns (B, I) and a dict of pooled rows (B, D)."""
        return self._trained.dense.model

    @property
    def columns(self) -> list[str]:
        """The columns that `predict` reads."""
        return [] if self._trained.inputs is None else self._trained.inputs.columns()

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the scores, a column each: `score`, or `score_LABEL` and `score_LABEL_given_BEFORE`; of a retrieval
        model `items` and `scores`."""
        return tuple(self._trained.outputs)

    @property
    def trained(self) -> Trained:
        """The model with its rows, for servers."""
        return self._trained

    @property
    def inputs(self) -> Inputs:
        """How raw columns become inputs."""
        assert self._trained.inputs is not None  # `load` refuses a run without
        return self._trained.inputs

    @property
    def unseen(self) -> Counts:
        """By feature: values that `predict` met without a row, and all values. One thread at a time counts exactly."""
        return self._unseen.counts()

    def predict(self, data: object) -> Floats:
        """Scores float32 (N,), or for a model of several labels (N, P) with a column for each of `outputs`, in the
        order of the samples: probabilities, or values if the labels are numbers.

        Args:
            data: A pandas DataFrame, a dict of columns, or a pyarrow Table with the columns that the model reads, as
                they were in the training files. A label is not needed; other columns are ignored. Ids that training
                did not see have their initial values.

        Raises:
            DataError: A column is missing or has a value of the wrong type.
        """
        inputs = self.inputs
        if self._trained.sides is not None:
            raise UserError(f"model.name: {self._trained.config.model.name} finds items; allowed: top(data, k)")
        scores = [
            self._trained.scores(self._trained.logits(batch, self._unseen))
            for chunk in chunks_of(data, inputs)
            for batch in batches(inputs.samples(chunk), self._trained.blocks.size)
        ]
        num_scores = len(self.outputs)
        scores_NP: Floats = np.concatenate(scores) if scores else np.empty((0, num_scores), np.float32)
        return scores_NP[:, 0] if num_scores == 1 else scores_NP

    def top(self, data: object, k: int) -> dict[str, list[list[Any]]]:
        """The K best items of each sample, in the order of the samples, of a retrieval model: two columns that a
        DataFrame takes.

        Args:
            data: As of `predict`, with the columns that users have.

        Returns:
            `items`, named as in the training files, the best one first, and `scores`, their similarities. With
            `eval.exclude_seen` they lack what a sample has seen, and a list may be shorter.

        Raises:
            UserError: The model finds no items, or fewer than K.
            DataError: As of `predict`.
        """
        inputs, finder = self.inputs, self._trained.finder
        finder.check(k, key="k:")
        found: dict[str, list[list[Any]]] = {name: [] for name in self.outputs}
        for chunk in chunks_of(data, inputs):
            for batch in batches(inputs.samples(chunk), self._trained.blocks.size):
                best = finder.top(self._trained.logits(batch, self._unseen), batch, k)
                for name, lists in finder.named(best).to_pydict().items():
                    found[name] += lists
        return found

    def vectors(self, data: object) -> Floats:
        """The vectors of samples of a retrieval model, float32 (N, E): their products with the vectors of an export's
        items.parquet are the scores, for an index of your own. Raises as `top`."""
        width = self._trained.finder.index.vectors_ME.shape[1]
        found = [
            self._trained.logits(batch, self._unseen)
            for chunk in chunks_of(data, self.inputs)
            for batch in batches(self.inputs.samples(chunk), self._trained.blocks.size)
        ]
        return np.concatenate([np.empty((0, width), np.float32), *found])

    def rows(self, table: str, ids: object) -> Floats:
        """Rows float32 (N, D) of a table.

        Args:
            ids: In one dimension: whole numbers as `shardkeep tables export` writes them, or texts as in the data. One
                that training did not see has its initial value.

        Raises:
            UserError: The model has no such table.
            DataError: The ids are neither whole numbers nor texts that the table can have.
        """
        found = np.asarray(ids)
        if found.ndim != 1:
            raise DataError(f"ids are {found.dtype} {found.shape}; allowed: whole numbers or texts, in one dimension")
        if found.dtype.kind in "iu":
            return self._trained.rows(table, found.astype(np.int64, copy=False))
        if found.dtype.kind not in "USO" or not all(isinstance(text, str | bytes) for text in found.tolist()):
            raise DataError(f"ids are {found.dtype}; allowed: whole numbers or texts")
        inputs = self.inputs
        name = next((c.name for c in inputs.layout.schema.looked_up if c.table == table), "")
        kind = inputs.fitted.kinds.get(name) if name else "numbers"
        ids_N = ids_of(ids, kind, inputs.layout.rules(name))
        return self._trained.rows(table, ids_N)

    def __repr__(self) -> str:
        config = self._trained.config
        return f"Predictor({config.model.name}, step {self.step}, columns: {', '.join(self.columns)})"


load = Predictor.load


def _again(path: Path, step: int, amp: Amp) -> Predictor:
    """The model of a predictor that was pickled. Raises UserError where the folder has it no longer."""
    predictor = load(path, "auto" if is_export(path) else step, amp=amp)
    if predictor.step != step:
        raise UserError(f"{path}: holds the model of step {predictor.step}; the pickled predictor had that of {step}")
    return predictor

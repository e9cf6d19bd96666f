"""Tasks of the synthetic stream: three labels of which each happens only after the one before it.

B = rows asked for, T = labels of the job
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shardkeep.base.arrays import Float64s, Ints
from shardkeep.base.errors import ConfigError
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.schema import Schema
from shardkeep.workers.data.sources.synthetic.clicks import Clicks
from shardkeep.workers.data_config import SyntheticConfig, TaskColumn

CHAIN = ("clicked", "bought", "returned")
BIASES = (1.0, 1.0, 1.4)
"""Added to the logit of each, which is that of a sample where the one before it has happened: a half happens."""
SHARE = math.sqrt(0.5)
"""Of the teacher that all labels share in a logit, and of the label's own: half of the variance each."""
MASKED = 0.2
"""Share of the samples that do not have the last label."""
_DEFAULT = (
    TaskColumn(column="clicked"),
    TaskColumn(column="bought", after="clicked"),
    TaskColumn(column="returned", after="bought", missing="mask"),
)


class Chain:
    """Makes samples with the columns of `Clicks`, whose teacher is that of all labels. Each label has one of its own
    too. A label is 0 where the one before it is 0.

    Args:
        labels: The job's; none = all three, each after the one before it.

    Raises:
        ConfigError: labels that the stream does not have.
    """

    def __init__(
        self, labels: Sequence[TaskColumn], config: SyntheticConfig, teacher_key: np.uint64, sample_key: np.uint64
    ) -> None:
        tasks = tuple(labels) or _DEFAULT
        for task in tasks:
            _check(task)
        self._shared = Clicks(config, teacher_key, sample_key)
        self._own = [Clicks(config, teacher_key ^ np.uint64((t + 1) << 40), sample_key) for t in range(len(CHAIN))]
        self._key = sample_key
        names = tuple(task.column for task in tasks)
        self.schema = Schema(self._shared.schema.dense, self._shared.schema.features, names, tasks=tasks)

    def make(self, rows_B: Ints) -> tuple[Batch, Float64s]:
        """The samples `rows_B`, and float64 (B, T) the logit of each label over the samples that may have it."""
        from shardkeep.workers.data.sources.synthetic.synthetic_kernels import draw_chain

        batch, shared_B = self._shared.make(rows_B)
        own_BC = np.stack([maker.make(rows_B)[1] for maker in self._own], axis=1)
        logit_BC = SHARE * (shared_B[:, None] + own_BC) + np.array(BIASES)
        drawn_BC = np.empty(logit_BC.shape, np.float32)
        draw_chain(self._key, rows_B, logit_BC, MASKED, drawn_BC)
        chance_BC = -np.logaddexp(0.0, -logit_BC)
        label_BT = np.empty((len(rows_B), len(self.schema.tasks)), np.float32)
        joint_BT = np.empty(label_BT.shape)
        for t, task in enumerate(self.schema.tasks):
            end, first = CHAIN.index(task.column), 0
            label_BT[:, t] = drawn_BC[:, end]
            if task.given is not None:
                first = CHAIN.index(task.given) + 1
                label_BT[drawn_BC[:, first - 1] != 1.0, t] = np.nan
            chance_B = chance_BC[:, first : end + 1].sum(axis=1)
            joint_BT[:, t] = chance_B - np.log(-np.expm1(chance_B))
        return Batch(batch.dense_BI, batch.ids, label_BT), joint_BT


def _check(task: TaskColumn) -> None:
    """Raises ConfigError for a label that is none of the chain, or is not drawn so."""
    where = f"data.labels: {task.column}"
    if task.column not in CHAIN:
        raise ConfigError(f"{where} is no label of task: tasks; allowed: {', '.join(CHAIN)}")
    if task.positive is not None or task.objective.of_numbers:
        raise ConfigError(f"{where} is 0 or 1; allowed: loss: bce, and no positive")
    before = task.after or task.given
    if before is not None and CHAIN.index(before) >= CHAIN.index(task.column):
        raise ConfigError(f"{where}: happens before {before}; allowed: after or given a label before it")
    if task.column == CHAIN[-1] and task.missing != "mask":
        raise ConfigError(f"{where}: a part of the samples does not have it; allowed: missing: mask")

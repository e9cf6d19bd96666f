"""Rules: the settings that `init` chooses by rows, distinct values and cores. Each is one line of `RULES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Size:
    """What the rules go by. `table_rows`: distinct values of all categories, about. `memory_bytes`: those of the
    machine. `ordered`: the rows are sorted by time. `metric`: what chooses the best model. `trained`: the share of the
    rows that no split holds out. `attends`: each history has values of a feature."""

    rows: int
    table_rows: int
    cores: int
    memory_bytes: int
    ordered: bool
    metric: str = "auc"
    trained: float = 0.8
    attends: bool = False

    @property
    def dim(self) -> int:
        """Values per row of a table."""
        return 8 if self.rows < 100_000 else 16

    @property
    def one_process(self) -> bool:
        """Whether one process can hold the tables: values, one optimizer slot and index, twice while they grow."""
        return self.table_rows * (4 * self.dim + 28) * 2 < self.memory_bytes / 2

    @property
    def regular(self) -> bool:
        """Whether the tower is normed and drops units: enough rows, and not so many that one epoch does."""
        return 100_000 <= self.rows < 1_000_000

    @property
    def all_rows_decay(self) -> bool:
        """Whether each step may decay all rows: few rows, in no order of time."""
        return self.table_rows <= 100_000 and not self.ordered

    @property
    def batch(self) -> int:
        """Samples per step: about 300 steps an epoch, from 100,000 rows on 150, within 128 and 2,048."""
        steps = 300 if self.rows < 100_000 else 150
        return min(2048, max(128, 1 << max(0, (self.rows // steps).bit_length() - 1)))

    @property
    def epoch_steps(self) -> int:
        """Steps of an epoch."""
        return max(1, round(self.rows * self.trained) // (self.batch * (1 if self.one_process else self.cores)))

    @property
    def eval_steps(self) -> int:
        """Steps between two evaluations: five an epoch, but of few rows no more than one in ten steps."""
        return max(10, -(-self.epoch_steps // 5))


LEARN = 500
"""Steps of patience. 5,000 rows with a history: .521 with 35, .651 with 500, whose best model is of step 320."""
DECAY = {"weight_decay": 0.001, "weight_decay_on": "table"}
Rule = tuple[str, Callable[[Size], Any], str]
"""A key, its value (None = left out), and what the file says of it."""
# The measurement behind a rule stands above it, and where there is none. Adult: 32,561 rows; news clicks: 1.7 M rows by
# time; two cores. Each is one run with one seed unless it says more: on adult, a seed moves AUC by 0.003.
RULES: tuple[Rule, ...] = (
    # News clicks: 19 s in one process with a small tower, 72 s in five with [512, 256]; neither was measured alone. Not
    # measured: the numbers of processes where tables do not fit.
    ("servers", lambda s: 0 if s.one_process else max(1, s.cores // 4), "0 = all in one process: the tables fit"),
    ("workers", lambda s: 1 if s.one_process else s.cores, ""),
    # One more thread beside other work: 4,000 samples/s instead of 122,000. Not measured: idle cores, large towers.
    ("threads", lambda s: 1, "auto = all cores, if nothing else runs here"),
    # Adult and census, three seeds: dcn_v2 .9302 and .9566, deepfm and dlrm .9293 to .9302 and .9557: no clear best.
    ("model.name", lambda s: "dcn_v2", "or dnn, deepfm, dlrm: docs/guide/models.md"),
    # News clicks: a small tower .7326, [512, 256] .7307, in other processes, too. Not measured: 100,000, and dim.
    ("model.hidden", lambda s: [64, 32] if s.rows < 100_000 else [128, 64], ""),
    # Planted and frappe of benchmarks/public_sets.py, 200,000 rows, with the decay below: .8639 and .9783 with both,
    # .8637 and .9773 without. Census, 80,000 rows, lost .004 with dcn_v2. Not measured: more than 200,000 rows.
    ("model.norm", lambda s: "batch" if s.regular else None, "or none"),
    ("model.dropout", lambda s: 0.2 if s.regular else None, ""),
    ("model.encoder", lambda s: {"name": "din"} if s.attends else None, "weighs a history's entries by the item"),
    ("tables.default.dim", lambda s: s.dim, "values per category; more rows allow more"),
    # With and without: planted .8637 and .8575, frappe .9773 and .9730, census .9573 and .9565, adult .9304 and .9299.
    ("tables.default.optimizer", lambda s: DECAY if s.all_rows_decay else None, "L2 of all rows at each step"),
    # Twice as large: frappe .9810 and .9800 in half of the steps, planted .8640 and .8638; of fewer rows MovieLens 100K
    # .7159 and .7193, census .9582 and .9589, adult .9295 and .9300. Above 200,000 rows as examples/demo.yaml has.
    ("train.batch_size", lambda s: s.batch, ""),
    # A public set of 202,000 rows: .954 after one epoch, .977 after 20 with early stopping. Not measured: other rows.
    ("train.epochs", lambda s: max(2, min(20, 20_000_000 // max(1, s.rows)), min(100, -(-4 * LEARN // s.epoch_steps))),
     "at most; early_stopping ends before"),
    # Not measured: patience of an epoch. News clicks: in one pass the training loss fell to .558, that of evaluation to
    # .654, so that the best model may be one of the first epoch.
    ("train.early_stopping", lambda s: {"metric": s.metric, "patience": max(5, -(-LEARN // s.eval_steps))},
     "evaluations without a better one"),
    # News clicks: .7398 as stored, by time; .7326 shuffled. No other set was tried.
    ("train.order", lambda s: "stored" if s.ordered else None, "the rows are sorted by time; or shuffled"),
    # Not measured: as many as early stopping's patience.
    ("eval.every_steps", lambda s: s.eval_steps, "five times an epoch, at most"),
)  # fmt: skip

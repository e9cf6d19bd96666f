"""Settings of the split: which rows of the training files are held out for evaluation and test."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from shardkeep.base.settings import Settings
from shardkeep.workers.label_config import ColumnName

Share = Annotated[float, Field(ge=0.0, lt=1.0)]
"""Of all rows."""
TIME, RANDOM = "time", "random"
"""What `by` means besides a column."""


class SplitConfig(Settings):
    """Rows of the training files that are held out. Equal for the same table in any form and order of files."""

    by: ColumnName
    """time = the newest rows by `data.time` are for the test, the next newest for evaluation, equal times on one side;
    random = by a seeded hash of a row's values; or a column, such as the user: by a seeded hash of its value, so that
    all rows of one value are on one side."""
    eval: Share = 0.1
    """Share of the rows that evaluation visits."""
    test: Share = 0.1
    """Share of the rows that are scored once, after training (`eval.test`)."""

    @model_validator(mode="after")
    def _rows_are_left(self) -> SplitConfig:
        if not 0.0 < self.eval + self.test < 1.0:
            raise ValueError(f"eval: {self.eval:g} and test: {self.test:g}; allowed: a sum above 0 and below 1")
        return self


class SplitRecord(SplitConfig):
    """How the rows of a model were split."""

    seed: int
    borders: tuple[float | None, float | None] | None = None
    """By time: the oldest times of evaluation and of the test; None = not known yet, or no such rows."""

    def __str__(self) -> str:
        """The setting, for messages."""
        return f"data.split: {{by: {self.by}, eval: {self.eval:g}, test: {self.test:g}}}"

"""What one table's own compression changes in the job's settings. Data only; loads no codec.

What acts across tables stays of the job: one pool of unsent gradients per worker, and selection of single values.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardkeep.compression.config import (
    CompressionConfig,
    PullConfig,
    PushConfig,
    TableCompressionConfig,
    TablePullConfig,
    TablePushConfig,
    without_effect,
)
from shardkeep.compression.values.registry import Scale, ValueFormat


@dataclass(frozen=True, slots=True)
class Numbers:
    """A number format with its scale."""

    values: ValueFormat
    scale: Scale | None = None


@dataclass(frozen=True, slots=True)
class TablePush:
    """How the gradients of one table are sent."""

    numbers: Numbers
    keep: float
    """The share that is sent, of rows or of single values."""
    second_moment: bool = False
    whole: bool = False
    """Whether the table asks for all its rows in fp32: nothing of them waits in a pool."""


def push_of(table: TableCompressionConfig | None, job: PushConfig, *, frozen: bool = False) -> TablePush:
    """How a table's gradients are sent. `frozen`: they are not; then no pool has room for them."""
    own = TablePushConfig() if table is None else table.push
    numbers = _numbers(own, job)
    keep = job.keep if own.keep_rows is None else own.keep_rows
    whole = frozen or (own != TablePushConfig() and keep == 1.0 and numbers.values == "fp32")
    return TablePush(numbers, keep, job.second_moment and not whole, whole)


def pull_of(table: TableCompressionConfig | None, job: PullConfig) -> Numbers:
    """How a table's rows are sent to workers."""
    own = TablePullConfig() if table is None else table.pull
    return _numbers(own, job)


def check_table(name: str, table: TableCompressionConfig, job: CompressionConfig) -> None:
    """Raises ValueError, which names the setting, where a table's own settings do not go with the job's."""
    if job.push.keep_values is not None and table.push != TablePushConfig():
        raise ValueError(
            f"tables.{name}.compression.push: with compression.push.keep_values: {job.push.keep_values:g}, which "
            "selects single values in one format for all tables; allowed: no keep_values, or no push of a table"
        )
    if push_of(table, job.push).keep < 1.0 and not job.push.pool_rows:
        raise ValueError(
            f"tables.{name}.compression.push.keep_rows: {table.push.keep_rows:g} drops gradients without "
            "compression.push.pool_rows; allowed: pool_rows above 0, or keep_rows: 1"
        )
    push, pull = push_of(table, job.push).numbers, pull_of(table, job.pull)
    for key, own, numbers in (("push", table.push, push), ("pull", table.pull, pull)):
        try:
            without_effect(numbers.values, scale=own.scale)
        except ValueError as error:
            raise ValueError(f"tables.{name}.compression.{key}.{error}") from error


def _numbers(own: TablePushConfig | TablePullConfig, job: PushConfig | PullConfig) -> Numbers:
    """A table's `values` come with its own scale; without `values`, each one is the job's unless set."""
    if own.values is not None:
        return Numbers(own.values, own.scale)
    return Numbers(job.values, own.scale or job.scale)

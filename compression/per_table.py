"""What compression of one table's own changes in the job's: nothing is compressed, or it is as a recipe says.

Data only; loads no codec. What acts across tables stays of the job: its pool of unsent gradients, second moments,
warm-up and cache.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from shardkeep.compression.config import CompressionConfig, PullConfig, PushConfig
from shardkeep.compression.recipes import RECIPES
from shardkeep.compression.values.registry import Scale, Values

_RECIPES: Mapping[str, Any] = {name: recipe.settings["compression"] for name, recipe in RECIPES.items()}
_OF_TABLES = {"none": {}} | {n: own for n, own in _RECIPES.items() if "select" not in own.get("push", {})}
"""Recipes that one table can follow: those that send whole rows."""

if TYPE_CHECKING:
    TableCompression = str
else:
    TableCompression = Literal[tuple(_OF_TABLES)]  # what the config takes


@dataclass(frozen=True, slots=True)
class TablePush:
    """How the gradients of one table are sent."""

    values: Values
    scale: Scale | None
    keep: float
    """The share that is sent, of rows or of single values."""
    second_moment: bool = False
    whole: bool = False
    """Whether the table asks for all its rows in fp32: nothing of them waits in a pool."""


def push_of(table: str | None, job: PushConfig, *, frozen: bool = False) -> TablePush:
    """How a table's gradients are sent. `table`: its own recipe, None = as in the job. `frozen`: they are not; then no
    pool has room for them."""
    own = job if table is None else _recipe(table).push
    whole = frozen or (table is not None and own.keep == 1.0 and own.values == "fp32")
    return TablePush(own.values, own.scale, own.keep, job.second_moment and not whole, whole)


def pull_of(table: str | None, job: PullConfig) -> PullConfig:
    """How a table's rows are sent to workers: `values` and `scale`."""
    return job if table is None else _recipe(table).pull


def check_table(name: str, table: str, job: PushConfig) -> None:
    """Raises ValueError, which names the setting, where a table's own recipe does not go with the job's pushes."""
    if job.select != "rows":
        raise ValueError(
            f"tables.{name}.compression: {table} with compression.push.select: {job.select}, which selects of all "
            "tables; allowed: select: rows, or no compression of a table"
        )
    if (keep := push_of(table, job).keep) < 1.0 and not job.pool_rows:
        raise ValueError(
            f"tables.{name}.compression: {table} sends {keep:g} of the rows and needs compression.push.pool_rows for "
            "the others; allowed: pool_rows above 0, or a recipe that sends all rows"
        )


@functools.cache
def _recipe(name: str) -> CompressionConfig:
    return CompressionConfig.model_validate(_OF_TABLES[name])

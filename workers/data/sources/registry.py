"""A job's samples from its config: the registry of sources, and the way in.

The launcher opens them before any process starts, so that the user's mistakes end it, and each worker does.
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from shardkeep.base.errors import ConfigError
from shardkeep.workers.data.samples import Data, Dataset, Progress
from shardkeep.workers.data.schema import Schema, features_of
from shardkeep.workers.data.sources.column_patterns import named_columns
from shardkeep.workers.data_config import DataConfig


class Source(Protocol):
    """Opens the samples of one kind of source."""

    def __call__(self, config: DataConfig, *, seed: int, progress: Progress | None) -> Data: ...


SOURCES: dict[str, str] = {
    "csv": "csv_files:open_csv",
    "parquet": "parquet_files:open_parquet",
    "criteo": "criteo:open_criteo",
    "synthetic": "synthetic:open_synthetic",
}
"""Source -> module and function. A job loads its own source alone: pyarrow takes every role 0.25 s."""

_KERNELS: dict[str, tuple[str, ...]] = {"synthetic": ("shardkeep.workers.data.sources.synthetic_kernels",)}
_CACHE_KERNELS = ("shardkeep.workers.data.gather_kernels",)


def kernels_of_source(name: str) -> tuple[str, ...]:
    """The modules of kernels that draw a source's samples."""
    return _KERNELS.get(name, _CACHE_KERNELS) if name else ()


def source_named(name: str) -> Source:
    """The function that opens a built-in source, or the user's own for module:function."""
    module, _, function = SOURCES.get(name, "custom:open_custom").partition(":")
    return cast(Source, getattr(importlib.import_module(f"shardkeep.workers.data.sources.{module}"), function))


def tables_of_files(config: DataConfig) -> tuple[str, ...]:
    """The tables that features of csv or parquet files use, by the config and the header of the first file; () = known
    when the source is opened. Raises DataError."""
    if config.source not in ("csv", "parquet"):
        return ()
    module = importlib.import_module(f"shardkeep.workers.data.sources.{config.source}_files")
    return Schema((), features_of(named_columns(config, lambda: module.header(config)).sparse)).tables()


def check_present(config: DataConfig) -> None:
    """Raises ConfigError where the config names no data."""
    if not config.source:
        raise ConfigError(
            "data: is missing; allowed: files, as in data: {train: [clicks.csv], label: clicked, sparse: [user]}; "
            "for a trial: data: {source: synthetic}"
        )


def open_data(config: DataConfig, *, seed: int, progress: Progress | None = None) -> Data:
    """The samples that `config` describes; file sources are converted to the cache first where need be.

    Args:
        config: the job's `data`; `root` must be resolved.
        seed: the job's seed; decides `eval_fraction`'s split and the synthetic stream.
        progress: told what is done, and the share of it in [0, 1], from this thread.

    Raises:
        DataError: a file, row, column or label is wrong; one line that names it.
        ConfigError: a setting is wrong for this source.
    """
    check_present(config)
    return source_named(config.source)(config, seed=seed, progress=progress)


__all__ = ["SOURCES", "Data", "Dataset", "Progress", "kernels_of_source", "open_data", "tables_of_files"]

"""A job's samples from its config: the registry of sources, and the two ways in.

`prepare_data` before any process starts, so that the user's mistakes end the launcher; `open_data` in every worker.
"""

from __future__ import annotations

from typing import Protocol

from shardkeep.base.errors import ConfigError
from shardkeep.workers.config import DataConfig
from shardkeep.workers.data.criteo import open_criteo
from shardkeep.workers.data.csv_files import open_csv
from shardkeep.workers.data.custom import open_custom
from shardkeep.workers.data.parquet_files import open_parquet
from shardkeep.workers.data.samples import Data, Dataset, Progress
from shardkeep.workers.data.synthetic import open_synthetic


class Source(Protocol):
    """Opens the samples of one kind of source."""

    def __call__(self, config: DataConfig, *, seed: int, progress: Progress | None) -> Data: ...


SOURCES: dict[str, Source] = {
    "csv": open_csv,
    "parquet": open_parquet,
    "criteo": open_criteo,
    "synthetic": open_synthetic,
}


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
    if ":" in config.source:
        return open_custom(config, seed=seed, progress=progress)
    if config.source not in SOURCES:
        raise ConfigError(f"data.source: {config.source}; allowed: {', '.join(SOURCES)}, or module:function")
    return SOURCES[config.source](config, seed=seed, progress=progress)


def prepare_data(config: DataConfig, *, seed: int, progress: Progress | None = None) -> str:
    """Does all the work that `open_data` would do once per machine; returns one line about the samples.

    Raises what `open_data` raises. Blocks while files are converted.
    """
    return open_data(config, seed=seed, progress=progress).describe()


__all__ = ["SOURCES", "Data", "Dataset", "Progress", "open_data", "prepare_data"]

"""A job's samples from its config: the way in to the sources that workers/data_config.py names.

The launcher opens them before any process starts, so that the user's mistakes end it, and each worker does.
"""

from __future__ import annotations

from collections.abc import Callable

from shardkeep.base.errors import ConfigError
from shardkeep.workers.data.samples import Data, Progress
from shardkeep.workers.data.schema import Schema, schema_of
from shardkeep.workers.data.sources.column_patterns import named_columns
from shardkeep.workers.data_config import FORMS, OWN_SOURCE, SOURCES, DataConfig
from shardkeep.workers.model_config import RetrievalSettings


def kernels_of_source(name: str) -> tuple[str, ...]:
    """The modules of kernels that draw a source's samples."""
    return SOURCES.get(name, OWN_SOURCE).kernels if name else ()


def source_named(name: str) -> Callable[..., Data]:
    """The function that opens a built-in source, or the user's own for module:function."""
    source: Callable[..., Data] = SOURCES.get(name, OWN_SOURCE).load()
    return source


def columns_of_files(config: DataConfig) -> Schema | None:
    """The columns of files, by the config and the names in the files; None = known when the source is opened. Raises
    DataError."""
    if config.source not in FORMS:
        return None
    from shardkeep.workers.data.sources.forms import header  # here: pyarrow

    named = named_columns(config, lambda: header(config))
    return schema_of(named.dense, named.sparse, config.sequences)


def check_present(config: DataConfig) -> None:
    """Raises ConfigError where the config names no data."""
    if not config.source:
        raise ConfigError(
            "data: is missing; allowed: files, as in data: {train: [clicks.csv], label: clicked, sparse: [user]}; "
            "for a trial: data: {source: synthetic}"
        )


def open_data(
    config: DataConfig, *, seed: int, progress: Progress | None = None, items: RetrievalSettings | None = None
) -> Data:
    """The samples that `config` describes; file sources are converted to the cache first where need be.

    Args:
        config: the job's `data`; `root` must be resolved.
        seed: the job's seed; decides the split and the synthetic stream.
        progress: told what is done, and the share of it in [0, 1], from this thread.
        items: the model of a retrieval job: its samples need no label, and come with a catalogue.

    Raises:
        DataError: a file, row, column or label is wrong; one line that names it.
        ConfigError: a setting is wrong for this source.
    """
    check_present(config)
    return source_named(config.source)(config, seed=seed, progress=progress, items=items)

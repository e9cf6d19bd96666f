"""The source `criteo`: click logs as Criteo published them, Kaggle's train.txt and the days of the 1 TB set.

Tab-separated without a header: label, 13 integer columns I1..I13, 26 columns of hexadecimal texts C1..C26.
"""

from __future__ import annotations

from shardkeep.base.errors import ConfigError
from shardkeep.workers.data.conversion.layout import layout_of
from shardkeep.workers.data.samples import Data, Progress
from shardkeep.workers.data.sources.csv_files import CsvFiles
from shardkeep.workers.data.sources.forms import csv_form
from shardkeep.workers.data.store.opening import open_stored
from shardkeep.workers.data_config import DIALECT, DataConfig, DenseColumn, LabelColumn, SparseColumn, refuse
from shardkeep.workers.model_config import RetrievalSettings

DENSE = tuple(f"I{i}" for i in range(1, 14))
SPARSE = tuple(f"C{i}" for i in range(1, 27))
COLUMNS = ("label", *DENSE, *SPARSE)


def open_criteo(
    config: DataConfig, *, seed: int, progress: Progress | None, items: RetrievalSettings | None = None
) -> Data:
    """The source `criteo`: files or folders of days, plain or gz. `dense` and `sparse` may name fewer columns.

    Dense columns are scaled by log unless told otherwise; a missing one is 0.
    """
    refuse(
        config,
        ("synthetic", "options", *DIALECT, "label", "labels", "weight", "time", "time_format", "sequences", "absent"),
    )
    named = [c.column for c in config.dense] + [c.column for c in config.sparse]
    if wrong := [name for name in named if name not in COLUMNS]:
        raise ConfigError(f"data: criteo has no column {wrong[0]}; it has I1..I13 and C1..C26")
    filled = config.model_copy(
        update={
            "label": LabelColumn(column="label"),
            "dense": config.dense or [DenseColumn(column=name, fill=0.0) for name in DENSE],
            "sparse": config.sparse or [SparseColumn(column=name) for name in SPARSE],
        }
    )
    form = csv_form(CsvFiles("\t", COLUMNS, quote=None))
    layout = layout_of(filled, scale="log")
    return open_stored(config, layout, form, seed=seed, progress=progress, items=items)

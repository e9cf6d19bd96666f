"""The entry of a catalogue: of the training files, the columns of an item, and the part of lists that is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.base.arrays import Ints
from shardkeep.workers.data.cache.entry import Content, FileSet, read_files
from shardkeep.workers.data.cache.obtaining import obtained
from shardkeep.workers.data.catalogue import Catalogue
from shardkeep.workers.data.conversion.inputs import Inputs
from shardkeep.workers.data.items import make_catalogue
from shardkeep.workers.data.samples import Dataset, Progress
from shardkeep.workers.data.sides import Sides
from shardkeep.workers.data_config import DataConfig

FILE = "catalogue.arrow"


def obtain_catalogue(
    config: DataConfig,
    training: FileSet,
    inputs: Inputs,
    dataset: Dataset,
    sides: Sides,
    values_of: Callable[[Ints], pa.Array],
    report: Progress,
) -> Catalogue:
    """The catalogue of the training files, made where the cache has none. `training`: what their entry is made from;
    `values_of`: reads the values of ids in the files. Raises DataError."""
    columns = [*(feature.name for feature in sides.items.features), *sides.items.dense]
    group = sides.predicted
    kept = [] if group is None else [group.ids[0].name, group.max_length, group.newest]
    files = FileSet(training.paths, {**training.settings, "catalogue": [columns, kept]})

    def write(folder: Path) -> Content:
        report("counting items", 0.0)
        catalogue = make_catalogue(dataset, sides, values_of)
        return Content(inputs, {FILE: catalogue.write(folder / FILE)}, {}, 0, (), {})

    return obtained(
        config,
        files,
        lambda folder: read_files(folder, files, lambda _meta, _mapped: Catalogue.read(folder / FILE)),
        write,
        report,
    )

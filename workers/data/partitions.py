"""Partitions: columns in the names of folders, as Hive, Spark and pyarrow write them.

`log/dt=2024-05-01/country=DE/part-0.parquet` has the columns dt and country in each row. All values are texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa  # type: ignore[import-untyped]

MISSING = "__HIVE_DEFAULT_PARTITION__"


def is_partition(folder: Path) -> bool:
    """Whether a folder's name is KEY=VALUE."""
    return folder.name.find("=") > 0


def partition_of(path: Path) -> dict[str, str | None]:
    """The columns in the names of the folders right above a file; None = missing."""
    found: dict[str, str | None] = {}
    for folder in path.parents:
        if not is_partition(folder):
            break
        key, _, value = folder.name.partition("=")
        found[unquote(key)] = None if value == MISSING else unquote(value)
    return found


def place_of(path: Path) -> str:
    """The part of a file's path that stays when its data are moved: its name, behind the folders of its partition."""
    return "/".join(path.parts[-1 - len(partition_of(path)) :])


def columns_of_folders(path: Path, columns: Sequence[str], names: Sequence[str]) -> dict[str, pa.Scalar]:
    """The value of each of `columns` that a file with the columns `names` has only by its folders."""
    found = partition_of(path).items()
    return {key: pa.scalar(value, pa.string()) for key, value in found if key in columns and key not in names}

"""Writes files of data, opens them as a job does, and shows what became of them: rows, or the line that refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.csv as pacsv  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.samples import Data, Dataset
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig


@dataclass(frozen=True)
class Rows:
    """What was read: dense columns, ids (of lists: a list each row), weights and labels, by row."""

    dense: list[list[float]]
    ids: dict[str, list[Any]]
    weights: dict[str, list[Any]]
    labels: list[float]


def write_file(path: Path, content: Any) -> Path:
    """`content`: text, bytes, a table, or the columns of one, which the name's end gives a form."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str | bytes):
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    else:
        table = content if isinstance(content, pa.Table) else pa.table(content)
        (pq.write_table if path.suffix == ".parquet" else pacsv.write_csv)(table, path)
    return path


def opened(folder: Path, files: Mapping[str, Any] = {}, *, seed: int = 0, **settings: Any) -> Data:
    """Writes the files and opens the first of them, or what `train` names. Raises what opening raises.

    Settings are those of `data`, and what `open_data` takes besides: `progress`, `items`, `fitted`.
    """
    for name, content in files.items():
        write_file(folder / name, content)
    more = {name: settings.pop(name) for name in ("progress", "items", "fitted") if name in settings}
    base: dict[str, Any] = {"root": str(folder), "train": next(iter(files), "a.csv"), "label": "y", "scale": "none"}
    if "source" not in settings and files:
        base["source"] = "parquet" if next(iter(files)).endswith(".parquet") else "csv"
    return open_data(DataConfig.model_validate(base | settings), seed=seed, **more)


def batch_of(dataset: Dataset | None) -> Batch:
    assert dataset is not None
    return dataset.gather(np.arange(len(dataset)))


def first_column(dataset: Dataset | None) -> list[float]:
    numbers: list[float] = batch_of(dataset).dense_BI[:, 0].tolist()
    return numbers


def labels_of(data: Data) -> list[float]:
    labels: list[float] = batch_of(data.train).label_BT[:, 0].tolist()
    return labels


def read(folder: Path, files: Mapping[str, Any] = {}, **settings: Any) -> Rows:
    batch = batch_of(opened(folder, files, **settings).train)
    ids, weights = {}, {}
    for name, ragged in batch.ids.items():
        values = ragged.values_N.tolist()
        if ragged.lengths_B is None:
            ids[name] = values
            continue
        ends = np.cumsum(ragged.lengths_B)
        spans = list(zip((ends - ragged.lengths_B).tolist(), ends.tolist(), strict=True))
        ids[name] = [values[a:b] for a, b in spans]
        if ragged.weights_N is not None:
            weights[name] = [ragged.weights_N[a:b].tolist() for a, b in spans]
    return Rows(batch.dense_BI.tolist(), ids, weights, batch.label_BT[:, 0].tolist())


def refusal(folder: Path, files: Mapping[str, Any] = {}, **settings: Any) -> str:
    """The line that refuses the files or the settings."""
    try:
        rows = read(folder, files, **settings)
    except (DataError, ConfigError) as error:
        line = str(error)
        assert "\n" not in line and len(line) < 1000 and error.exit_code == 2, line
        return line
    raise AssertionError(f"nothing was refused: {rows}")


def damaged(content: bytes, number: int, rng: np.random.Generator) -> bytes:
    """The content cut, with a byte flipped, or with bytes put in, at a place by chance: by the number in turn."""
    bad, at = bytearray(content), int(rng.integers(0, len(content)))
    if number % 3 == 0:
        del bad[at:]
    elif number % 3 == 1:
        bad[at] ^= int(rng.integers(1, 256))
    else:
        bad[at:at] = rng.bytes(int(rng.integers(1, 20)))
    return bytes(bad)

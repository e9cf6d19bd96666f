"""Opens one file of data and says what became of it: its rows, or the one line that refuses it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig

LIMIT_S = 90.0  # a file that takes so long is a hang


@dataclass(frozen=True)
class Rows:
    """What was read: dense columns, ids (of lists: a list each row), weights and labels, by row."""

    dense: list[list[float]]
    ids: dict[str, list[Any]]
    weights: dict[str, list[Any]]
    labels: list[float]


def read(folder: Path, files: Mapping[str, bytes], **settings: Any) -> Rows:
    """Writes the files and opens the first of them, or what `train` names. Raises what opening raises."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    base: dict[str, Any] = {
        "source": "parquet" if next(iter(files)).endswith(".parquet") else "csv",
        "root": str(folder),
        "cache": "cache",
        "train": next(iter(files)),
        "label": "y",
        "scale": "none",
    }
    with _limited():
        dataset = open_data(DataConfig.model_validate(base | settings), seed=0).train
    batch = dataset.gather(np.arange(len(dataset)))
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


def refusal(folder: Path, files: Mapping[str, bytes], **settings: Any) -> str:
    """The line that refuses the files; it is one line, and names one of them."""
    try:
        rows = read(folder, files, **settings)
    except (DataError, ConfigError) as error:
        line = str(error)
        assert "\n" not in line and len(line) < 1000 and error.exit_code == 2, line
        return line
    raise AssertionError(f"nothing was refused: {rows}")


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def late(_number: int, _frame: object) -> None:
        raise TimeoutError(f"the file is not read after {LIMIT_S:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

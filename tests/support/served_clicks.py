"""A trained model of clicks, and the columns of its rows in the forms that clients send."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkeep
from shardkeep.inference.protocol.datatypes import Values
from shardkeep.ps.checkpoints.folder import Checkpoints
from tests.support.click_files import COLUMNS, click_job, click_rows, write_csv
from tests.support.once import once
from tests.support.serving import datatype_of

FEATURES = tuple(name for name in COLUMNS if name != "clicked")


def trained(folder: Path, run: str = "run", **changes: Any) -> Path:
    """The run folder, below `folder`, of a job that took a tenth of a second."""
    job = click_job(write_csv(folder / "train.csv", click_rows(500)))
    job["tower"] |= {"optimizer": {"lr": 0.01}}  # so that few steps tell rows apart
    job |= {key: job["data"] | value if key == "data" else value for key, value in changes.items()}
    shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=folder / run, quiet=True)
    return folder / run


def trained_once(folders: pytest.TempPathFactory, **changes: Any) -> Path:
    """As `trained`, once for each config in a test run. Only to be read: all workers and modules share the folder."""
    config = hashlib.sha256(json.dumps(changes, sort_keys=True).encode()).hexdigest()[:16]
    return Path(once(folders, f"clicks-{config}", lambda folder: str(trained(folder, **changes))))


def begun(whole: Path, run: Path) -> list[Path]:
    """Makes a copy of a run as it was before its first checkpoint. Returns the checkpoints, oldest first."""
    shutil.copytree(whole, run, ignore=shutil.ignore_patterns("step-*"))
    return [path for _, path in Checkpoints(whole / "checkpoints").complete()]


def publish(run: Path, *checkpoints: Path) -> None:
    """Adds checkpoints to a run, each by a rename, as a job does."""
    for checkpoint in checkpoints:
        hidden = run / "checkpoints" / f".{checkpoint.name}"
        shutil.copytree(checkpoint, hidden)
        hidden.rename(run / "checkpoints" / checkpoint.name)


def texts(count: int, seed: int = 3) -> dict[str, list[str]]:
    rows = click_rows(count, seed=seed)
    return {name: [row[name] for row in rows] for name in FEATURES}


def as_bytes(columns: dict[str, list[str]]) -> dict[str, Values]:
    return {name: [text.encode() for text in values] for name, values in columns.items()}


def as_typed(columns: dict[str, list[str]]) -> dict[str, Values]:
    """Numbers as numbers, several values as values and lengths."""
    tags = [tag for text in columns["tags"] for tag in text.split("|") if tag]
    return {
        "user": [text.encode() for text in columns["user"]],
        "item": np.array([int(text) for text in columns["item"]], np.int32),
        "tags.values": [tag.encode() for tag in tags],
        "tags.lengths": np.array([len([t for t in text.split("|") if t]) for text in columns["tags"]], np.int32),
        "price": np.array([float(text or "nan") for text in columns["price"]], np.float64),
        "age": np.array([int(text) for text in columns["age"]], np.int64),
    }


def as_json(columns: dict[str, Values]) -> list[dict[str, Any]]:
    """The inputs of a request in plain JSON; null = missing."""
    found = []
    for name, values in columns.items():
        if isinstance(values, list):
            data: list[Any] = [text.decode() for text in values]
        else:
            data = [None if number != number else number for number in values.tolist()]
        found.append({"name": name, "datatype": datatype_of(values), "shape": [len(values)], "data": data})
    return found

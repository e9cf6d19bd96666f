"""A trained model of clicks that most of these tests read. Nobody changes its folder: copy it, or train your own."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardkeep
from shardkeep.inference.export.writing import export_run
from tests.support.served_clicks import trained_once


@pytest.fixture(scope="session")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder. `train.csv` is beside it."""
    return trained_once(tmp_path_factory)


@pytest.fixture(scope="session")
def exported(clicks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of it, which opens much faster."""
    export_run(clicks, path := tmp_path_factory.mktemp("exported") / "clicks")
    return path


@pytest.fixture(scope="session")
def predictor(clicks: Path) -> shardkeep.Predictor:
    return shardkeep.load(clicks)


@pytest.fixture(scope="session")
def increments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint at each of 9 steps; of four in a row three are increments."""
    often = {"checkpoint": {"every_steps": 1, "keep": 1000, "full_every": 4}}
    return trained_once(tmp_path_factory, **often, train={"batch_size": 32, "max_steps": 9})


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_once(tmp_path_factory, data={"dense": ["price"], "sparse": ["user"]})

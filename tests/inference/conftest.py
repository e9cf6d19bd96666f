"""A trained model of clicks that most of these tests read. Nobody changes its folder: copy it, or train your own."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardkeep
from tests.support.served_clicks import trained_once


@pytest.fixture(scope="session")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder. `train.csv`, with 1,500 rows, is beside it."""
    return trained_once(tmp_path_factory)


@pytest.fixture(scope="session")
def predictor(clicks: Path) -> shardkeep.Predictor:
    return shardkeep.load(clicks)


@pytest.fixture(scope="session")
def increments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with 13 checkpoints; of four in a row three are increments."""
    return trained_once(tmp_path_factory, checkpoint={"every_steps": 3, "keep": 1000, "full_every": 4})

"""The plan of a search that most of these tests only read, and a folder for its trials."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.tuning import plan

if TYPE_CHECKING:
    from shardkeep.automl.tune.plan import Plan


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return plan(tmp_path_factory.mktemp("job"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"

"""A searched job that most of these tests only read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.tuning import searched

if TYPE_CHECKING:
    from shardkeep.experiments.tune import SearchedJob


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> SearchedJob:
    return searched(tmp_path_factory.mktemp("job"))

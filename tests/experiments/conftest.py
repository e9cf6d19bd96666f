"""A search that most of these tests only read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.tuning import search

if TYPE_CHECKING:
    from shardkeep.experiments.tune import Search


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Search:
    return search(tmp_path_factory.mktemp("job"))

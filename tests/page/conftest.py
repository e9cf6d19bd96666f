"""What tests of the page share: processes that end with the test, and one Chromium for each module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Chromium, chromium
from tests.support.cluster import Cluster


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as cluster:
        yield cluster

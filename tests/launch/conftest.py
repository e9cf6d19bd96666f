"""For tests of launchers: jobs with stand-ins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.stand_ins import Start


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Start]:
    if sys.platform != "linux":
        pytest.skip("stand-ins are forked")
    from tests.support.stand_ins import jobs_in

    with jobs_in(tmp_path, request.getfixturevalue("stand_ins")) as start:
        yield start

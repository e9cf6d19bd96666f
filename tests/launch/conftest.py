"""For tests of launchers: jobs with stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.stand_ins import Jobs, StandIns


@pytest.fixture
def jobs(tmp_path: Path, stand_ins: StandIns) -> Iterator[Jobs]:
    """Starts jobs of one test, which end with it."""
    from tests.support.stand_ins import jobs_in

    with jobs_in(tmp_path, stand_ins) as jobs:
        yield jobs

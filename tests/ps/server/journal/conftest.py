"""A journal's folder, and a journal that has begun."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardkeep.ps.server.journal.journal import Journal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "server-0" / "journal"


@pytest.fixture
def journal(folder: Path) -> Iterator[Journal]:
    journal = Journal(folder, sync=False)
    yield journal
    journal.close()

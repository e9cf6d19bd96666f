"""For all tests: they leave nothing in the user's own files."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tokens of the tests' jobs."""
    path = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(path))
        yield path


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """The log as it was, after a test that ran the main of a role, which configures it for its process."""
    logger = logging.getLogger("shardkeep")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)

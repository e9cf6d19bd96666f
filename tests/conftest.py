"""For all tests: they leave nothing in the user's own files, and they run in parallel with `-n`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.golden import Golden

PROCESSES = "processes"


def pytest_configure(config: pytest.Config) -> None:
    """Compiles all kernels before the workers of `-n` start: each of them would compile or wait for the others."""
    if not getattr(config.option, "numprocesses", None) or config.option.collectonly:
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the workers: they share the cores
    from shardkeep.base.kernels import compile_kernels, kernel_modules

    compile_kernels(kernel_modules(), lambda: print("compiling kernels", flush=True))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `-n`, tests that start processes run in one worker, and so do the tests of one file: they share fixtures.

    A chaos test shares none, so any worker takes it. The longest tests start first: chaos, processes, whole jobs.
    """
    for item in items:
        group = PROCESSES if item.get_closest_marker(PROCESSES) else item.nodeid.split("::")[0]
        if not item.get_closest_marker("chaos") and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(group))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_turn)


def _turn(item: pytest.Item) -> tuple[int, float]:
    limit = item.get_closest_marker("timeout")
    length_s = float(limit.args[0]) if limit and item.get_closest_marker("chaos") else 0.0
    if item.get_closest_marker(PROCESSES):
        return 0, -length_s
    return (1 if "tests/integration/" in item.nodeid else 2), 0.0


@pytest.fixture(autouse=True, scope="session")
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tokens of the tests' jobs."""
    path = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(path))
        yield path


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """A completed job of real processes, for reading. Its tests are marked `processes`: then it runs once."""
    from tests.support.golden import run_golden  # here, for the controller of `-n`: it imports no torch

    return run_golden(tmp_path_factory.mktemp("golden"))


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """The log as it was, after a test that ran the main of a role, which configures it for its process."""
    logger = logging.getLogger("shardkeep")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)

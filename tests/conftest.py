"""For all tests: they leave nothing in the user's own files, and they run in parallel with `-n`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from shardkeep.run.reader import RunReader
    from tests.support.cluster import Cluster
    from tests.support.golden import Golden
    from tests.support.stand_ins import StandIns


def pytest_configure(config: pytest.Config) -> None:
    """With `-n`, compiles all kernels before the workers start: each of them would compile or wait for the others."""
    if not getattr(config.option, "numprocesses", None) or config.option.collectonly:
        return
    from shardkeep.base.compiling.kernels import compile_kernels, kernel_modules
    from tests.support import parallel

    parallel.prepare(config)
    compile_kernels(kernel_modules(), lambda count: print(f"compiling {count} modules of kernels", flush=True))


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.support.parallel import Groups

    return Groups(config, log)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks the property tests: the long run repeats them with all their examples. A failed test of processes runs once
    more; pyproject.toml limits how many may."""
    if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
        item.add_marker("property")
    if item.get_closest_marker("waits_for_processes"):
        item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_collection(session: pytest.Session) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        from tests.support import parallel

        parallel.begin_collection(session.config)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        from tests.support import parallel

        parallel.arrange(items)


@pytest.fixture(autouse=True, scope="session")
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tokens of the tests' jobs."""
    path = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(path))
        yield path


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """A completed job of real processes, for reading. It runs once."""
    from tests.support.golden import run_golden  # here, for the controller of `-n`: it imports no torch

    return run_golden(tmp_path_factory)


@pytest.fixture(scope="session")
def stand_ins(own_state: Path) -> Iterator[StandIns]:
    """Starts stand-ins for roles."""
    from tests.support.stand_ins import StandIns

    starter = StandIns()
    yield starter
    starter.close()


@pytest.fixture(autouse=True, scope="module")
def forked_launchers() -> Iterator[None]:
    """What launchers in a test's own process start is forked from the preloaded process. A module can replace this."""
    from tests.support.forked_launchers import forked_launchers

    with forked_launchers():
        yield


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """The log as it was, after a test that ran the main of a role, which configures it for its process."""
    logger = logging.getLogger("shardkeep")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture
def run(tmp_path: Path) -> RunReader:
    """The run folder of a test's cluster."""
    from shardkeep.run.reader import RunReader

    return RunReader(tmp_path / "run")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Commands of one test, which end with it."""
    from tests.support.cluster import Cluster

    with Cluster(tmp_path) as cluster:
        yield cluster

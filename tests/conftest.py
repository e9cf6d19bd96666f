"""For all tests: they leave nothing in the user's own files, and they run in parallel with `--workers`."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.util
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from shardkeep.run.reader import RunReader
    from tests.support.cluster import Cluster
    from tests.support.forked_launchers import Template
    from tests.support.golden import Golden
    from tests.support.stand_ins import StandIns


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="processes that run the tests; 0 = this one")


def pytest_configure(config: pytest.Config) -> None:
    from tests.support.examples import draw_alike

    draw_alike()
    if config.option.workers and not config.option.collectonly:
        from tests.support.parallel import Workers

        config.pluginmanager.register(Workers(config.option.workers))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out of a run of all tests what `make check` runs."""
    checked = collection_path.name in ("test_layers.py", "test_documents.py")
    return True if checked and config.args_source is not pytest.Config.ArgsSource.ARGS else None


def pytest_itemcollected(item: pytest.Item) -> None:
    if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
        item.add_marker("property")


@pytest.fixture(autouse=True, scope="session")
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tokens of the tests' jobs, and a folder for temporary files that no other process uses."""
    path = tmp_path_factory.mktemp("state")
    multiprocessing.util.get_temp_dir()  # outside: it ends after this fixture
    own = tempfile.TemporaryDirectory(prefix="shardkeep-")
    with pytest.MonkeyPatch.context() as patch, own as temporary:
        Path(temporary).chmod(0o755)  # as /tmp, other users may pass
        patch.setenv("XDG_STATE_HOME", str(path))
        patch.setenv("TMPDIR", temporary)
        patch.setattr(tempfile, "tempdir", temporary)
        yield path


@pytest.fixture(autouse=True)
def leaves_nothing(own_state: Path) -> Iterator[None]:
    """Fails a test that leaves listeners, processes, temporary files or another state of its process."""
    from tests.support.leftovers import none_left

    with none_left():
        yield


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """A completed job of real processes, for reading. It runs once."""
    from tests.support.golden import run_golden

    return run_golden(tmp_path_factory)


@pytest.fixture(scope="session")
def stand_ins(own_state: Path) -> Iterator[StandIns]:
    from tests.support.stand_ins import StandIns

    starter = StandIns()
    yield starter
    starter.close()


@pytest.fixture(autouse=True, scope="session")
def template() -> Iterator[Template | None]:
    """A child of this process, from which the fork servers of launchers in this process are forked."""
    from tests.support.forked_launchers import Template

    if sys.platform != "linux":
        yield None
        return
    with contextlib.closing(Template()) as template:
        yield template


@pytest.fixture(autouse=True, scope="module")
def forked_launchers(template: Template | None) -> Iterator[None]:
    """What launchers in a test's own process start is forked. A module can replace this."""
    from tests.support.forked_launchers import forked_launchers

    with forked_launchers(template):
        yield


@pytest.fixture(autouse=True)
def own_settings() -> Iterator[None]:
    """The log and the handlers of signals as they were, after a test that ran a main, which sets them."""
    logger = logging.getLogger("shardkeep")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)
    for number, handler in signals.items():
        signal.signal(number, handler)


@pytest.fixture
def run(tmp_path: Path) -> RunReader:
    from shardkeep.run.reader import RunReader

    return RunReader(tmp_path / "run")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Commands of one test, which end with it."""
    from tests.support.cluster import Cluster

    with Cluster(tmp_path) as cluster:
        yield cluster

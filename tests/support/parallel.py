"""How pytest-xdist shares the tests between workers: by groups, the longest first.

A scheduler of our own: `--dist loadgroup` of xdist 3.8 has no effect under pytest 9.2, which ignores its names.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from shardkeep.base.files import atomic_write

PROCESSES = "waits_for_processes"
GOLDEN = "golden"
LONG_S = 1000
"""A test with a higher time limit starts with the long ones."""
_VARIABLE = "SHARDKEEP_TEST_GROUPS"


class Groups(LoadScopeScheduling):
    """Gives all tests of a group to one worker. The workers say which group a test is of: only they collect tests."""

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        self._groups: dict[str, str] = {}

    def _split_scope(self, nodeid: str) -> str:
        if not self._groups:
            self._groups = json.loads(_file().read_text(encoding="utf-8"))
        return self._groups[nodeid]


def prepare(config: pytest.Config) -> None:
    """In the controller, before the workers start."""
    config.option.loadscopereorder = False  # the order is ours
    folder = tempfile.mkdtemp(prefix="shardkeep-test-groups-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ[_VARIABLE] = str(Path(folder) / "groups.json")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers share the cores
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each process that compiles starts others
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes import the same files


def begin_collection(config: pytest.Config) -> None:
    """In a worker. Modules and tests live until the end: the garbage collector would search them in vain, 2 CPU s."""
    gc.disable()
    import_backwards(config)


def import_backwards(config: pytest.Config) -> None:
    """In every second worker: imports the test modules from the last to the first, before their collection.

    pytest rewrites the asserts of each module and keeps the result in a file. In a fresh clone, two workers that import
    in the same order both rewrite all modules, 7 CPU s each; so each rewrites about half. An import that fails is left
    to the collection, which reports it."""
    number = os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")
    if int(number) % 2 == 0 or config.args_source is pytest.Config.ArgsSource.ARGS:
        return
    for path in sorted((config.rootpath / "tests").rglob("test_*.py"), reverse=True):
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(config.rootpath).with_suffix("").parts))


def arrange(items: list[pytest.Item]) -> None:
    """In a worker, after the collection: orders the tests and notes their groups for the controller."""
    gc.enable()
    gc.freeze()
    limits: Counter[str] = Counter()
    for item in items:
        limits[group_of(item)] += limit_s(item)
    items.sort(key=lambda item: (_turn(item), -limits[group_of(item)] if _turn(item) == 0 else 0))
    atomic_write(_file(), json.dumps({item.nodeid: group_of(item) for item in items}).encode())


def limit_s(item: pytest.Item) -> int:
    """The time limit of a test."""
    limit = item.get_closest_marker("timeout")
    return int(limit.args[0]) if limit else int(item.config.getini("timeout"))


def group_of(item: pytest.Item) -> str:
    """The tests of one file share a group, because they share fixtures. All tests that read the golden job share one.

    Any worker takes a chaos test, unless a marker names its group. Groups with a marker: pages of the documents,
    network namespaces.
    """
    named = item.get_closest_marker("xdist_group")
    if named:
        return str(named.args[0])
    if item.get_closest_marker("chaos"):
        return item.nodeid
    return GOLDEN if GOLDEN in getattr(item, "fixturenames", ()) else item.nodeid.split("::")[0]


def _turn(item: pytest.Item) -> int:
    """The longest groups start first: long tests by the limits of their group, processes, whole jobs in one process."""
    if item.get_closest_marker("chaos") or item.get_closest_marker("slow") or limit_s(item) > LONG_S:
        return 0
    if item.get_closest_marker(PROCESSES):
        return 1
    return 2 if "tests/integration/" in item.nodeid else 3


def _file() -> Path:
    return Path(os.environ[_VARIABLE])

"""`every`: all cases run, and a failure names its case."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tests.support import leftovers
from tests.support.cases import every
from tests.support.leftovers import none_left
from tests.support.once import once


def test_all_cases_run_each_in_a_folder_of_its_own(tmp_path: Path) -> None:
    seen: list[tuple[int, str, int]] = []

    @every("number", [1, 2])
    @every("text, length", [("a", 1), ("", 0)], ids=["one", "none"])
    def check(number: int, text: str, length: int, tmp_path: Path) -> None:
        assert not list(tmp_path.iterdir())
        (tmp_path / "left").touch()
        seen.append((number, text, length))

    check(tmp_path=tmp_path)
    assert seen == [(1, "a", 1), (1, "", 0), (2, "a", 1), (2, "", 0)]


def test_a_failure_names_its_case() -> None:
    @every("number", [1, 2, 3])
    @every(("low", "high"), [(0, 9), (2, 9)], ids=["wide", "narrow"])
    def check(number: int, low: int, high: int) -> None:
        assert low < number + 1 < high

    with pytest.raises(AssertionError) as caught:
        check()
    assert caught.value.__notes__ == ["case: 'narrow'", "case: 1"]


def test_no_cases_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="no cases"):
        every("number", [])


def test_each_example_of_a_property_is_checked_for_all_cases() -> None:
    seen: list[tuple[str, int]] = []

    @settings(max_examples=5, database=None)
    @given(number=st.integers(0, 9))
    @every("text", ["a", "b"])
    def check(text: str, number: int) -> None:
        seen.append((text, number))

    check()
    assert [text for text, _ in seen] == ["a", "b"] * (len(seen) // 2) and seen
    assert [number for _, number in seen[::2]] == [number for _, number in seen[1::2]]


# ---- results that are made once ----


def test_several_that_need_a_result_get_what_one_of_them_made(tmp_path_factory: pytest.TempPathFactory) -> None:
    folders = []

    def make(folder: Path) -> dict[str, int]:
        folders.append(folder)
        return {"number": len(folders)}

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: once(tmp_path_factory, "made-once", make), range(4)))
    assert found == [{"number": 1}] * 4 and len(folders) == 1 and folders[0].is_dir()


def test_a_result_that_could_not_be_made_is_made_by_the_next(tmp_path_factory: pytest.TempPathFactory) -> None:
    def fail(folder: Path) -> None:
        raise RuntimeError("no result")

    with pytest.raises(RuntimeError, match="no result"):
        once(tmp_path_factory, "made-later", fail)
    assert once(tmp_path_factory, "made-later", lambda folder: [folder.name]) == ["made-later1"]


# ---- what a test leaves ----


def listens(stack: ExitStack) -> None:
    stack.enter_context(socket.create_server(("127.0.0.1", 0)))


def starts(stack: ExitStack) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stack.callback(child.communicate)


def writes(stack: ExitStack) -> None:
    number, path = tempfile.mkstemp()
    os.close(number)
    stack.callback(Path(path).unlink)


def sets_a_variable(stack: ExitStack) -> None:
    os.environ["SHARDKEEP_LEFT"] = "1"
    stack.callback(os.environ.pop, "SHARDKEEP_LEFT")


def handles_a_signal(stack: ExitStack) -> None:
    stack.callback(signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, lambda *_: None))


def goes_elsewhere(stack: ExitStack) -> None:
    stack.callback(os.chdir, Path.cwd())
    os.chdir("/")


@pytest.mark.skipif(sys.platform != "linux", reason="listeners and children are read from /proc")
@every(
    "leave, words",
    [
        (listens, "listeners: socket:"),
        (starts, "children: "),
        (writes, "temporary_files: tmp"),
        (sets_a_variable, "variables: SHARDKEEP_LEFT = '1'"),
        (handles_a_signal, "process: SIGHUP"),
        (goes_elsewhere, "process: folder"),
    ],
)
def test_each_kind_of_leftover_is_named(
    leave: Callable[[ExitStack], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "END_S", 0.0)
    with ExitStack() as stack:
        with pytest.raises(AssertionError) as caught, none_left():
            leave(stack)
        assert words in str(caught.value)


def test_what_is_closed_again_is_nothing_left() -> None:
    with none_left(), ExitStack() as stack:
        for leave in (listens, starts, writes, sets_a_variable, handles_a_signal, goes_elsewhere):
            leave(stack)


# ---- workers of a test run ----


ROOT = Path(__file__).resolve().parents[1]
DIES = """
import os
import time
import pytest

@pytest.fixture(scope="module")
def opened():
    yield
    with open("module.txt", "a") as file: file.write("closed")

def test_before(opened): pass
def test_that_dies(opened):
    if pid := os.fork():  # the child holds the pipe of the worker
        with open("left.pid", "w") as file: file.write(str(pid))
        os._exit(3)
    time.sleep(300)
    os._exit(0)
def test_after(opened): assert not os.path.exists("module.txt")
"""
FAILS = """
import pytest

@pytest.fixture(scope="session")
def service():
    yield
    raise ValueError("the service did not end")

def test_alone(service): pass
@pytest.mark.parametrize("number", range(3))
def test_each(number): assert number != 1
"""


@pytest.mark.slow
def test_each_test_runs_once_and_a_worker_that_dies_fails_its_own(tmp_path: Path) -> None:
    (tmp_path / "test_dies.py").write_text(DIES)
    (tmp_path / "test_fails.py").write_text(FAILS)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}"]
    command += ["-p", "tests.conftest", "-p", "no:cacheprovider", "--workers", "2", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with (tmp_path / "printed.txt").open("w+") as output:  # no pipe, which the process that is left would hold
        try:
            ended = subprocess.run(command, stdout=output, stderr=output, timeout=250, cwd=tmp_path, env=env)
        finally:
            os.kill(int((tmp_path / "left.pid").read_text()), signal.SIGKILL)
        output.seek(0)
        printed = output.read()
    assert ended.returncode == 1 and "2 failed, 5 passed, 1 error" in printed, printed
    assert "the worker that ran this test ended with exit code 3" in printed
    assert re.search(r"FAILED test_fails.py::test_each\[1\]", printed)
    assert "ValueError: the service did not end" in printed
    assert (tmp_path / "module.txt").read_text() == "closed"  # by the worker that took the place of the dead one
    assert re.search(r"CPU s: \d+ = ", printed)

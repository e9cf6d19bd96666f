"""A failed test runs again only if it waits for processes, and no more than three tests of a run do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PASSES_THE_SECOND_TIME = """
from pathlib import Path
import pytest

def fail_once(name):
    mark = Path(__file__).with_name(name)
    if not mark.exists():
        mark.touch()
        raise ValueError(f"{name} was starved")

@pytest.mark.waits_for_processes
@pytest.mark.parametrize("number", range(COUNT))
def test_of_processes(number):
    fail_once(f"process {number}")

def test_of_one_process():
    assert not OTHERS or fail_once("thread") is None
"""


def outcome(folder: Path, *options: str, count: int, others: bool = False) -> tuple[int, str]:
    """Exit code and output of a run of `count` tests of processes, and of a failing other test."""
    text = PASSES_THE_SECOND_TIME.replace("COUNT", str(count)).replace("OTHERS", str(others))
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={folder}"]
    command += ["-p", "tests.conftest", "-p", "no:cacheprovider", *options, str(folder / "test_it.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=ROOT)
    return ended.returncode, ended.stdout + ended.stderr


def test_three_tests_of_processes_may_run_again_and_their_first_failures_are_printed(tmp_path: Path) -> None:
    code, text = outcome(tmp_path, count=3)
    assert code == 0 and "4 passed, 3 rerun" in text
    summary = text.partition("rerun test summary info")[2]
    assert all(f"ValueError: process {number} was starved" in summary for number in range(3))


@pytest.mark.slow
def test_the_fourth_test_that_would_run_again_fails(tmp_path: Path) -> None:
    code, text = outcome(tmp_path, count=4)
    assert code == 1 and "1 failed, 4 passed, 3 rerun" in text


@pytest.mark.slow
def test_another_test_that_fails_does_not_run_again(tmp_path: Path) -> None:
    code, text = outcome(tmp_path, count=0, others=True)
    assert code == 1 and "1 failed" in text and "rerun" not in text.rpartition("=====")[0].rpartition("=====")[2]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2])
def test_workers_of_xdist_share_the_limit(tmp_path: Path, workers: int) -> None:
    code, text = outcome(tmp_path, "-n", str(workers), count=4)
    assert code == 1 and "1 failed, 4 passed, 3 rerun" in text

"""Workers: each test runs once, a worker that dies fails its test alone, fixtures end with their scope."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

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

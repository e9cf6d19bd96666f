"""The folder that a member's replacement continues with, while its predecessor is still there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardkeep.base.errors import CheckpointError
from shardkeep.member import recovery_folder

HOLD = """
import sys, time
from pathlib import Path
from shardkeep.member.recovery_folder import kept_for_recovery
kept_for_recovery(Path(sys.argv[1]), "job", "server", 0)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_predecessor_that_stands_still_is_killed(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery_folder, "OWNER_S", 0.2)
    holder.send_signal(signal.SIGSTOP)
    kept = recovery_folder.kept_for_recovery(tmp_path, "job", "server", 0)
    assert holder.wait(90) == -signal.SIGKILL
    assert (kept / "owner").read_text() == f"{os.getpid()}\n"


def test_a_process_that_only_bears_the_number_in_the_lock_is_left_alone(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on shared storage, where the holder is on another machine."""
    monkeypatch.setattr(recovery_folder, "OWNER_S", 0.2)
    owner = tmp_path / "recovery" / "job" / "server-0" / "owner"
    with subprocess.Popen(["sleep", "60"]) as other:
        owner.write_text(f"{other.pid}\n")
        with pytest.raises(CheckpointError, match=rf"process {other.pid} still holds the lock after 0.2 s"):
            recovery_folder.kept_for_recovery(tmp_path, "job", "server", 0)
        assert other.poll() is None and holder.poll() is None
        other.kill()

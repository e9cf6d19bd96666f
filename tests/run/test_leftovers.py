"""What killed jobs left behind, and what the next job removes of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardkeep.base.machine.pids import start_of
from shardkeep.config import JobConfig
from shardkeep.member.recovery_folder import kept_for_recovery
from shardkeep.run.folder import RunFolder
from shardkeep.run.leftovers import GONE_S, clean, note_run
from shardkeep.trust.tokens import keep_token
from tests.support.cases import every

NOBODY = 2**22 + 1
"""A number that no process has (PID_MAX_LIMIT)."""


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "shardkeep" / "tokens"


def run(tmp_path: Path, name: str, *, pid: int = NOBODY, pid_space: str | None = None) -> RunFolder:
    """Of a job whose coordinator, process `pid`, did not end in order."""
    folder = RunFolder.create(tmp_path / name, JobConfig())
    keep_token(folder.path)
    note_run(folder.path)
    note = folder.token_path.with_suffix(".run")
    facts = json.loads(note.read_text())
    note.write_text(
        json.dumps(facts | {"pid": pid, "started": start_of(pid), "pid_space": pid_space or facts["pid_space"]})
    )
    kept_for_recovery(folder.path, "job", "server", 0)
    return folder


def launched(folder: RunFolder) -> RunFolder:
    with folder.held():
        return folder


def test_of_a_job_whose_launcher_was_killed_neither_token_nor_recovery_stays(tmp_path: Path, tokens: Path) -> None:
    folder = launched(run(tmp_path, "run"))
    clean(tokens)
    assert not list(tokens.iterdir()) and not (folder.path / "recovery").exists()


@every(
    ("missing", "age_s", "stays"),
    [("a/run", 2 * GONE_S, False), ("a/run", 0.0, True), ("a/run/config.yaml", 0.0, True), ("a", 2 * GONE_S, True)],
    ids=["deleted", "gone since now", "empty since now", "its volume, too"],
)
def test_the_token_of_a_run_folder_that_is_missing_goes_after_days_if_the_folder_above_is_there(
    missing: str, age_s: float, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    tokens = tmp_path / "state" / "shardkeep" / "tokens"
    folder = run(tmp_path / "a", "run")
    token = folder.token_path
    then = time.time() - age_s
    os.utime(token.with_suffix(".run"), (then, then))
    gone = tmp_path / missing
    gone.unlink() if gone.is_file() else shutil.rmtree(gone)
    clean(tokens)
    assert [path.name for path in sorted(tokens.iterdir())] == ([token.name, f"{token.name}.run"] if stays else [])


@pytest.fixture
def role() -> Iterator[int]:
    """Another process; its pid."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid


def test_nothing_goes_that_a_process_or_another_coordinator_may_need(tmp_path: Path, tokens: Path, role: int) -> None:
    by_hand, elsewhere = run(tmp_path, "by hand"), launched(run(tmp_path, "elsewhere", pid_space="another"))
    starting, held = launched(run(tmp_path, "starting", pid=role)), run(tmp_path, "held")
    manned = launched(run(tmp_path, "manned"))
    manned.coordinator("127.0.0.1:7", pid=role)
    with held.held():
        clean(tokens)
    for folder in (by_hand, elsewhere, starting, held, manned):
        assert folder.token_path.exists() and (folder.path / "recovery").exists(), folder.path.name


def test_a_job_that_ends_in_order_leaves_no_note(tmp_path: Path, tokens: Path) -> None:
    run(tmp_path, "run").forget_token()
    assert not list(tokens.iterdir())


def test_a_damaged_note_hinders_nobody(tmp_path: Path, tokens: Path) -> None:
    folder = launched(run(tmp_path, "run"))
    for name, text in (("a", ""), ("b", "[]"), ("c", '{"host": 1}')):
        (tokens / f"{name}.run").write_text(text)
    clean(tokens)
    assert not folder.token_path.exists()

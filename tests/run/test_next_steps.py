"""What a person reads about a run that lacks processes: what happened, and the command that continues."""

from __future__ import annotations

import io
import shlex
import socket
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from shardkeep.base.errors import UserError
from shardkeep.cli.main import app
from shardkeep.cli.status import show_run
from shardkeep.cli.status_text import show
from shardkeep.config import JobConfig, parse_config
from shardkeep.ps.checkpoints.folder import Checkpoints, FileRecord
from shardkeep.ps.checkpoints.owner import Hold, owner_here
from shardkeep.ps.control.records import Member
from shardkeep.run.folder import RunFolder
from shardkeep.run.next_steps import check_start, continue_arguments, origin_line, resume_line
from shardkeep.trust.tokens import keep_token

NOBODY = 2**22 + 1
"""A number that no process has (PID_MAX_LIMIT)."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return RunFolder.create(tmp_path / "my run", parse_config("{servers: 1, workers: 1}"))


def led_by_hand(folder: RunFolder) -> str:
    """Has a coordinator die, at an address where nobody listens; what continues."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    keep_token(folder.path)
    command = continue_arguments(folder.path, address, token_file=None, tls=None, insecure=False)
    folder.coordinator(address, pid=NOBODY, command=command)
    folder.standing({"job": "j"})
    return shlex.join(command)


def checkpoint(folder: RunFolder, step: int) -> None:
    checkpoints = Checkpoints(folder.path / "checkpoints")
    file = checkpoints.begin(step) / "server-0"
    file.write_text("rows")
    checkpoints.commit(step, [FileRecord.of(file.parent, file)], {})


def shown(path: Path) -> tuple[int, list[str]]:
    out = io.StringIO()
    code = show_run(path, partial(show, console=Console(file=out, width=40, color_system=None)))
    return code, out.getvalue().splitlines()


def files(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def test_a_run_whose_coordinator_is_dead_says_who_may_live_and_how_to_continue(folder: RunFolder) -> None:
    command = led_by_hand(folder)
    folder.members(1, [Member("server", 0, "10.9.0.2", 7), Member("worker", 0, "127.0.0.1", NOBODY)])
    folder.progress({"step": 120, "total_steps": 500})
    code, lines = shown(folder.path)
    assert code == 1 and lines[0].startswith("the coordinator does not answer at 127.0.0.1:")
    assert lines[1].startswith("last known step: 120/500 at ")
    assert lines[2:5] == [
        "server 0 (pid 7 on 10.9.0.2) may be alive",
        f"worker 0 (pid {NOBODY} on 127.0.0.1) is gone",
        "members wait for another coordinator for recovery.replace_timeout_s",
    ]
    assert lines[5] == f"to continue: {command}"
    assert shlex.split(command)[:5] == [
        "shardkeep", "coordinator", str(folder.config_path), "--continue", "--run-dir",
    ]  # fmt: skip
    before = files(folder.path)
    done = CliRunner().invoke(app, ["coordinator", str(folder.config_path), "--run-dir", str(folder.path)])
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert done.stderr.rstrip().endswith(f"if its coordinator died, continue by {command}")
    assert "delete" not in done.stderr and files(folder.path) == before
    checkpoint(folder, 50)
    assert resume_line(folder.path) == f"to resume at step 50: {command}"


def test_a_killed_or_stopped_job_names_the_command_that_resumes_it_or_says_that_there_is_none(
    folder: RunFolder,
) -> None:
    with folder.held():
        pass
    folder.coordinator("127.0.0.1:7", pid=NOBODY)
    command = f"to resume at step 50: shardkeep train --resume '{folder.path}'"
    nothing = f"nothing to resume from: no complete checkpoint in {folder.path / 'checkpoints'}"
    for line in (nothing, command):
        code, lines = shown(folder.path)
        assert (code, lines[0], lines[1]) == (1, "killed: no process of this job is left", line)
        if line == nothing:
            checkpoint(folder, 50)
    folder.finished("stopped", "stopped at step 50", None)
    code, lines = shown(folder.path)
    assert (code, lines[-1]) == (1, command)


def test_a_job_of_several_machines_is_continued_by_their_command(folder: RunFolder) -> None:
    folder.coordinator("127.0.0.1:7", pid=NOBODY, command=["shardkeep", "node", "my job.yaml", "--run-dir", "runs/one"])
    folder.members(1, [Member("worker", 0, "127.0.0.1", NOBODY)])
    keep_token(folder.path)
    command = "on each machine: shardkeep node 'my job.yaml' --run-dir runs/one"
    own = "`shardkeep node` on its first machine starts another coordinator; if it has ended, start it again"
    assert shown(folder.path)[1][1:] == [f"worker 0 (pid {NOBODY} on 127.0.0.1) is gone", f"{own} {command}"]
    checkpoint(folder, 50)
    assert resume_line(folder.path) == f"to resume at step 50 {command}"


def test_a_start_at_a_step_without_a_checkpoint_or_where_a_launcher_runs_the_job_changes_nothing(
    folder: RunFolder,
) -> None:
    led_by_hand(folder)
    checkpoint(folder, 50)
    before = files(folder.path)
    with pytest.raises(UserError, match=r"--start-step 40: no complete checkpoint of that step in .*; there are: 50"):
        check_start(JobConfig(), folder.path, 40)
    arguments = ["coordinator", str(folder.config_path), "--run-dir", str(folder.path), "--start-step", "40"]
    assert CliRunner().invoke(app, arguments).exit_code == 2
    assert files(folder.path) == before
    check_start(JobConfig(), folder.path, 50)
    with folder.held(), pytest.raises(UserError, match="`shardkeep train` runs a job there"):
        check_start(JobConfig(), folder.path, 50)


def test_a_start_at_a_checkpoint_of_another_run_says_so_and_starts(folder: RunFolder, tmp_path: Path) -> None:
    config = parse_config(f"{{checkpoint: {{dir: '{folder.path / 'checkpoints'}'}}}}")
    checkpoint(folder, 50)
    for run in ("another", "own"):
        RunFolder.create(tmp_path / run, config)
    Hold(folder.path / "checkpoints", owner_here("job", str(tmp_path / "another"))).release()
    check_start(config, tmp_path / "own", 50)
    line = f"the checkpoints in {folder.path / 'checkpoints'} are those of another run, {tmp_path / 'another'}"
    assert origin_line(config, tmp_path / "own") == line
    assert origin_line(config, tmp_path / "another") is None

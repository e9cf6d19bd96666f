"""How a job is stopped: `shardkeep stop` and `shardkeep scale` where nobody runs it or its coordinator is gone, Ctrl-C
and SIGTERM in a process that may continue for a while, what is named as the end, and what the launcher reports to a
coordinator that is on its way back or has said how the job ended.

Of running jobs: test_supervised_stops.py, tests/integration/test_stop_command.py.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.errors import ConfigError, JobError, TransportError, UserError
from shardkeep.base.exit_codes import code_of_leaving
from shardkeep.config import parse_config
from shardkeep.launch.coordinator_line import CoordinatorLine
from shardkeep.launch.processes.children import Death
from shardkeep.launch.stopping import scale, stop
from shardkeep.launch.stopping.ending import Ending
from shardkeep.launch.stopping.interrupts import Interrupts
from shardkeep.launch.stopping.stop import ask_coordinator, heard, stop_at, stop_run
from shardkeep.ps.control.grpc.server import ControlServer
from shardkeep.run.folder import RunFolder
from shardkeep.trust.tokens import keep_token
from tests.support.cases import every
from tests.support.cluster import within
from tests.support.control_job import Job
from tests.support.recovering import Recovering


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", parse_config("{servers: 1, workers: 1, checkpoint: {every_steps: 5}}"))


def lead(folder: RunFolder, *options: str) -> str:
    """Has a coordinator that is gone, at an address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    command = ["shardkeep", "coordinator", "config.yaml", "--take-over", *options]
    folder.coordinator(address, pid=1, command=command)
    keep_token(folder.path)
    return address


def refusal(run: Path, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        stop_run(run, timeout_s=5.0)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(str(run))


def test_a_folder_without_a_run_or_one_that_others_can_change_is_refused(folder: RunFolder, tmp_path: Path) -> None:
    assert refusal(tmp_path / "none", UserError) == ": there is no such folder"
    assert refusal(tmp_path, UserError) == ": is not a run folder (it has no config.yaml)"
    folder.path.chmod(0o777)
    assert "allowed: what only you and root can change" in refusal(folder.path, ConfigError)


def test_a_job_that_is_over_or_whose_processes_were_killed_is_said_to_be_so(folder: RunFolder) -> None:
    with folder.held():
        pass
    assert refusal(folder.path, JobError).startswith(": no process of this job is left; nothing to resume from: ")
    folder.finished("failed", "worker 1 ended", None)
    assert refusal(folder.path, JobError) == ": no job runs here; it failed: worker 1 ended"


def test_a_coordinator_that_is_dead_is_named_with_what_helps_and_one_with_tls_is_not_called_dead(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal(folder.path, JobError) == ": no coordinator has listened in this folder yet"
    address = lead(folder)
    text = f"the coordinator does not answer at {address}; `shardkeep status {folder.path}` says what to do"
    assert refusal(folder.path, JobError) == text
    lead(folder, "--tls", "/tls/10.9.0.1")
    assert "uses TLS: add --tls /tls/10.9.0.1" in refusal(folder.path, UserError)
    lead(folder)
    monkeypatch.setattr(stop, "ASK_S", 0.5)
    with folder.held():  # by a launcher that is killed while its job stops
        assert "does not answer" in refusal(folder.path, JobError)


def test_a_job_that_is_stopped_by_address_says_how_it_ended_and_where_it_resumes() -> None:
    job = Job(workers=1)
    for role, index in job.names:
        job.register(role, index)
    for role, index in job.names:
        job.join(role, index)
    saved = {"phase": "checkpoint", "step": 7, "bytes": 9, "text": "step 7 is kept"}
    with ControlServer(job.coordinator) as server:
        assert ask_coordinator(server.endpoint, "shardkeep stop", limit_s=0.0).state == "stopping"
        with pytest.raises(JobError, match=r"has not ended within 0\.2 s \(--timeout\); it still stops"):
            stop_at(server.endpoint, timeout_s=0.2)
        job.coordinator.report("worker-0-100", sequence=1, kind="phase", record=saved)
        job.coordinator.leave("worker-0-100", code=1, message="stopped at step 7", symptom=True)
        assert stop_at(server.endpoint, timeout_s=90.0) == [
            "stopped at step 7: shardkeep stop",
            "checkpoint: step 7",
            "to resume at step 7: `shardkeep status RUN` prints the command where the run folder is",
        ]


def test_a_request_to_an_earlier_start_of_a_job_in_one_process_is_dropped(tmp_path: Path) -> None:
    interrupts = Interrupts()
    (tmp_path / "stop.json").write_text("{}")
    with heard(tmp_path, interrupts):
        assert not (tmp_path / "stop.json").exists() and not interrupts.count


def test_a_job_without_a_launcher_is_not_asked_to_scale_and_what_no_coordinator_heard_is_not_done_later(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale, "ASK_S", 0.5)
    lead(folder)
    nobody = r"nothing would resume it with workers=2; stop it by .*: shardkeep coordinator .* --set workers=2$"
    with pytest.raises(UserError, match=nobody):
        scale.ask(folder.path, workers=2, servers=None)
    with folder.held(), pytest.raises(TransportError, match=r"coordinator.*127\.0\.0\.1"):
        scale.ask(folder.path, workers=2, servers=None)
    assert scale.taken(folder.path) is None
    for command, again in (
        (["shardkeep", "node", "a.yaml"], "on each machine: shardkeep node a.yaml"),
        ((), "by the"),
    ):
        folder.coordinator("127.0.0.1:1", pid=1, command=command)
        with pytest.raises(UserError, match=rf"again with these settings:? ?{again}"):
            scale.ask(folder.path, workers=2, servers=None)


# ---- signals, in a process of their own ----

SIGNALS = {
    "late": ("SIGTERM", 0.1, 60.0, "interrupted 2 True True False"),
    "in time": ("SIGTERM", 60.0, 0.0, "in time 1 True False False"),
    "without a limit": ("SIGTERM", None, 0.2, "in time 1 True False False"),
    "Ctrl-C has none": ("SIGINT", 0.1, 0.4, "in time 1 False False False"),
    "SIGTERM after Ctrl-C": ("SIGINT SIGTERM", 60.0, 0.0, "in time 2 True False False"),
    "late after Ctrl-C": ("SIGINT SIGTERM", 0.1, 60.0, "interrupted 3 True True False"),
    "two SIGTERM": ("SIGTERM SIGTERM", 60.0, 0.0, "in time 2 True False False"),
    "two Ctrl-C": ("SIGINT SIGINT", 60.0, 60.0, "interrupted 2 False False True"),
    "Ctrl-C after SIGTERM": ("SIGTERM SIGINT", 60.0, 60.0, "interrupted 2 True False True"),
}
PROCESS = """
import json, os, signal, sys, threading
from shardkeep.launch.stopping.interrupts import Interrupts

def job(numbers, grace_s, wait_s):
    with Interrupts() as interrupts:
        interrupts.tolerated, interrupts.grace_s = 1, grace_s
        try:
            for number in numbers.split():
                os.kill(os.getpid(), signal.Signals[number])
            threading.Event().wait(wait_s)
            end = "in time"
        except KeyboardInterrupt:
            end = "interrupted"
        print(end, interrupts.count, interrupts.terminated, interrupts.late, interrupts.at_once)

for numbers, grace_s, wait_s in json.loads(sys.argv[1]):
    job(numbers, grace_s, wait_s)
"""


def test_sigterm_interrupts_once_its_grace_is_over_and_a_second_ctrl_c_at_once() -> None:
    command = [sys.executable, "-c", PROCESS, json.dumps([case[:3] for case in SIGNALS.values()])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert dict(zip(SIGNALS, done.stdout.splitlines(), strict=True)) == {
        name: case[3] for name, case in SIGNALS.items()
    }
    assert done.stderr == ""


# ---- the coordinator's verdict and the deaths that the launcher saw differ ----

KILLED = Death("worker", 0, 70, -signal.SIGKILL, "", "the memory limit of 520.0 MB of /box was reached")
LEFT = Death("worker", 1, 71, code_of_leaving(signal.SIGTERM), "")
FAILED = Death("worker", 1, 71, 1, "no such column")
OWN_FAILURE = "worker 1 failed (exit code 1): no such column"
OF_THE_DEATH = "worker 0 (pid 70) ended: killed by SIGKILL; the memory limit of 520.0 MB of /box was"


@every(
    ("verdict", "deaths", "given_up", "text"),
    [
        ({"message": OWN_FAILURE}, [Death("worker", 0, 70, -signal.SIGABRT, ""), FAILED], False, OWN_FAILURE),
        ({"message": "worker 1 failed: worker 0 hung up", "symptom": True}, [KILLED, FAILED], False, OF_THE_DEATH),
        ({"message": "worker 1 (pid 71) left on SIGTERM; it died 4 times"}, [KILLED, LEFT], True, OF_THE_DEATH),
    ],
    ids=["another aborts after its failure", "a failure that followed from a death", "ended by the launcher"],
)
def test_the_cause_of_the_end_is_named(
    tmp_path: Path, verdict: dict[str, Any], deaths: list[Death], given_up: bool, text: str
) -> None:
    """The coordinator knows of no death."""
    config = parse_config("{servers: 1, workers: 2}")
    run = RunFolder.create(tmp_path / "run", config)
    run.finished("failed", verdict["message"], {"steps": 3, **verdict})
    with pytest.raises(JobError) as caught:
        Ending(config, run, step=3, given_up=given_up).conclude(deaths, interrupted=False, heard=lambda death: False)
    summary = json.loads((run.path / "summary.json").read_text())
    message, _, logs = str(caught.value).partition("; logs: ")
    assert message.startswith(text) and "SIGTERM" not in message
    assert logs == str(run.logs) and summary["message"] == message and summary["status"] == "failed"
    assert not (summary.get("symptom") and text == OF_THE_DEATH)


# ---- deaths that the coordinator is to hear of ----

VICTIM = Death("worker", 1, 100, -signal.SIGKILL, "")
LIMIT_S = 90.0


@contextlib.contextmanager
def line_to(folder: RunFolder, address: str) -> Iterator[CoordinatorLine]:
    folder.coordinator(address, pid=1)
    with contextlib.closing(CoordinatorLine(folder)) as line:
        yield line


def test_a_death_is_reported_again_until_a_coordinator_on_its_way_back_hears_it(folder: RunFolder) -> None:
    job, token = Recovering(), keep_token(folder.path)
    job.form()
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        nobody.settimeout(LIMIT_S)
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        with line_to(folder, address) as line:
            folder.progress({"kind": "progress", "step": 7})
            folder.progress({"kind": "progress", "step": 12})
            line.report(VICTIM, final=False)
            for _ in range(2):  # each report is hung up on
                nobody.accept()[0].close()
            assert not line.settled(VICTIM.pid)
            nobody.close()
            assert line.step() == 12  # of a coordinator that is dead: the last one that it has recorded
            with ControlServer(job.coordinator, address, token=token):
                within(LIMIT_S, lambda: line.settled(VICTIM.pid), "not heard", lambda: True)
    assert line.heard(VICTIM)
    assert "killed by SIGKILL" in job.state.message


def test_a_death_after_the_verdict_reaches_the_coordinator_that_was_found_before(folder: RunFolder) -> None:
    job = Recovering()
    job.form()
    with (
        ControlServer(job.coordinator, token=keep_token(folder.path)) as server,
        line_to(folder, server.address) as line,
    ):
        assert line.endpoint() is not None
        job.leave("worker", 0, 1, "no such column")
        folder.finished("failed", job.state.message, {})
        line.report(VICTIM, final=False)
        within(LIMIT_S, lambda: line.heard(VICTIM), "not heard", lambda: True)
    assert "no such column" in job.state.message

"""What the launcher reports to a coordinator that is on its way back, or that has said how the job ended."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardkeep.config import JobConfig
from shardkeep.launch.coordinator_line import CoordinatorLine
from shardkeep.launch.processes.children import Death
from shardkeep.ps.control.grpc.server import ControlServer
from shardkeep.run.folder import RunFolder
from shardkeep.trust.tokens import keep_token
from tests.support.cluster import within
from tests.support.recovering import Recovering

KILLED = Death("worker", 1, 100, -signal.SIGKILL, "")
LIMIT_S = 90.0


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", JobConfig())


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
            line.report(KILLED, final=False)
            for _ in range(2):  # each report is hung up on
                nobody.accept()[0].close()
            assert not line.settled(KILLED.pid)
            nobody.close()
            assert line.step() == 12  # of a coordinator that is dead: the last one that it has recorded
            with ControlServer(job.coordinator, address, token=token):
                within(LIMIT_S, lambda: line.settled(KILLED.pid), "not heard", lambda: True)
    assert line.heard(KILLED)
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
        line.report(KILLED, final=False)
        within(LIMIT_S, lambda: line.heard(KILLED), "not heard", lambda: True)
    assert "no such column" in job.state.message

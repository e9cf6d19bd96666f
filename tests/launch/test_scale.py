"""`shardkeep scale` where nobody runs a job, or its coordinator is gone. Of running jobs: integration/test_scale.py."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shardkeep.base.errors import TransportError, UserError
from shardkeep.config import parse_config
from shardkeep.launch.stopping import scale
from shardkeep.run.folder import RunFolder
from shardkeep.trust.tokens import keep_token


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Of a job whose coordinator is said to listen where nobody does."""
    folder = RunFolder.create(tmp_path / "run", parse_config("{servers: 1, workers: 1, checkpoint: {every_steps: 5}}"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        folder.coordinator(f"127.0.0.1:{taken.getsockname()[1]}", pid=1)
    keep_token(folder.path)
    return folder


def test_a_job_without_a_launcher_is_not_asked_to_stop(folder: RunFolder) -> None:
    text = r"no `shardkeep train` runs this job, so nothing would resume it with workers=2; if you started the roles"
    with pytest.raises(UserError, match=text):
        scale.ask(folder.path, workers=2, servers=None)
    with folder.held():
        pass
    with pytest.raises(UserError, match=text):
        scale.ask(folder.path, workers=2, servers=None)
    assert scale.taken(folder.path) is None


def test_what_no_coordinator_has_heard_is_not_done_later(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "ASK_S", 0.5)
    with folder.held(), pytest.raises(TransportError, match=r"coordinator.*127\.0\.0\.1"):
        scale.ask(folder.path, workers=2, servers=None)
    assert scale.taken(folder.path) is None
    with pytest.raises(UserError, match="no `shardkeep train` runs this job"):
        scale.ask(folder.path, workers=2, servers=None)

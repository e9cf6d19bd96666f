"""How processes find the coordinator's address and the job's token: who makes it, how long it lives."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from pathlib import Path

import pytest

from shardkeep.base.errors import ConfigError, DeadlineExceeded, JobError, UserError
from shardkeep.base.files import atomic_write
from shardkeep.config import JobConfig
from shardkeep.member import access
from shardkeep.member.access import check_coordinator, coordinator_address, endpoint_of
from shardkeep.run.folder import RunFolder
from shardkeep.trust.endpoint import make_token, read_token
from shardkeep.trust.tokens import keep_token, put_token, token_of, token_path
from tests.support.cases import every

FIRST, SECOND = "127.0.0.1:7", "127.0.0.1:8"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return RunFolder.create(tmp_path / "run", JobConfig())


# ---- the token ----


def test_a_job_has_one_token_for_its_owner_alone_and_not_in_its_run_folder(folder: RunFolder, tmp_path: Path) -> None:
    token = keep_token(folder.path)
    assert read_token(folder.token_path) == token == keep_token(folder.path) and len(token) == 64
    assert stat.S_IMODE(folder.token_path.stat().st_mode) == 0o600
    assert folder.token_path.parent == tmp_path / "state" / "shardkeep" / "tokens"
    assert stat.S_IMODE(folder.token_path.parent.stat().st_mode) == 0o700
    given = make_token()
    put_token(folder.path, given)
    assert token_of(folder.path) == given
    folder.token_path.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read or change it"):
        keep_token(folder.path)


def test_a_folder_made_anew_at_the_same_place_or_copied_has_not_the_token(folder: RunFolder, tmp_path: Path) -> None:
    keep_token(folder.path)
    shutil.copytree(folder.path, tmp_path / "copy")
    folder.path.rename(tmp_path / "elsewhere")
    shutil.copytree(tmp_path / "copy", folder.path)
    for path in (folder.path, tmp_path / "copy"):
        with pytest.raises(ConfigError, match="the token of its job is not here"):
            token_of(path)


@every("killed", [False, True], ids=["resumed", "a new job in the place of one that was killed"])
def test_a_job_that_begins_again_gets_another_token(tmp_path: Path, killed: bool) -> None:
    """Some file systems give a folder that is made again the inode of the deleted one."""
    folder = RunFolder.create(tmp_path / "run", JobConfig())
    before = keep_token(folder.path)
    if killed:
        folder.config_path.unlink()
    again = (RunFolder.create if killed else RunFolder.reopen)(folder.path, JobConfig())
    assert keep_token(again.path) != before


@every(
    ("state", "text"),
    [
        ("file", r"cannot be written \(Not a directory\); give --token-file"),
        ("long" * 100, r"cannot be read \(File name too long\); set XDG_STATE_HOME"),  # no permission stops root
    ],
)
def test_a_folder_for_tokens_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, text: str
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / state))
    RunFolder.create(tmp_path / "run", JobConfig())
    for call in (keep_token, token_of)[: 1 if state == "file" else 2]:
        with pytest.raises(UserError, match=text):
            call(tmp_path / "run")


def test_a_relative_state_folder_is_none(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setattr(os.path, "expanduser", lambda _path: "/home/somebody")
    assert token_path(folder.path).parent == Path("/home/somebody/.local/state/shardkeep/tokens")
    monkeypatch.setattr(os.path, "expanduser", lambda _path: "~")
    with pytest.raises(ConfigError, match="this user has no home for the job's token; set XDG_STATE_HOME"):
        token_path(folder.path)


# ---- the endpoint ----


def test_who_can_read_the_run_folder_needs_to_know_no_token_until_the_job_is_over(folder: RunFolder) -> None:
    token = keep_token(folder.path)
    assert folder.endpoint() is None
    folder.coordinator(FIRST, pid=1)
    found = endpoint_of(str(folder.path))
    assert (found.address, found.token, found.tls) == (FIRST, token, None)
    assert folder.endpoint() == found
    folder.forget_token()
    with pytest.raises(ConfigError, match="the job is over, or runs on another machine or for another user"):
        folder.endpoint()
    (folder.path / "summary.json").write_text("{}")
    assert folder.endpoint() is None


def test_an_address_alone_needs_a_token_file_and_that_goes_before_the_folders(
    folder: RunFolder, tmp_path: Path
) -> None:
    keep_token(folder.path)
    folder.coordinator(FIRST, pid=1)
    path, token = tmp_path / "mine", make_token()
    atomic_write(path, token, private=True)
    assert endpoint_of(SECOND, token_file=path).token == token
    assert endpoint_of(str(folder.path), token_file=path).token == token
    with pytest.raises(UserError, match=r"the job's token is needed; give --token-file FILE .* --coordinator RUN"):
        endpoint_of(SECOND)


@every(
    ("name", "error"),
    [
        ("runs/first", "--coordinator runs/first: there is no folder runs"),
        ("first", "is neither HOST:PORT nor a folder that is there; .* make here: ./first"),
        ("10.9.0.1", "is neither HOST:PORT nor a folder"),
        ("job.yaml", r"--coordinator job\.yaml: is a file; allowed: HOST:PORT, or the coordinator's run folder"),
        ("./" + "long" * 100, "cannot be read|there is no folder"),
    ],
)
def test_what_can_be_no_coordinator_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("seed: 1")
    with pytest.raises(UserError, match=error):
        check_coordinator(name)


def test_a_run_folder_that_is_still_to_come_is_said_to_be_missing(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    waits = "; waiting up to 120 s for a coordinator there"
    assert check_coordinator("./later") == f"--coordinator ./later: does not exist yet{waits}"
    assert check_coordinator("empty") == f"--coordinator empty: holds no run yet{waits}"
    assert check_coordinator("run") is None
    folder.finished("stopped", "", None)
    assert check_coordinator("run") == f"--coordinator run: holds a job that is over{waits}"


@every("over", [False, True], ids=["a run folder that is to come", "one of a job that is resumed"])
def test_a_member_waits_for_the_address_of_a_coordinator_unless_a_launcher_started_it(
    tmp_path: Path, over: bool
) -> None:
    assert coordinator_address(FIRST) == FIRST
    path = tmp_path / "run"
    if over:
        run = RunFolder.create(path, JobConfig())
        run.coordinator(FIRST, pid=1)
        run.finished("stopped", "", None)
        with pytest.raises(JobError, match="the job is over"):
            coordinator_address(str(path), launched=True)

    def begin() -> None:
        run = RunFolder.reopen(path, JobConfig()) if over else RunFolder(path)
        run.coordinator(SECOND, pid=2)

    late = threading.Timer(0.2, begin)
    late.start()
    try:
        assert coordinator_address(str(path)) == SECOND
    finally:
        late.join()


@every(
    ("starts", "lacks"),
    [(0, "does not say where"), (1, "holds a job that is over: no data"), (2, "does not say where")],
    ids=["never told", "of a job that is over", "of the one before the coordinator that has claimed the folder"],
)
def test_a_run_folder_that_never_tells_is_named_when_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: int, lacks: str
) -> None:
    monkeypatch.setattr(access, "LISTEN_S", 0.05)
    if starts:
        folder = RunFolder.create(tmp_path / "run", JobConfig())
        folder.claim()
        folder.coordinator(FIRST, pid=1)
        folder.finished("failed", "no data", None)
    if starts > 1:
        RunFolder(tmp_path / "run").claim()
    with pytest.raises(DeadlineExceeded, match=rf"the coordinator to listen; .* {lacks} \(limit 0.05 s\)"):
        coordinator_address(str(tmp_path / "run"))


def test_the_address_is_that_of_the_coordinator_with_the_highest_number(folder: RunFolder) -> None:
    keep_token(folder.path)
    folder.claim()
    folder.coordinator(FIRST, pid=1)
    found = endpoint_of(str(folder.path))
    second = RunFolder(folder.path)
    second.claim()
    assert found.now() == FIRST  # nobody else listens yet
    second.coordinator(SECOND, pid=2)
    assert found.now() == coordinator_address(str(folder.path)) == SECOND
    (folder.path / "coordinator.json").write_text(f'{{"address": "{FIRST}", "pid": 1}}')  # the older one was late
    assert found.now() == SECOND

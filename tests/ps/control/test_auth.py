"""The token of the control plane: who has none, or another one, gets nowhere; where it may lie."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardkeep.base.errors import ConfigError, RemoteError, UserError
from shardkeep.base.files import atomic_write
from shardkeep.proto import control_pb2 as pb
from shardkeep.ps.control.auth import metadata
from shardkeep.ps.control.channel import ControlChannel
from shardkeep.ps.control.client import ControlClient, fetch_status, report_death, request_stop
from shardkeep.ps.control.endpoint import Endpoint, make_token, read_token
from shardkeep.ps.control.quiet_grpc import grpc
from shardkeep.ps.control.server import ControlServer
from tests.ps.control.job import Job

LIMIT_S = 10.0
METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["Control"].methods]
STOP = "/shardkeep.control.Control/Stop"


@pytest.fixture
def server() -> Iterator[ControlServer]:
    with ControlServer(Job().coordinator) as server:
        yield server


def headers(server: ControlServer, name: str) -> tuple[tuple[str, str], ...]:
    """What a stranger may try."""
    right = metadata(server.endpoint.token)
    token = server.endpoint.token
    return {
        "none": (),
        "another": metadata(make_token()),
        "empty": (("authorization", ""),),
        "a part": metadata(token[:-1]),
        "more": metadata(token + "0"),
        "no scheme": (("authorization", token),),
        "another header": (("token", token),),
        "two": metadata(make_token()) + right,
        "twice": right + right,
    }[name]


STRANGERS = ["none", "another", "empty", "a part", "more", "no scheme", "another header", "two", "twice"]


@pytest.mark.parametrize("method", METHODS)
def test_no_call_is_answered_without_a_token(server: ControlServer, method: str) -> None:
    before = server.coordinator.status()
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary(f"/shardkeep.control.Control/{method}")
        with pytest.raises(grpc.RpcError) as refused:
            call(b"", timeout=LIMIT_S)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert server.coordinator.status() == before


@pytest.mark.parametrize("name", STRANGERS)
def test_a_job_is_not_stopped_by_who_has_not_just_its_token(server: ControlServer, name: str) -> None:
    with grpc.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(STOP)(b"", timeout=LIMIT_S, metadata=headers(server, name))
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert server.coordinator.state.state == "forming"
        channel.unary_unary(STOP)(b"", timeout=LIMIT_S, metadata=metadata(server.endpoint.token))
    assert server.coordinator.state.state in ("stopping", "stopped")


def test_members_and_people_with_a_wrong_token_are_told_so_in_one_line(server: ControlServer) -> None:
    stranger = Endpoint(server.address, make_token())
    told = rf"^the coordinator at {server.address} lets nobody in without the job's token: wrong token; it is in .*$"
    with ControlClient(stranger, role="worker", index=0) as client, pytest.raises(UserError, match=told):
        client.register()
    for call in (
        lambda: fetch_status(stranger),
        lambda: request_stop(stranger, "for fun"),
        lambda: report_death(stranger, role="worker", index=0, pid=1, reason="for fun"),
    ):
        with pytest.raises(UserError, match=told):
            call()


def test_a_stranger_is_refused_before_it_sends_anything_so_that_it_holds_no_thread(server: ControlServer) -> None:
    silence = threading.Event()

    def nothing() -> Iterator[bytes]:
        silence.wait(LIMIT_S)
        yield from ()

    with grpc.insecure_channel(server.address) as channel:
        calls = [channel.stream_stream(STOP)(nothing(), timeout=LIMIT_S) for _ in range(100)]
        try:
            assert {call.code() for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}
            assert fetch_status(server.endpoint, timeout_s=LIMIT_S).state == "forming"
        finally:
            silence.set()


def test_an_oversize_message_is_refused_and_the_coordinator_goes_on(server: ControlServer) -> None:
    request = pb.StopRequest(reason="x" * (5 << 20))
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(STOP)(request.SerializeToString(), timeout=LIMIT_S)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    channel = ControlChannel(server.endpoint)
    with pytest.raises(RemoteError, match=r"message larger than max \(\d+ vs\. 4194304\)"):
        channel.call("Stop", request, pb.JobState, timeout_s=LIMIT_S)
    channel.close()
    assert fetch_status(server.endpoint).state == "forming"


def test_the_log_tells_of_strangers_once_and_never_shows_a_token(
    server: ControlServer, caplog: pytest.LogCaptureFixture
) -> None:
    tried = make_token()
    for _ in range(3):
        with pytest.raises(UserError) as refused:
            fetch_status(Endpoint(server.address, tried))
    told = "".join(f"{record.getMessage()} {vars(record).get('fields')}\n" for record in caplog.records)
    assert told.count("call refused") <= 1  # another test of this process may have been first
    for text in (told, str(refused.value), repr(server.endpoint), str(server.endpoint), repr(Endpoint("a:1", tried))):
        assert tried not in text and server.endpoint.token not in text


# ---- where a token lies ----


def test_a_token_is_written_for_its_owner_alone_and_read_again(tmp_path: Path) -> None:
    path, token = tmp_path / "token", make_token()
    atomic_write(path, token + "\n", private=True)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_token(path) == token
    assert len(token) == 64 and token != make_token()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666], ids=oct)
def test_a_token_that_others_can_read_or_change_is_refused_like_ssh_does(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    atomic_write(path, make_token(), private=True)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"{path}: others can read or change it \(mode {mode:04o}\); chmod 600"):
        read_token(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize(("owner", "fits"), [(12345, False), (0, True)], ids=["a stranger's", "one's own"])
def test_a_token_of_another_user_is_refused(tmp_path: Path, owner: int, fits: bool) -> None:
    path = tmp_path / "token"
    atomic_write(path, make_token(), private=True)
    os.chown(path, owner, -1)
    if fits:
        assert read_token(path)
    else:
        with pytest.raises(ConfigError, match="belongs to another user"):
            read_token(path)


@pytest.mark.parametrize("text", ["", "short", "x" * 31, "a b" * 20, "ä" * 40, "x" * 600], ids=lambda text: text[:9])
def test_what_is_no_token_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    atomic_write(path, text, private=True)
    with pytest.raises(ConfigError, match="holds no token; allowed: one line of 32 to 512") as refused:
        read_token(path)
    assert not text or text not in str(refused.value)


def test_a_token_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"/none: cannot be read \(No such file or directory\)"):
        read_token(tmp_path / "none")

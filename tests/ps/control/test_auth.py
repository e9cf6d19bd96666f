"""The token of the control plane: who has none, or another one, gets nowhere; where it may lie."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.errors import ConfigError, ProtocolError, RemoteError, ShardkeepError, UserError
from shardkeep.base.files import atomic_write
from shardkeep.proto import control_pb2 as pb
from shardkeep.ps.control.grpc.channel import ControlChannel
from shardkeep.ps.control.grpc.client import ControlClient, fetch_status, report_death, request_stop
from shardkeep.ps.control.grpc.quiet_grpc import grpc
from shardkeep.ps.control.grpc.server import ControlServer
from shardkeep.trust.endpoint import Endpoint, make_token, read_token
from shardkeep.trust.proof import Call
from tests.support.cases import every
from tests.support.control_job import Job

LIMIT_S = 90.0
METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["Control"].methods]
STOP = "/shardkeep.control.Control/Stop"


@pytest.fixture
def server() -> Iterator[ControlServer]:
    with ControlServer(Job().coordinator) as server:
        yield server


def headers(server: ControlServer, name: str) -> tuple[tuple[str, str], ...]:
    """What a stranger may try for a Stop without a message."""
    token = server.endpoint.token
    right, wrong = (Call.make(known, STOP, b"").headers() for known in (token, make_token()))
    return {
        "none": (),
        "another": wrong,
        "empty": (("authorization", ""),),
        "a part": Call.make(token[:-1], STOP, b"").headers(),
        "more": Call.make(token + "0", STOP, b"").headers(),
        "the token": (("authorization", f"Bearer {token}"),),
        "another header": (("token", right[0][1]),),
        "two": wrong + right,
        "twice": right + right,
        "of another method": Call.make(token, STOP.replace("Stop", "Status"), b"").headers(),
        "of another message": Call.make(token, STOP, b"x").headers(),
        "a number changed": (("authorization", right[0][1].replace(" ", " 0", 1)),),
        "too many parts": (("authorization", right[0][1] + " 0"),),
        "not ASCII": (("authorization", right[0][1][:-1] + "~"),),
    }[name]


STRANGERS = [
    "none", "another", "empty", "a part", "more", "the token", "another header", "two", "twice", "of another method",
    "of another message", "a number changed", "too many parts", "not ASCII",
]  # fmt: skip


@every("method", METHODS)
def test_no_call_is_answered_without_a_token(server: ControlServer, method: str) -> None:
    before = server.coordinator.status()
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary(f"/shardkeep.control.Control/{method}")
        with pytest.raises(grpc.RpcError) as refused:
            call(b"", timeout=LIMIT_S)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert server.coordinator.status() == before


@every("name", STRANGERS)
def test_a_job_is_not_stopped_by_who_has_not_just_its_token(name: str) -> None:
    with ControlServer(Job().coordinator) as server, grpc.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(STOP)(b"", timeout=LIMIT_S, metadata=headers(server, name))
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert server.coordinator.state.state == "forming"
        right = Call.make(server.endpoint.token, STOP, b"").headers()
        channel.unary_unary(STOP)(b"", timeout=LIMIT_S, metadata=right)
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


# ---- a port that is not the coordinator's ----


class Impostor:
    """Listens where members were sent, answers every call as `behave` says, and keeps all that it was shown."""

    def __init__(self, behave: Callable[[str, bytes, Any], bytes]) -> None:
        self.shown = b""
        self._behave = behave
        self._pool = ThreadPoolExecutor(4)
        self._server = grpc.server(self._pool)
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def service(self, call: Any) -> Any:
        """As a GenericRpcHandler."""
        self.shown += repr(call.invocation_metadata).encode()

        def answer(message: bytes, context: Any) -> bytes:
            self.shown += message
            return self._behave(call.method, message, context)

        return grpc.unary_unary_rpc_method_handler(answer)

    def close(self) -> None:
        self._server.stop(None).wait()
        self._pool.shutdown()


def empty(_method: str, _message: bytes, _context: Any) -> bytes:
    return b""


def forged(_method: str, _message: bytes, context: Any) -> bytes:
    context.set_trailing_metadata((("shardkeep-proof", "0" * 64),))
    return pb.JobState(state="stopped").SerializeToString()


def stops_the_job(_method: str, _message: bytes, context: Any) -> bytes:
    context.abort(grpc.StatusCode.ALREADY_EXISTS, "stopped by nobody")
    return b""


@every("behave", [empty, forged, stops_the_job])
def test_a_port_that_is_not_the_coordinators_gets_no_token_and_is_not_believed(
    behave: Callable[[str, bytes, Any], bytes],
) -> None:
    """As where somebody changed the address in a run folder."""
    impostor, token = Impostor(behave), make_token()
    endpoint = Endpoint(impostor.address, token)
    told = rf"^{impostor.address} answers, but does not prove that it knows the job's token: it is not the job's coord"
    try:
        with ControlClient(endpoint, role="worker", index=0) as client, pytest.raises(UserError, match=told):
            client.register()
        for call in (
            lambda: fetch_status(endpoint),
            lambda: request_stop(endpoint, "for fun"),
            lambda: report_death(endpoint, role="worker", index=0, pid=1, reason="for fun"),
        ):
            with pytest.raises(UserError, match=told):
                call()
    finally:
        impostor.close()
    assert b"HMAC-SHA256" in impostor.shown
    assert token.encode() not in impostor.shown and bytes.fromhex(token) not in impostor.shown


def test_who_sits_between_can_change_neither_call_nor_answer_nor_refusal(server: ControlServer) -> None:
    changes = {"call": False, "answer": False, "refusal": False}

    def relay(method: str, message: bytes, context: Any) -> bytes:
        shown = [(key, value) for key, value in context.invocation_metadata() if key == "authorization"]
        message = pb.StopRequest(reason="another").SerializeToString() if changes["call"] else message
        with grpc.insecure_channel(server.address) as channel:
            try:
                reply, call = channel.unary_unary(method, None, None).with_call(message, metadata=shown)
            except grpc.RpcError as error:
                context.set_trailing_metadata(error.trailing_metadata())
                context.abort(error.code(), "changed" if changes["refusal"] else error.details())
        context.set_trailing_metadata(call.trailing_metadata())
        return pb.JobState(state="completed").SerializeToString() if changes["answer"] else reply

    between = Impostor(relay)
    endpoint = Endpoint(between.address, server.endpoint.token)
    try:
        assert fetch_status(endpoint).state == "forming"  # a tunnel, which only passes on, is none the wiser
        with pytest.raises(ProtocolError, match="install the same version everywhere"):
            ControlClient(endpoint, role="worker", index=99).register()
        changes["refusal"] = True
        with pytest.raises(UserError, match="does not prove"):
            ControlClient(endpoint, role="worker", index=99).register()
        changes["answer"] = True
        with pytest.raises(UserError, match="does not prove"):
            fetch_status(endpoint)
        changes["call"] = True
        with pytest.raises(UserError, match="lets nobody in without the job's token"):
            request_stop(endpoint, "for fun")
    finally:
        between.close()
    assert server.coordinator.state.state == "forming"


# ---- more strangers than the coordinator may open files for ----


DESCRIPTORS, CROWD = 128, 400
TOKEN = "t" * 32
COORDINATOR = f"""
import json, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))
from shardkeep.ps.control.grpc.server import ControlServer
from tests.support.control_job import Job
with ControlServer(Job().coordinator, token={TOKEN!r}) as server:
    print(json.dumps(server.address), flush=True)
    for line in sys.stdin:
        open("/dev/null").close()
        print("opened", flush=True)
"""


@pytest.fixture
def coordinator() -> Iterator[tuple[subprocess.Popen[str], Endpoint]]:
    process = subprocess.Popen(
        [sys.executable, "-c", COORDINATOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield process, Endpoint(json.loads(process.stdout.readline()), TOKEN)
    process.kill()
    process.communicate()


@pytest.mark.waits_for_processes
def test_members_get_in_and_files_can_be_opened_while_strangers_hold_connections(
    coordinator: tuple[subprocess.Popen[str], Endpoint],
) -> None:
    process, endpoint = coordinator
    assert process.stdin is not None and process.stdout is not None
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * CROWD:
        pytest.skip("this process itself may hold too few connections")
    host, _, port = endpoint.address.rpartition(":")
    with contextlib.ExitStack() as held:
        for _ in range(CROWD):
            stranger = held.enter_context(socket.socket())
            stranger.setblocking(False)
            stranger.connect_ex((host, int(port)))
        end = time.monotonic() + LIMIT_S
        while True:  # those that got in first keep others out until they had the time to speak
            try:
                assert fetch_status(endpoint, timeout_s=LIMIT_S).state == "forming"
                break
            except ShardkeepError as error:
                assert error.retryable and time.monotonic() < end, error
            time.sleep(0.05)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "opened\n"


# ---- where a token lies ----


def test_a_token_is_written_for_its_owner_alone_and_read_again(tmp_path: Path) -> None:
    path, token = tmp_path / "token", make_token()
    atomic_write(path, token + "\n", private=True)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_token(path) == token
    assert len(token) == 64 and token != make_token()


@every("mode", [0o640, 0o604, 0o620, 0o666], ids=oct)
def test_a_token_that_others_can_read_or_change_is_refused_like_ssh_does(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    atomic_write(path, make_token(), private=True)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"{path}: others can read or change it \(mode {mode:04o}\); chmod 600"):
        read_token(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@every(("owner", "fits"), [(12345, False), (0, True)], ids=["a stranger's", "one's own"])
def test_a_token_of_another_user_is_refused(tmp_path: Path, owner: int, fits: bool) -> None:
    path = tmp_path / "token"
    atomic_write(path, make_token(), private=True)
    os.chown(path, owner, -1)
    if fits:
        assert read_token(path)
    else:
        with pytest.raises(ConfigError, match="belongs to another user"):
            read_token(path)


@every("text", ["", "short", "x" * 31, "a b" * 20, "ä" * 40, "x" * 600], ids=lambda text: text[:9])
def test_what_is_no_token_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    with pytest.raises(ConfigError, match=r"/token: cannot be read \(No such file or directory\)"):
        read_token(path)
    atomic_write(path, text, private=True)
    with pytest.raises(ConfigError, match="holds no token; allowed: one line of 32 to 512") as refused:
        read_token(path)
    assert not text or text not in str(refused.value)

"""The token of the control plane: who has none, or another one, gets nowhere; where it may lie."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
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
from tests.support.forked import started

LIMIT_S = 90.0
METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["Control"].methods]
STOP = "/shardkeep.control.Control/Stop"


@pytest.fixture
def server() -> Iterator[ControlServer]:
    with ControlServer(Job().coordinator) as server:
        yield server


def headers(token: str) -> dict[str, tuple[tuple[str, str], ...]]:
    """What strangers may try for a Stop without a message."""
    right, wrong = (Call.make(known, STOP, b"").headers() for known in (token, make_token()))
    proof = right[0][1]
    return {
        "none": (),
        "another": wrong,
        "empty": (("authorization", ""),),
        "a part": Call.make(token[:-1], STOP, b"").headers(),
        "more": Call.make(token + "0", STOP, b"").headers(),
        "the token": (("authorization", f"Bearer {token}"),),
        "another header": (("token", proof),),
        "two": wrong + right,
        "twice": right + right,
        "of another method": Call.make(token, STOP.replace("Stop", "Status"), b"").headers(),
        "of another message": Call.make(token, STOP, b"x").headers(),
        "a number changed": (("authorization", proof.replace(" ", " 0", 1)),),
        "too many parts": (("authorization", proof + " 0"),),
        "not ASCII": (("authorization", proof[:-1] + "~"),),
    }


def test_no_call_is_answered_and_no_job_stopped_for_who_has_not_just_its_token(server: ControlServer) -> None:
    before = server.coordinator.status()
    calls = [(f"/shardkeep.control.Control/{method}", ()) for method in METHODS]
    calls += [(STOP, metadata) for metadata in headers(server.endpoint.token).values()]
    with grpc.insecure_channel(server.address) as channel:
        for method, metadata in calls:
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(method)(b"", timeout=LIMIT_S, metadata=metadata)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED, (method, metadata)
            assert server.coordinator.status() == before
        right = Call.make(server.endpoint.token, STOP, b"").headers()
        channel.unary_unary(STOP)(b"", timeout=LIMIT_S, metadata=right)
    assert server.coordinator.state.state in ("stopping", "stopped")


def check_refused(endpoint: Endpoint, text: str) -> None:
    """Every call of members and people ends with this line."""
    with ControlClient(endpoint, role="worker", index=0) as client:
        for call in (
            client.register,
            lambda: fetch_status(endpoint),
            lambda: request_stop(endpoint, "for fun"),
            lambda: report_death(endpoint, role="worker", index=0, pid=1, reason="for fun"),
        ):
            with pytest.raises(UserError, match=text):
                call()


def test_members_and_people_with_a_wrong_token_are_told_so_in_one_line_and_no_token_is_shown(
    server: ControlServer, caplog: pytest.LogCaptureFixture
) -> None:
    tried = make_token()
    stranger = Endpoint(server.address, tried)
    told = rf"^the coordinator at {server.address} lets nobody in without the job's token: wrong token; it is in .*$"
    check_refused(stranger, told)
    with pytest.raises(UserError) as refused:
        fetch_status(stranger)
    logged = "".join(f"{record.getMessage()} {vars(record).get('fields')}\n" for record in caplog.records)
    assert logged.count("call refused") <= 1  # another test of this process may have been first
    for text in (logged, str(refused.value), repr(server.endpoint), str(server.endpoint), repr(stranger)):
        assert tried not in text and server.endpoint.token not in text


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


def forged(_method: str, _message: bytes, context: Any) -> bytes:
    context.set_trailing_metadata((("shardkeep-proof", "0" * 64),))
    return pb.JobState(state="stopped").SerializeToString()


def stops_the_job(_method: str, _message: bytes, context: Any) -> bytes:
    context.abort(grpc.StatusCode.ALREADY_EXISTS, "stopped by nobody")
    return b""


@every("behave", [lambda *_call: b"", forged, stops_the_job])
def test_a_port_that_is_not_the_coordinators_gets_no_token_and_is_not_believed(
    behave: Callable[[str, bytes, Any], bytes],
) -> None:
    """As where somebody changed the address in a run folder."""
    impostor, token = Impostor(behave), make_token()
    told = rf"^{impostor.address} answers, but does not prove that it knows the job's token: it is not the job's coord"
    with closing(impostor):
        check_refused(Endpoint(impostor.address, token), told)
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

    with closing(Impostor(relay)) as between:
        endpoint = Endpoint(between.address, server.endpoint.token)
        stranger = ControlClient(endpoint, role="worker", index=99)
        assert fetch_status(endpoint).state == "forming"  # a tunnel, which only passes on, is none the wiser
        with pytest.raises(ProtocolError, match="install the same version everywhere"):
            stranger.register()
        changes["refusal"] = True
        with pytest.raises(UserError, match="does not prove"):
            stranger.register()
        changes["answer"] = True
        with pytest.raises(UserError, match="does not prove"):
            fetch_status(endpoint)
        changes["call"] = True
        with pytest.raises(UserError, match="lets nobody in without the job's token"):
            request_stop(endpoint, "for fun")
    assert server.coordinator.state.state == "forming"


# ---- more strangers than the coordinator may open files for ----


@pytest.mark.waits_for_processes
def test_members_get_in_and_files_can_be_opened_while_strangers_hold_connections() -> None:
    descriptors, crowd, token = 128, 250, make_token()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * crowd:
        pytest.skip("this process itself may hold too few connections")
    arguments, main = [str(descriptors), token], "tests.support.control_job:serve_with_few_descriptors"
    process = started(arguments, env={**os.environ}, cwd=Path.cwd(), main=main)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    with contextlib.ExitStack() as held:
        for pipe in (process.stdin, process.stdout, process.stderr):
            held.enter_context(pipe)
        held.callback(process.wait, LIMIT_S)
        held.callback(process.kill)
        endpoint = Endpoint(json.loads(process.stdout.readline()), token)
        host, _, port = endpoint.address.rpartition(":")
        for _ in range(crowd):
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
    with pytest.raises(ConfigError, match=r"/token: cannot be read \(No such file or directory\)"):
        read_token(path)
    atomic_write(path, token + "\n", private=True)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_token(path) == token
    assert len(token) == 64 and token != make_token()
    for mode in (0o640, 0o604, 0o620, 0o666):  # as ssh does
        path.chmod(mode)
        with pytest.raises(ConfigError, match=rf"{path}: others can read or change it \(mode {mode:04o}\); chmod 600"):
            read_token(path)
    if os.geteuid() == 0:  # only root gives files away
        path.chmod(0o600)
        os.chown(path, 12345, -1)
        with pytest.raises(ConfigError, match="belongs to another user"):
            read_token(path)


@every("text", ["", "short", "x" * 31, "a b" * 20, "ä" * 40, "x" * 600], ids=lambda text: text[:9])
def test_what_is_no_token_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    atomic_write(path, text, private=True)
    with pytest.raises(ConfigError, match="holds no token; allowed: one line of 32 to 512") as refused:
        read_token(path)
    assert not text or text not in str(refused.value)

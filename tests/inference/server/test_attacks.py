"""Requests of somebody who wants to harm a server: bounded time and memory, one printable line, and the next request is
answered."""

from __future__ import annotations

import gc
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import shardkeep
from shardkeep.base.errors import DataError
from shardkeep.inference.protocol.datatypes import NUMBERS, Values
from shardkeep.inference.server.served_model import Loaded, ServedModel
from shardkeep.inference.server.settings import ServerSettings
from shardkeep.proto import inference_pb2 as pb
from tests.support import first_requests
from tests.support.cases import every
from tests.support.served_clicks import as_bytes, as_json, as_typed, texts
from tests.support.serving import LIMIT_S, Server, call_on, raw_request, scores_of

ROWS = 5
Columns = dict[str, Values]


@pytest.fixture(scope="module")
def server(predictor: shardkeep.Predictor) -> Iterator[Server]:
    settings = ServerSettings("127.0.0.1:0", "127.0.0.1:0", most_bytes=8 << 20)
    with Server(ServedModel(predictor), settings) as server:
        yield server


@pytest.fixture(autouse=True)
def _answers_afterwards(server: Server) -> Iterator[None]:
    yield
    assert scores_of(server.infer(raw_request(as_typed(texts(ROWS))))).shape == (ROWS,)


def refusal(server: Server, request: Any) -> str:
    code, details = server.refusal(request)
    assert code == "INVALID_ARGUMENT" and details.isprintable() and len(details) <= 1000
    return details


@every("name", ["a\nb", "\x1b[31mred", "price\0", "\u2028"], ids=ascii)
def test_what_clients_write_comes_back_as_one_printable_line(server: Server, name: str) -> None:
    shown = name.encode("unicode_escape").decode()
    request = raw_request(as_typed(texts(ROWS)))
    request.inputs[0].name = name
    request.inputs[0].shape[:] = [-1]
    assert refusal(server, request).startswith(f"input {shown}: shape [-1]")
    request = raw_request(as_typed(texts(ROWS)) | {"price": [name.encode()] * ROWS})
    assert "row 1, column price" in refusal(server, request)
    inputs = as_json(as_typed(texts(ROWS)))
    inputs[0]["name"] = name + "\ud800"
    status, reply = server.post(inputs)
    assert status == 400 and reply["error"].isprintable()


def test_an_output_is_requested_once(server: Server) -> None:
    request = raw_request(as_typed(texts(ROWS)))
    for _ in range(20_000):
        request.outputs.add(name="score")
    assert refusal(server, request) == "output score: is requested twice"
    status, reply = server.post(as_json(as_typed(texts(ROWS))), outputs=[{"name": "score"}] * 1000)
    assert (status, reply["error"]) == (400, "output score: is requested twice")


def test_many_inputs_of_which_the_last_is_a_double_are_refused_at_once(server: Server) -> None:
    request = raw_request({f"c{number}": [b""] for number in range(16_000)} | {"last": [b""]})
    request.inputs.add().CopyFrom(request.inputs[-2])
    request.raw_input_contents.append(request.raw_input_contents[-1])
    began = time.process_time()
    assert refusal(server, request) == "input last: is in the request twice"
    assert time.process_time() - began < 4.0


def test_a_row_of_very_many_values_does_not_keep_probes_waiting(
    server: Server, predictor: shardkeep.Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = texts(1) | {"tags": ["|".join(f"t{number}" for number in range(100_000))]}
    begun, go, answers = threading.Event(), threading.Event(), Loaded.answers

    def held(*arguments: Any) -> Any:
        begun.set()
        assert go.wait(LIMIT_S)
        return answers(*arguments)

    monkeypatch.setattr(Loaded, "answers", held)
    with grpc.insecure_channel(server.addresses.grpc) as channel:
        stub = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )
        waiting = stub.future(raw_request(as_bytes(columns)), timeout=LIMIT_S)
        assert begun.wait(LIMIT_S)
        for _ in range(3):
            assert server.http("GET", "/v2/health/live")[0] == 200
            assert server.call("ServerLive", b"", pb.ServerLiveResponse).live
        assert not waiting.done()
        go.set()
        assert np.abs(scores_of(waiting.result()) - predictor.predict(columns)).max() < 1e-6


def sent(address: str, content: bytes) -> bytes:
    """What a server answers to bytes, until it closes the connection or has sent its first bytes."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as connection:
        try:
            connection.sendall(content)
            return connection.recv(65536)
        except (ConnectionResetError, BrokenPipeError):
            return b"closed"


POST = b"POST /v2/models/clicks/infer HTTP/1.1\r\nHost: x\r\n"
HEADS = [
    np.random.default_rng(3).bytes(5000),
    bytes(100_000),
    POST + b"Content-Length: -5\r\n\r\n{}",
    POST + b"Content-Length: 99999999999999999999\r\n\r\n{}",
    POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    POST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v2 HTTP/1.1\r\nX: " + b"a" * (8 << 20) + b"\r\n\r\n",
    b"GET /v2 HTTP/1.1\r\n" + b"X: a\r\n" * (1 << 20) + b"\r\n",
    b"GET /v2 HTTP/1.1\r\nX: " + b"a" * (8 << 20),  # a header without end
]


@every("content", HEADS)
def test_a_wrong_head_ends_its_connection(server: Server, content: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    answer = sent(str(server.addresses.http), content)
    assert answer == b"closed" or answer.startswith(b"HTTP/1.1 400 ")
    assert capfd.readouterr().err == "" and not logging.getLogger("uvicorn.error").isEnabledFor(logging.WARNING)


def test_bytes_that_are_no_http2_do_not_harm_the_port_of_grpc(server: Server) -> None:
    for content in (np.random.default_rng(4).bytes(5000), b"GET / HTTP/1.1\r\n\r\n", bytes(100_000)):
        sent(server.addresses.grpc, content)
        assert server.call("ServerLive", b"", pb.ServerLiveResponse).live


def test_clients_that_leave_and_connections_that_are_idle_do_no_harm(server: Server) -> None:
    host, port = str(server.addresses.http).rsplit(":", 1)
    body = json.dumps({"inputs": as_json(as_typed(texts(300)))}).encode()
    head = POST + b"Content-Length: %d\r\n\r\n" % len(body)
    for content in (head + body, head + body[:100], head):
        for _ in range(20):
            with socket.create_connection((host, int(port)), timeout=LIMIT_S) as connection:
                connection.sendall(content)
    idle = [socket.create_connection((host, int(port)), timeout=LIMIT_S) for _ in range(100)]
    assert server.post(as_json(as_typed(texts(ROWS))))[0] == 200
    for connection in idle:
        connection.close()


TEXTS = [
    b"", b"NaN", b"null", b"-1", b"1e400", b"inf", b"-inf", b"9" * 400, b"\xff\xfe", b"\0", b"a|b|c", b"|", b" ",
    b"1.5", b"9223372036854775808", b"true", b"2020-01-01", b"u1", b"7", b"x" * 70_000, b"\n", b"1e5", b"0x10",
    b"\xe2\x80\xa9",
]  # fmt: skip


def odd_values(count: int, chance: np.random.Generator) -> Values:
    """Odd texts, or the extreme numbers of a type."""
    if chance.random() < 0.4:
        return [TEXTS[at] for at in chance.integers(0, len(TEXTS), count)]
    dtype = list(NUMBERS.values())[int(chance.integers(0, len(NUMBERS)))]
    if dtype.kind == "b":
        return chance.integers(0, 2, count).astype(dtype)
    if dtype.kind == "f":
        most = float(np.finfo(dtype).max)
        return chance.choice(np.array([np.nan, np.inf, -np.inf, -0.0, 1.5, 7, most, 2.0**53 % most], dtype), count)
    limits = np.iinfo(dtype)
    return chance.choice(np.array([limits.min, limits.max, 0, 1, 7], dtype), count)


def odd_columns(columns: Columns, chance: np.random.Generator) -> Columns:
    """Columns; one to three are replaced, shorter, missing, or under the name of another form."""
    found = dict(columns)
    for _ in range(int(chance.integers(1, 4))):
        name = list(found)[int(chance.integers(0, len(found)))]
        kind, count = int(chance.integers(0, 6)), len(found[name])
        if kind <= 2:
            found[name] = odd_values(count, chance)
        elif kind == 3:
            found[name] = odd_values(int(chance.integers(0, 8)), chance)
        elif kind == 4 and len(found) > 1:
            del found[name]
        else:
            found[name.split(".")[0] + str(chance.choice([".values", ".lengths", ""]))] = odd_values(count, chance)
    return found


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.chaos)])
def test_odd_columns_are_scored_or_refused_and_never_a_failure_of_the_server(server: Server, count: int) -> None:
    chance, outcomes = np.random.default_rng(8), Counter[str]()
    forms = [as_typed(texts(ROWS)), as_bytes(texts(ROWS)), as_typed(texts(300))]
    expected = [scores_of(server.infer(raw_request(form))).copy() for form in forms]
    with grpc.insecure_channel(server.addresses.grpc) as channel:
        for _ in range(count):
            columns = odd_columns(forms[int(chance.integers(0, len(forms)))], chance)
            try:
                call_on(channel, "ModelInfer", raw_request(columns), pb.ModelInferResponse)
                outcomes["grpc OK"] += 1
            except grpc.RpcError as error:
                assert error.details().isprintable()  # type: ignore[attr-defined]
                outcomes[f"grpc {error.code().name}"] += 1  # type: ignore[attr-defined]
            status, reply = server.post_binary(columns)
            assert status == 200 or str(reply["error"]).isprintable()
            outcomes[f"http {status}"] += 1
    assert set(outcomes) == {"grpc OK", "grpc INVALID_ARGUMENT", "http 200", "http 400"}, outcomes
    for form, scores_N in zip(forms, expected, strict=True):
        assert np.array_equal(scores_of(server.infer(raw_request(form))), scores_N)


def test_a_number_beyond_64_bits_is_one_line_of_predict_too(predictor: shardkeep.Predictor) -> None:
    for column in ("price", "user", "tags"):
        for value in (2**64, [2**63, -1], -(2**70)):
            with pytest.raises(DataError, match=r"^[^\n]+$"):
                predictor.predict(texts(2) | {column: [value, value]})


# ---- the first request of each form ----


FORESEEN, LONGEST_S = [200, 400, 404, 405], 0.05
JOBS: dict[str, Any] = {"sequences": {"name": "din", "hidden": [4]}, "retrieval": {"name": "sasrec"}}


def test_every_form_of_request_is_answered_or_refused_within_milliseconds_of_the_event_loop(narrow: Path) -> None:
    with Server(ServedModel(shardkeep.load(narrow)), name="m") as server:
        gc.freeze()  # else a collection looks at what all tests have made
        try:
            with server.watched() as pauses:
                statuses = first_requests.statuses(server)
        finally:
            gc.unfreeze()
    assert sorted(statuses) == FORESEEN and max(pauses) < LONGEST_S


@pytest.mark.slow
@pytest.mark.waits_for_processes
def test_a_fresh_server_imports_nothing_in_a_request(clicks: Path, tmp_path: Path) -> None:
    for task, model in JOBS.items():
        source = f"shardkeep.examples.synthetic.{task}:samples"
        data = {"source": source, "options": {"rows": 500, "eval_rows": 100}}
        job = {"servers": 0, "workers": 1, "data": data, "model": model, "train": {"batch_size": 100, "max_steps": 2}}
        shardkeep.train(job | {"tables": {"default": {"dim": 4}}}, run_dir=tmp_path / task, quiet=True)
    command = [sys.executable, "-m", first_requests.__name__, str(clicks), *(str(tmp_path / task) for task in JOBS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(found) == 1 + len(JOBS), done.stderr
    for each in found:
        assert each["late"] == [] and each["longest_s"] < LONGEST_S and each["statuses"] == FORESEEN, each

"""`shardkeep serve` as a process: its first line, its metrics, its end, and its errors."""

from __future__ import annotations

import signal
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

import shardkeep
from shardkeep.proto import inference_pb2 as pb
from tests.support.cluster import Command
from tests.support.served_clicks import as_bytes, texts, trained, trained_once
from tests.support.serving import call_on, raw_request, scores_of

FREE = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_once(tmp_path_factory, name="shop")


@pytest.fixture
def command(run: Path) -> Iterator[Command]:
    command = Command("serve", str(run), *FREE, "--max-queue", "5000")
    try:
        yield command
    finally:
        command.kill()


def request_of(count: int) -> pb.ModelInferRequest:
    """Rows of users who have a row: a server logs it where many have none."""
    return raw_request(as_bytes(texts(count) | {"user": ["u1"] * count}), model="shop")


def metrics_of(web: str) -> str:
    with urllib.request.urlopen(f"http://{web}/metrics", timeout=90) as reply:
        return str(reply.read().decode())


def addresses(command: Command) -> tuple[str, str]:
    line = command.line("serving")
    return line.split("gRPC ")[1].split(",")[0], line.split("HTTP ")[1].strip()


@pytest.mark.waits_for_processes
def test_metrics_count_what_is_answered_and_sigterm_answers_what_waits_and_ends_with_0(command: Command) -> None:
    assert command.line("serving").startswith("serving shop, step ")
    address, web = addresses(command)
    with grpc.insecure_channel(address) as channel:
        for count in (2, 3):
            request = request_of(count)
            assert scores_of(call_on(channel, "ModelInfer", request, pb.ModelInferResponse)).shape == (count,)
        with pytest.raises(grpc.RpcError):
            call_on(channel, "ModelInfer", raw_request({}, model="shop"), pb.ModelInferResponse)
    lines = dict(line.rsplit(" ", 1) for line in metrics_of(web).splitlines() if not line.startswith("#"))
    assert lines['shardkeep_serve_requests_total{protocol="grpc"}'] == "2.0"
    assert lines['shardkeep_serve_rows_total{protocol="grpc"}'] == "5.0"
    assert lines['shardkeep_serve_errors_total{protocol="grpc",status="invalid"}'] == "1.0"
    assert lines['shardkeep_serve_request_seconds_count{protocol="grpc"}'] == "2.0"
    assert lines["shardkeep_serve_batch_rows_sum"] == "5.0" and lines["shardkeep_serve_queue_requests"] == "0.0"
    assert float(lines["shardkeep_serve_model_step"]) > 0 < float(lines["shardkeep_serve_model_age_seconds"]) < 6000
    check_sigterm(command, address)


def check_sigterm(command: Command, address: str) -> None:
    answered, refused = list[int](), list[str]()
    message = request_of(20).SerializeToString()
    first = threading.Event()

    def ask() -> None:
        with grpc.insecure_channel(address) as channel:
            while True:
                try:
                    reply = call_on(channel, "ModelInfer", message, pb.ModelInferResponse)
                except grpc.RpcError as error:
                    refused.append(error.code().name)  # type: ignore[attr-defined]
                    return
                answered.append(len(scores_of(reply)))
                first.set()

    clients = [threading.Thread(target=ask) for _ in range(4)]
    for client in clients:
        client.start()
    assert first.wait(60)
    command.signal(signal.SIGTERM)
    for client in clients:
        client.join(60)
    ended = command.end()
    assert (ended.code, ended.err) == (0, "")
    assert set(answered) == {20} and set(refused) <= {"UNAVAILABLE", "CANCELLED"}


@pytest.mark.chaos
@pytest.mark.waits_for_processes
def test_more_threads_score_the_same(tmp_path: Path) -> None:
    run, columns = trained(tmp_path, model={"name": "dlrm", "bottom": [64], "hidden": [512, 512]}), texts(600)
    expected_N, threads = shardkeep.load(run).predict(columns), dict[int, int]()
    for count in (1, 4):
        command = Command("serve", str(run), *FREE, "--name", "clicks", "--threads", str(count))
        try:
            with grpc.insecure_channel(addresses(command)[0]) as channel:
                for rows in (1, 200, 600):  # in the event loop, there too, and in the scoring thread
                    part = as_bytes({name: values[:rows] for name, values in columns.items()})
                    scores_N = scores_of(call_on(channel, "ModelInfer", raw_request(part), pb.ModelInferResponse))
                    assert np.abs(scores_N - expected_N[:rows]).max() < 1e-6
            threads[count] = command.process.num_threads()
        finally:
            command.kill()
    assert threads[4] >= threads[1] + 3


@pytest.mark.waits_for_processes
def test_a_run_that_begins_later_is_awaited_and_followed(run: Path, tmp_path: Path) -> None:
    later = tmp_path / "later"
    command = Command("serve", str(run), *FREE, "--follow", str(later))
    try:
        _, web = addresses(command)
        waiting = f"waiting: {later} does not exist yet; its first checkpoint replaces this model\n"
        assert command.line("waiting") == waiting
        assert "shardkeep_serve_model_step " in metrics_of(web)
        trained(tmp_path, run="later")
        steps = shardkeep.load(later).step
        assert command.line(f"step {steps}: ").startswith(f"step {steps}: read all rows")
    finally:
        command.kill()


def refusal_of(*arguments: str, fresh: bool = False) -> str:
    """The one line of a server that ends with 2."""
    command = Command("serve", *arguments, fresh=fresh)
    try:
        ended = command.end()
    finally:
        command.kill()
    assert ended.code == 2 and ended.err.count("\n") == 1, ended.err
    return ended.err


@pytest.mark.waits_for_processes
def test_wrong_options_end_with_2_and_one_line(run: Path, tmp_path: Path) -> None:
    cases: list[tuple[tuple[str, ...], str]] = [
        ((str(tmp_path), *FREE), "is not a run folder"),
        ((str(run), "--listen", "0.0.0.0:0"), "--listen 0.0.0.0: other machines may reach it"),
        ((str(run), "--http", "0.0.0.0:0"), "--http 0.0.0.0: other machines may reach it"),
        ((str(run), "--listen", "8001"), "address '8001' is not HOST:PORT"),
        ((str(run), *FREE, "--model", "7"), "there is no checkpoint of that step"),
        ((str(run), *FREE, "--token-file", str(tmp_path / "none")), "cannot be read"),
    ]
    for arguments, text in cases:
        assert text in refusal_of(*arguments)


@pytest.mark.waits_for_processes
@pytest.mark.parametrize("protocol", ["http", pytest.param("grpc", marks=pytest.mark.slow)])
def test_an_address_that_is_taken_ends_it_with_2_and_one_line(run: Path, protocol: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = f"127.0.0.1:{taken.getsockname()[1]}"
        where = (
            ["--listen", "127.0.0.1:0", "--http", used] if protocol == "http" else ["--listen", used, "--http", "off"]
        )
        # gRPC of the process that others are forked from prints its own errors
        assert f"cannot listen on {used}" in refusal_of(str(run), *where, fresh=protocol == "grpc")

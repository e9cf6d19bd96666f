"""`shardkeep serve` as a process: its first line, its metrics, its end, and its errors."""

from __future__ import annotations

import shutil
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
from shardkeep.base.deadlines import Deadline
from shardkeep.inference.server.served_model import ServedModel
from shardkeep.inference.server.settings import ServerSettings
from shardkeep.proto import inference_pb2 as pb
from tests.support.cluster import Command
from tests.support.served_clicks import as_bytes, texts, trained, trained_once
from tests.support.serving import Server, call_on, raw_request, scores_of

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
            request = raw_request(as_bytes(texts(count)), model="shop")
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
    message = raw_request(as_bytes(texts(20)), model="shop").SerializeToString()
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


@pytest.mark.slow
@pytest.mark.waits_for_processes
def test_more_threads_score_the_same(tmp_path: Path) -> None:
    run, columns = trained(tmp_path, model={"name": "dlrm", "bottom": [64], "hidden": [512, 512]}), texts(1500)
    expected_N, threads = shardkeep.load(run).predict(columns), dict[int, int]()
    for count in (1, 4):
        command = Command("serve", str(run), *FREE, "--name", "clicks", "--threads", str(count))
        try:
            with grpc.insecure_channel(addresses(command)[0]) as channel:
                for rows in (1, 200, 1500):  # in the event loop, there too, and in the scoring thread
                    part = as_bytes({name: values[:rows] for name, values in columns.items()})
                    scores_N = scores_of(call_on(channel, "ModelInfer", raw_request(part), pb.ModelInferResponse))
                    assert np.abs(scores_N - expected_N[:rows]).max() < 1e-6
            threads[count] = command.process.num_threads()
        finally:
            command.kill()
    assert threads[4] >= threads[1] + 3


@pytest.mark.chaos  # test_follow.py has it without a process
@pytest.mark.waits_for_processes
def test_a_checkpoint_that_cannot_be_followed_is_a_line_with_the_reason(run: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    rows = next((broken / "checkpoints").rglob("rows-*.safetensors"))
    rows.write_bytes(rows.read_bytes()[:100])
    command = Command("serve", str(run), *FREE, "--follow", str(broken))
    try:
        web, deadline = addresses(command)[1], Deadline(60.0)
        while not deadline.over:
            if "shardkeep_serve_follow_errors_total 1.0" in metrics_of(web):
                break
        command.signal(signal.SIGTERM)
        ended = command.end()
    finally:
        command.kill()
    assert ended.code == 0 and ended.err.count("\n") == 1
    assert "a checkpoint cannot be served level=warning" in ended.err and rows.name in ended.err


@pytest.mark.waits_for_processes
def test_a_run_that_begins_later_is_awaited_and_followed(run: Path, tmp_path: Path) -> None:
    later = tmp_path / "later"
    command = Command("serve", str(run), *FREE, "--follow", str(later))
    try:
        _, web = addresses(command)
        assert (
            command.line("waiting")
            == f"waiting: {later} does not exist yet; its first checkpoint replaces this model\n"
        )
        with urllib.request.urlopen(f"http://{web}/v2/health/ready", timeout=90) as reply:
            assert reply.status == 200
        trained(tmp_path, run="later")
        steps = shardkeep.load(later).step
        assert command.line(f"step {steps}: ").startswith(f"step {steps}: read all rows")
    finally:
        command.kill()


def one_line(command: Command) -> tuple[int, str]:
    try:
        ended = command.end()
    finally:
        command.kill()
    assert ended.err.count("\n") == 1, ended.err
    return ended.code, ended.err


@pytest.mark.waits_for_processes
def test_wrong_options_end_with_2_and_one_line(run: Path, tmp_path: Path) -> None:
    cases = [
        ((str(tmp_path), *FREE), "is not a run folder"),
        ((str(run), "--listen", "0.0.0.0:0"), "--listen 0.0.0.0: other machines may reach it"),
        ((str(run), "--http", "0.0.0.0:0"), "--http 0.0.0.0: other machines may reach it"),
        ((str(run), "--listen", "8001"), "address '8001' is not HOST:PORT"),
        ((str(run), *FREE, "--model", "7"), "there is no checkpoint of that step"),
        ((str(run), *FREE, "--token-file", str(tmp_path / "none")), "cannot be read"),
    ]
    for arguments, text in cases:
        code, line = one_line(Command("serve", *arguments))
        assert code == 2 and text in line, line


@pytest.mark.waits_for_processes
@pytest.mark.parametrize("protocol", ["http", pytest.param("grpc", marks=pytest.mark.slow)])
def test_an_address_that_is_taken_ends_it_with_2_and_one_line(run: Path, protocol: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = f"127.0.0.1:{taken.getsockname()[1]}"
        where = (
            ("--listen", "127.0.0.1:0", "--http", used) if protocol == "http" else ("--listen", used, "--http", "off")
        )
        # gRPC of the process that others are forked from prints its own errors
        code, line = one_line(Command("serve", str(run), *where, fresh=protocol == "grpc"))
        assert code == 2 and f"cannot listen on {used}" in line, line


def test_without_http_only_grpc_is_served(run: Path) -> None:
    with Server(ServedModel(shardkeep.load(run)), ServerSettings("127.0.0.1:0", None)) as server:
        assert server.addresses.http is None and server.call("ServerLive", b"", pb.ServerLiveResponse).live

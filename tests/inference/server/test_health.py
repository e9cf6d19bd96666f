"""What probes and proxies ask over gRPC: the health of the server, and its services by reflection."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import shardkeep
from shardkeep.inference.server.served_model import ServedModel
from shardkeep.inference.server.settings import ServerSettings
from shardkeep.web.access import Access
from tests.support.serving import LIMIT_S, Server

health = pytest.importorskip("grpc_health.v1.health_pb2")
stubs = pytest.importorskip("grpc_health.v1.health_pb2_grpc")
reflection = pytest.importorskip("grpc_reflection.v1alpha.reflection_pb2")
reflecting = pytest.importorskip("grpc_reflection.v1alpha.reflection_pb2_grpc")
SERVICE = "inference.GRPCInferenceService"


@pytest.fixture(scope="module")
def served(predictor: shardkeep.Predictor) -> ServedModel:
    return ServedModel(predictor)


@pytest.fixture(scope="module")
def channel(served: ServedModel) -> Iterator[grpc.Channel]:
    with Server(served) as server, grpc.insecure_channel(server.addresses.grpc) as channel:
        yield channel


def check(channel: grpc.Channel, service: str = "") -> Any:
    return stubs.HealthStub(channel).Check(health.HealthCheckRequest(service=service), timeout=LIMIT_S).status


def code_of(call: Any) -> grpc.StatusCode:
    """The code of a call that fails."""
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return raised.value.code()  # type: ignore[attr-defined, no-any-return]


def test_a_server_that_listens_is_serving_and_no_service_of_another_name(channel: grpc.Channel) -> None:
    assert check(channel) == check(channel, SERVICE) == health.HealthCheckResponse.SERVING
    assert code_of(lambda: check(channel, "other")) is grpc.StatusCode.NOT_FOUND


def test_a_watcher_learns_that_the_server_stops(served: ServedModel) -> None:
    with Server(served) as server, grpc.insecure_channel(server.addresses.grpc) as channel:
        states = stubs.HealthStub(channel).Watch(health.HealthCheckRequest(service=SERVICE), timeout=LIMIT_S)
        assert next(states).status == health.HealthCheckResponse.SERVING
        server.begin_stop()
        assert next(states).status == health.HealthCheckResponse.NOT_SERVING
        states.cancel()


def test_reflection_names_the_calls_of_the_protocol(channel: grpc.Channel) -> None:
    asked = [
        reflection.ServerReflectionRequest(list_services=""),
        reflection.ServerReflectionRequest(file_containing_symbol=SERVICE),
    ]
    stub = reflecting.ServerReflectionStub(channel)
    services, files = stub.ServerReflectionInfo(iter(asked), timeout=LIMIT_S)
    assert SERVICE in [service.name for service in services.list_services_response.service]
    assert any(b"ModelInfer" in file for file in files.file_descriptor_response.file_descriptor_proto)


def test_of_a_server_with_a_token_strangers_may_ask_for_its_health_alone(served: ServedModel, tmp_path: Path) -> None:
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text("t" * 40)
    settings = ServerSettings("127.0.0.1:0", None, Access.read(tmp_path / "token", None))
    with Server(served, settings) as server, grpc.insecure_channel(server.addresses.grpc) as channel:
        assert check(channel) == health.HealthCheckResponse.SERVING
        watch = stubs.HealthStub(channel).Watch(health.HealthCheckRequest(), timeout=LIMIT_S)
        info = reflecting.ServerReflectionStub(channel).ServerReflectionInfo(iter([]), timeout=LIMIT_S)
        for call in (watch, info):
            assert code_of(lambda call=call: next(call)) is grpc.StatusCode.UNAUTHENTICATED


def test_without_the_extra_a_server_serves_and_has_no_health(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "grpc_health.v1", None)
    with Server(served) as server, grpc.insecure_channel(server.addresses.grpc) as channel:
        assert code_of(lambda: check(channel)) is grpc.StatusCode.UNIMPLEMENTED
        assert server.http("GET", "/v2/health/ready")[0] == 200

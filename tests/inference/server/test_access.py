"""Who may call a server: tokens, TLS, addresses that other machines reach; and what probes ask over gRPC."""

from __future__ import annotations

import http.client
import json
import ssl
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import shardkeep
from shardkeep.base.errors import ConfigError
from shardkeep.inference.server.served_model import ServedModel
from shardkeep.inference.server.settings import ServerSettings
from shardkeep.proto import inference_pb2 as pb
from shardkeep.trust.certificates import make_certs
from shardkeep.web.access import Access
from tests.support.cases import every
from tests.support.logical_forms import optional
from tests.support.served_clicks import as_bytes, texts
from tests.support.serving import LIMIT_S, Server, call_on, raw_request

health, stubs = optional("grpc_health.v1.health_pb2"), optional("grpc_health.v1.health_pb2_grpc")
reflection = optional("grpc_reflection.v1alpha.reflection_pb2")
reflecting = optional("grpc_reflection.v1alpha.reflection_pb2_grpc")
TOKEN = "t" * 40
SERVICE = "inference.GRPCInferenceService"
needs_extra = pytest.mark.skipif(reflecting is None, reason="needs grpcio-health-checking and grpcio-reflection")


@pytest.fixture(scope="module")
def served(predictor: shardkeep.Predictor) -> ServedModel:
    return ServedModel(predictor)


@pytest.fixture(scope="module")
def by_token(tmp_path_factory: pytest.TempPathFactory) -> Access:
    path = tmp_path_factory.mktemp("token") / "token"
    path.touch(mode=0o600)
    path.write_text(TOKEN + "\n")
    return Access.read(path, None)


@pytest.fixture(scope="module")
def guarded(served: ServedModel, by_token: Access) -> Iterator[Server]:
    with Server(served, ServerSettings("127.0.0.1:0", "127.0.0.1:0", by_token)) as server:
        yield server


@every("shown", [None, "", "Bearer", f"Bearer {TOKEN[1:]}", f"Basic {TOKEN}", "Bearer \u00fc"])
def test_a_call_without_the_token_is_refused(guarded: Server, shown: str | None) -> None:
    headers = {} if shown is None else {"Authorization": shown}
    status, _, body = guarded.http("GET", "/v2", headers={k: v.encode("latin-1") for k, v in headers.items()})  # type: ignore[misc]
    assert status == 401 and "authorization: Bearer TOKEN" in json.loads(body)["error"]
    assert guarded.http("GET", "/metrics")[0] == 401
    metadata = [] if shown is None or not shown.isascii() else [("authorization", shown)]
    for method, request in (("ServerLive", b""), ("ModelInfer", raw_request(as_bytes(texts(1))))):
        assert guarded.refusal(request, method, metadata=metadata)[0] == "UNAUTHENTICATED"


def test_a_call_with_the_token_is_answered_and_liveness_and_readiness_need_none(guarded: Server) -> None:
    metadata = [("authorization", f"Bearer {TOKEN}")]
    assert guarded.infer(raw_request(as_bytes(texts(3))), metadata=metadata).outputs[0].shape == [3]
    assert guarded.http("GET", "/v2", headers={"authorization": f"Bearer {TOKEN}"})[0] == 200
    assert guarded.http("GET", "/v2/health/live")[0] == guarded.http("GET", "/v2/health/ready")[0] == 200


@every("host", ["0.0.0.0", "[::]", "example.org", "10.0.0.1"])
def test_an_address_that_others_reach_needs_a_token_or_tls(host: str, by_token: Access) -> None:
    for settings in (ServerSettings(f"{host}:1"), ServerSettings(http=f"{host}:1")):
        with pytest.raises(
            ConfigError, match=r"other machines may reach it; allowed: 127\.0\.0\.1, or any address with"
        ):
            settings.check()
    ServerSettings(f"{host}:1", f"{host}:1", by_token).check()


def test_with_tls_only_peers_of_the_authority_are_answered(served: ServedModel, tmp_path: Path) -> None:
    (host,) = make_certs(tmp_path / "tls", ["localhost,127.0.0.1"], days=1)
    (other,) = make_certs(tmp_path / "other", ["localhost,127.0.0.1"], days=1)
    settings = ServerSettings("127.0.0.1:0", "127.0.0.1:0", Access.read(None, host))
    with Server(served, settings) as server:
        for own, answered in ((host, True), (other, False), (None, False)):
            assert over_grpc(server, host, own) == over_http(server, host, own) == answered


def over_grpc(server: Server, authority: Path, own: Path | None) -> bool:
    """Whether a peer with a certificate of its own, or none, is answered."""
    pair = (None, None) if own is None else ((own / "key.pem").read_bytes(), (own / "cert.pem").read_bytes())
    credentials = grpc.ssl_channel_credentials((authority / "ca.pem").read_bytes(), *pair)
    with grpc.secure_channel(server.addresses.grpc, credentials) as channel:
        try:
            return bool(call_on(channel, "ServerLive", b"", pb.ServerLiveResponse).live)
        except grpc.RpcError:
            return False


def over_http(server: Server, authority: Path, own: Path | None) -> bool:
    context = ssl.create_default_context(cafile=str(authority / "ca.pem"))
    if own is not None:
        context.load_cert_chain(own / "cert.pem", own / "key.pem")
    connection = http.client.HTTPSConnection(str(server.addresses.http), timeout=LIMIT_S, context=context)
    try:
        connection.request("GET", "/v2")
        return connection.getresponse().status == 200
    except (ssl.SSLError, OSError):
        return False
    finally:
        connection.close()


def test_a_server_without_http_is_asked_over_grpc_alone(served: ServedModel) -> None:
    with Server(served, ServerSettings("127.0.0.1:0", None)) as server:
        assert server.addresses.http is None and server.call("ServerLive", b"", pb.ServerLiveResponse).live


# ---- the health of a server, and its services by reflection ----


def health_of(channel: grpc.Channel, service: str = "") -> Any:
    return stubs.HealthStub(channel).Check(health.HealthCheckRequest(service=service), timeout=LIMIT_S).status


def code_of(call: Callable[[], Any]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return raised.value.code()  # type: ignore[attr-defined, no-any-return]


@needs_extra
def test_a_server_is_serving_until_it_stops_and_names_its_calls(served: ServedModel) -> None:
    asked = [
        reflection.ServerReflectionRequest(list_services=""),
        reflection.ServerReflectionRequest(file_containing_symbol=SERVICE),
    ]
    with Server(served) as server, grpc.insecure_channel(server.addresses.grpc) as channel:
        assert health_of(channel) == health_of(channel, SERVICE) == health.HealthCheckResponse.SERVING
        assert code_of(lambda: health_of(channel, "other")) is grpc.StatusCode.NOT_FOUND
        stub = reflecting.ServerReflectionStub(channel)
        services, files = stub.ServerReflectionInfo(iter(asked), timeout=LIMIT_S)
        assert SERVICE in [service.name for service in services.list_services_response.service]
        assert any(b"ModelInfer" in file for file in files.file_descriptor_response.file_descriptor_proto)
        states = stubs.HealthStub(channel).Watch(health.HealthCheckRequest(service=SERVICE), timeout=LIMIT_S)
        assert next(states).status == health.HealthCheckResponse.SERVING
        server.begin_stop()
        assert next(states).status == health.HealthCheckResponse.NOT_SERVING
        states.cancel()


@needs_extra
def test_of_a_server_with_a_token_strangers_may_ask_for_its_health_alone(guarded: Server) -> None:
    with grpc.insecure_channel(guarded.addresses.grpc) as channel:
        assert health_of(channel) == health.HealthCheckResponse.SERVING
        watch = stubs.HealthStub(channel).Watch(health.HealthCheckRequest(), timeout=LIMIT_S)
        info = reflecting.ServerReflectionStub(channel).ServerReflectionInfo(iter([]), timeout=LIMIT_S)
        for call in (watch, info):
            assert code_of(lambda call=call: next(call)) is grpc.StatusCode.UNAUTHENTICATED


@needs_extra
def test_without_the_extra_a_server_serves_and_has_no_health(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "grpc_health.v1", None)
    with Server(served) as server, grpc.insecure_channel(server.addresses.grpc) as channel:
        assert code_of(lambda: health_of(channel)) is grpc.StatusCode.UNIMPLEMENTED
        assert server.http("GET", "/v2/health/ready")[0] == 200

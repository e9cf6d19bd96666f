"""Who may call a server: tokens, TLS, addresses that other machines reach."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator
from pathlib import Path

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
from tests.support.served_clicks import as_bytes, texts
from tests.support.serving import LIMIT_S, Server, call_on, raw_request

TOKEN = "t" * 40


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
        assert _over_grpc(server, host, host) and _over_http(server, host, host)
        assert not _over_grpc(server, host, other) and not _over_http(server, host, other)
        assert not _over_grpc(server, host, None) and not _over_http(server, host, None)


def _over_grpc(server: Server, authority: Path, own: Path | None) -> bool:
    pair = (None, None) if own is None else ((own / "key.pem").read_bytes(), (own / "cert.pem").read_bytes())
    credentials = grpc.ssl_channel_credentials((authority / "ca.pem").read_bytes(), *pair)
    with grpc.secure_channel(server.addresses.grpc, credentials) as channel:
        try:
            return bool(call_on(channel, "ServerLive", b"", pb.ServerLiveResponse).live)
        except grpc.RpcError:
            return False


def _over_http(server: Server, authority: Path, own: Path | None) -> bool:
    context = ssl.create_default_context(cafile=str(authority / "ca.pem"))
    if own is not None:
        context.load_cert_chain(own / "cert.pem", own / "key.pem")
    assert server.addresses.http is not None
    connection = http.client.HTTPSConnection(server.addresses.http, timeout=LIMIT_S, context=context)
    try:
        connection.request("GET", "/v2")
        return connection.getresponse().status == 200
    except (ssl.SSLError, OSError):
        return False
    finally:
        connection.close()

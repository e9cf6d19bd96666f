"""Metrics of roles that are started by hand with TLS: every endpoint wants a certificate and the view token."""

from __future__ import annotations

import json
import ssl
from pathlib import Path

import pytest

from shardkeep.base.files import atomic_write
from shardkeep.trust.certificates import LOCAL, make_certs
from shardkeep.trust.endpoint import make_token
from shardkeep.trust.view import view_token
from tests.support.cluster import Cluster, within
from tests.support.configs import ENDLESS
from tests.support.http_get import get

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.chaos]
JOB = {**ENDLESS, "servers": 1, "workers": 1, "telemetry": {"every_s": 0.5}, "web": {"metrics": "127.0.0.1:0"}}


def test_with_tls_every_endpoint_wants_a_certificate_and_the_view_token(cluster: Cluster, tmp_path: Path) -> None:
    (here,) = make_certs(tmp_path / "tls", [LOCAL], days=2)
    token, file = make_token(), tmp_path / "job.token"
    atomic_write(file, token + "\n", private=True)
    trust = ("--token-file", str(file), "--tls", str(here))
    coordinator, address, folder = cluster.coordinator(JOB, trust=trust)
    for role in ("server", "worker"):
        place = ("--coordinator", address, "--index", "0", "--run-dir", str(tmp_path), *trust)
        cluster.command(role, *place)
    cluster.training(folder)

    line = json.loads(coordinator.line("{"))
    assert Path(line["view_token_file"]).read_text() == view_token(token)
    targets = line["metrics"].replace("/metrics", "/sd")
    context = ssl.create_default_context(cafile=here / "ca.pem")
    context.load_cert_chain(here / "cert.pem", here / "key.pem")

    def groups() -> list[dict[str, dict[str, str]]]:
        return list(json.loads(get(targets, view_token(token), tls=context).body))

    within(60, lambda: len(groups()) == 3, "not all of three processes are targets", lambda: True)
    for group in groups():
        assert group["labels"]["__scheme__"] == "https"
        url = f"https://{group['targets'][0]}/metrics"
        assert "shardkeep_build_info" in get(url, view_token(token), tls=context).text
        assert get(url, token, tls=context).status == 401, "the job's own token is for nobody's eyes"
        with pytest.raises(OSError):
            get(url, view_token(token), tls=ssl.create_default_context(cafile=here / "ca.pem"))

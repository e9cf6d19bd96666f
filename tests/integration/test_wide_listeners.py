"""Metrics and the page on addresses that other machines reach, and with TLS: who gets in, and what is printed."""

from __future__ import annotations

import json
import socket
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from shardkeep.base.files import atomic_write
from shardkeep.base.net.addresses import join_address
from shardkeep.base.net.interfaces import named_host
from shardkeep.page.of_job import page_line
from shardkeep.trust.certificates import LOCAL, make_certs
from shardkeep.trust.endpoint import make_token
from shardkeep.trust.view import view_token
from tests.support.cluster import Cluster, within
from tests.support.configs import ENDLESS
from tests.support.http_get import get
from tests.support.pages import PageAddress

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.chaos]
JOB: dict[str, Any] = {**ENDLESS, "workers": 1, "telemetry": {"every_s": 0.5}}
NAME = named_host("0.0.0.0")


def own_hosts(family: socket.AddressFamily) -> list[str]:
    """The addresses of this machine's interfaces that other machines may reach."""
    found = [a.address for each in psutil.net_if_addrs().values() for a in each if a.family == family]
    return [host for host in found if host not in ("127.0.0.1", "::1") and not host.startswith("fe80")]


OWN, OWN_6 = (next(iter(own_hosts(family)), "") for family in (socket.AF_INET, socket.AF_INET6))


@pytest.mark.parametrize(
    ("listen", "shown", "hosts"),
    [
        pytest.param("0.0.0.0", NAME, ["127.0.0.1", OWN], id="0.0.0.0"),
        pytest.param("::", NAME, ["127.0.0.1", "::1", OWN, OWN_6], id="[::]"),
        pytest.param(OWN, OWN, [OWN], id="own address"),
        pytest.param(OWN_6, OWN_6, [OWN_6], id="own address of IPv6"),
    ],
)
@pytest.mark.parametrize("servers", [0, 1], ids=["one process", "processes"])
def test_who_shows_the_view_token_reaches_page_and_metrics_of_every_process(
    cluster: Cluster, servers: int, listen: str, shown: str, hosts: list[str]
) -> None:
    if not listen:
        pytest.skip("this machine has no such address")
    wide = join_address(listen, 0)
    job, folder = cluster.job({**JOB, "servers": servers, "web": {"page": wide, "metrics": wide}})
    job.line("page")
    page = PageAddress(page_line(folder.path) or "")
    cluster.training(folder)
    assert page.place[0] == shown.lower()
    targets = next(word for word in job.line("metrics").split() if word.rstrip(";").endswith("/sd")).rstrip(";")
    assert urlsplit(targets).hostname == shown.lower()

    def listed() -> list[str]:
        return [group["targets"][0] for group in json.loads(get(targets, page.token).body)]

    within(60, lambda: len(listed()) == (3 if servers else 1), "not all processes are targets", lambda: job.running)
    metrics = [urlsplit(f"http://{target}") for target in listed()]
    assert {each.hostname for each in metrics} == {shown.lower()}
    for host in (shown, *filter(None, hosts)):
        served = [(page.place[1], "state"), *((each.port or 0, "metrics") for each in metrics)]
        for port, path in served:
            url = f"http://{join_address(host, port)}/"
            assert get(f"{url}ready").status == 200
            assert get(f"{url}{path}").status == 401
            assert get(f"{url}{path}", page.token + "0").status == 401
            assert get(f"{url}{path}", page.token).status == 200, url


def test_with_tls_every_endpoint_wants_a_certificate_and_the_view_token(cluster: Cluster, tmp_path: Path) -> None:
    (here,) = make_certs(tmp_path / "tls", [LOCAL], days=2)
    token, file = make_token(), tmp_path / "job.token"
    atomic_write(file, token + "\n", private=True)
    trust = ("--token-file", str(file), "--tls", str(here))
    coordinator, address, folder = cluster.coordinator({**JOB, "web": {"metrics": "127.0.0.1:0"}}, trust=trust)
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

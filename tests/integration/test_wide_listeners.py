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


def own_host(family: socket.AddressFamily) -> list[str]:
    """An address of this machine's interfaces that other machines may reach, if there is one."""
    found = [a.address for each in psutil.net_if_addrs().values() for a in each if a.family == family]
    return [host for host in found if host not in ("127.0.0.1", "::1") and not host.startswith("fe80")][:1]


OWN = [*own_host(socket.AF_INET), *own_host(socket.AF_INET6)]
HOSTS = {"0.0.0.0": ["127.0.0.1", *own_host(socket.AF_INET)], "::": ["127.0.0.1", "::1", *OWN], **{h: [h] for h in OWN}}
"""By address to listen on: those at which it answers, beside the one that is shown."""


@pytest.mark.parametrize(("listen", "servers"), [*((listen, 1) for listen in HOSTS), ("0.0.0.0", 0)])
def test_who_shows_the_view_token_reaches_page_and_metrics_of_every_process(
    cluster: Cluster, servers: int, listen: str
) -> None:
    wide, shown = join_address(listen, 0), listen if listen in OWN else named_host("0.0.0.0")
    job, folder = cluster.job({**JOB, "servers": servers, "web": {"page": wide, "metrics": wide}})
    job.line("page")
    page = PageAddress(page_line(folder.path) or "")
    cluster.training(folder)
    targets = next(word for word in job.line("metrics").split() if word.rstrip(";").endswith("/sd")).rstrip(";")

    def listed() -> list[str]:
        return [group["targets"][0] for group in json.loads(get(targets, page.token).body)]

    within(60, lambda: len(listed()) == (3 if servers else 1), "not all processes are targets", lambda: job.running)
    metrics = [urlsplit(f"http://{target}") for target in listed()]
    told = {page.place[0], urlsplit(targets).hostname, *(each.hostname for each in metrics)}
    assert told == {shown.lower()}
    served = [(page.place[1], "state"), *((each.port or 0, "metrics") for each in metrics)]
    for host in (shown, *HOSTS[listen]):
        for port, path in served:
            url = f"http://{join_address(host, port)}/"
            assert get(f"{url}ready").status == 200
            assert [get(f"{url}{path}", *token).status for token in ((), (page.token + "0",))] == [401, 401]
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
    stopped = cluster.command("stop", str(folder.path), *trust).end()
    assert stopped.code == 0 and stopped.out.startswith("stopped at step "), stopped

"""Metrics and the page on addresses that other machines reach: who gets in, and which addresses are printed.

All connections are to addresses of this machine."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from shardkeep.base.net.addresses import join_address
from shardkeep.base.net.interfaces import named_host
from shardkeep.page.of_job import page_line
from tests.support.cluster import Cluster, within
from tests.support.configs import ENDLESS
from tests.support.http_get import get
from tests.support.pages import PageAddress

pytestmark = pytest.mark.waits_for_processes
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
@pytest.mark.chaos
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

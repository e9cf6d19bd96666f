"""Addresses: what members may advertise, and what needs a word of acceptance."""

from __future__ import annotations

import pytest

from shardkeep.base.errors import ConfigError
from shardkeep.ps.control.grpc.addresses import check_advertised, check_exposed


@pytest.mark.parametrize("coordinator", ["10.9.0.1", "node1", "fd00::2"])
@pytest.mark.parametrize("advertise", ["127.0.0.1", "127.0.1.1", "localhost", "::1"])
def test_loopback_is_refused_where_the_coordinator_may_be_on_another_machine(advertise: str, coordinator: str) -> None:
    with pytest.raises(ConfigError, match=f"--advertise {advertise}: the coordinator is at {coordinator}"):
        check_advertised(advertise, coordinator=coordinator)


@pytest.mark.parametrize(
    ("advertise", "coordinator"),
    [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "localhost"), ("10.9.0.2", "10.9.0.1"), ("10.9.0.2", "127.0.0.1")],
)
def test_other_addresses_are_taken_as_they_are(advertise: str, coordinator: str) -> None:
    check_advertised(advertise, coordinator=coordinator)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.9.0.1", "node1", "8.8.8.8", "127.0.0.1.example.org"])
def test_an_address_that_others_may_reach_must_be_accepted(host: str) -> None:
    with pytest.raises(ConfigError, match=f"--listen {host}: other machines may reach it, .* --insecure-data-plane"):
        check_exposed("--listen", host, accepted=False)
    check_exposed("--listen", host, accepted=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "localhost", "::1"])
def test_loopback_needs_no_acceptance(host: str) -> None:
    check_exposed("--listen", host, accepted=False)

"""Addresses: what members may advertise."""

from __future__ import annotations

import pytest

from shardkeep.base.errors import ConfigError
from shardkeep.ps.control.addresses import check_advertised


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

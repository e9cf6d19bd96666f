"""Sockets that listen: on which addresses others reach them, and what is refused."""

from __future__ import annotations

import socket

import pytest

from shardkeep.base.errors import ConfigError
from shardkeep.base.net.addresses import listening_socket
from tests.support.cases import every


@every(
    ("host", "reached"),
    [
        ("127.0.0.1", ["127.0.0.1"]),
        ("::1", ["::1"]),
        ("0.0.0.0", ["127.0.0.1"]),
        ("::", ["127.0.0.1", "::1"]),
    ],
)
def test_a_socket_is_reached_by_its_host(host: str, reached: list[str]) -> None:
    with listening_socket(host, 0, backlog=4) as listener:
        for peer in reached:
            with socket.create_connection((peer, listener.getsockname()[1]), timeout=90):
                connection, _ = listener.accept()
                assert connection.proto == socket.IPPROTO_TCP, "asyncio then sends without a delay"
                connection.close()
        for peer in {"127.0.0.1", "::1"} - {*reached}:
            with pytest.raises(OSError):
                socket.create_connection((peer, listener.getsockname()[1]), timeout=90)


@every(
    ("host", "why"),
    [
        ("192.0.2.77", "Cannot assign requested address"),
        ("2001:db8::77", "Cannot assign requested address"),
        ("nowhere.invalid", "Name or service not known|Temporary failure in name resolution"),
        ("a" * 64 + ".b", "that is no host"),
    ],
)
def test_a_host_that_is_not_this_machine_s_is_refused_with_the_reason(host: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on .*:0: ({why})$"):
        listening_socket(host, 0, backlog=1)


@every("second", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_port_that_is_taken_is_refused_on_every_address_that_includes_it(second: str) -> None:
    with listening_socket("127.0.0.1", 0, backlog=1) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match="Address already in use"):
            listening_socket(second, port, backlog=1)

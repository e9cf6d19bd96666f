"""Addresses: what a host means now, what needs a word of acceptance, where nobody could listen, and sockets that do."""

from __future__ import annotations

import socket

import pytest

from shardkeep.base.errors import ConfigError
from shardkeep.base.net.addresses import check_exposed, check_listen, is_loopback, listening_socket, resolve
from tests.support.cases import every
from tests.support.names import know_names


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that knows these names alone."""
    known = {"debian": ["127.0.1.1"], "far": ["10.77.0.1"], "both": ["fd77::1", "10.77.0.1", "fd77::2", "10.77.0.1"]}
    know_names(monkeypatch, known | {"half": ["127.0.0.1", "10.9.0.1"], "nobody": [], "127.0.0.1.example.org": []})


def test_an_address_that_others_may_reach_must_be_accepted_and_loopback_needs_no_acceptance() -> None:
    for host in ("0.0.0.0", "::", "10.9.0.1", "nobody", "8.8.8.8", "far", "half", "127.0.0.1.example.org"):
        with pytest.raises(ConfigError, match=f"--listen {host}: other machines may reach it, .* --insecure-data-plan"):
            check_exposed("--listen", host, accepted=False)
        check_exposed("--listen", host, accepted=True)
    for host in ("127.0.0.1", "127.3.2.1", "localhost", "::1", "debian"):
        check_exposed("--listen", host, accepted=False)
    with pytest.raises(ConfigError, match=r"advertise 10\.9\.0\.1: .* accept it by insecure_data_plane=True"):
        check_exposed("advertise", "10.9.0.1", accepted=False)


def test_a_host_has_its_addresses_of_ipv4_first_or_says_why_it_has_none() -> None:
    assert resolve("both") == ("10.77.0.1", "fd77::1", "fd77::2")
    for host, why in (("nobody", "Name or service not known"), ("a" * 64 + ".b", "that is no host")):
        with pytest.raises(OSError) as none:
            resolve(host)
        assert none.value.strerror == why and not is_loopback(host)


def test_a_machine_s_name_that_only_the_machine_reaches_is_no_place_to_listen() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on debian:7070: this name is 127\.0\.1\.1 here, .* 0\.0\.0"):
        check_listen("debian", 7070)
    with pytest.raises(ConfigError, match="cannot listen on nobody:7070: Name or service not known"):
        check_listen("nobody", 7070)
    for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "far"):
        check_listen(host, 7070)


@every(
    ("host", "reached"),
    [("127.0.0.1", ["127.0.0.1"]), ("::1", ["::1"]), ("0.0.0.0", ["127.0.0.1"]), ("::", ["127.0.0.1", "::1"])],
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
        ("nobody", "Name or service not known"),
        ("a" * 64 + ".b", "that is no host"),
    ],
)
def test_a_host_that_is_not_this_machine_s_is_refused_with_the_reason(host: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on .*:0: {why}$"):
        listening_socket(host, 0, backlog=1)


@every("second", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_port_that_is_taken_is_refused_on_every_address_that_includes_it(second: str) -> None:
    with listening_socket("127.0.0.1", 0, backlog=1) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match="Address already in use"):
            listening_socket(second, port, backlog=1)

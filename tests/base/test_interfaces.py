"""What a member announces: an address of this machine that the other members reach."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from shardkeep.base.errors import ConfigError
from shardkeep.base.net import interfaces
from shardkeep.base.net.addresses import check_exposed, check_listen, is_loopback, listening_socket, resolve
from shardkeep.base.net.interfaces import ROUTE, announced, check_advertised, named_host, own_address, route_to
from tests.support.cases import every
from tests.support.names import know_names

NAMES = {"debian": ["127.0.1.1"], "own": ["10.77.0.1"], "six": ["fd77::1"], "both": ["fd77::1", "10.77.0.1"], "no": []}
CARDS = {
    "lo": ["127.0.0.1", "::1", "10.78.0.3"],
    "wifi0": ["192.168.5.5"],
    "eth0": ["10.77.0.1", "fd77::1"],
    "eth1": ["fd88::1"],
}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    know_names(monkeypatch, NAMES)

    def family(address: str) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in address else socket.AF_INET

    cards = {name: [SimpleNamespace(family=family(a), address=a) for a in own] for name, own in CARDS.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: cards)


def test_an_address_has_an_interface() -> None:
    for interface, hosts in {
        "lo": ("127.0.0.1", "127.0.1.1", "::1", "localhost", "debian", "10.78.0.3"),
        "eth0": ("10.77.0.1", "own", "six", "both"),
        "eth1": ("fd88::1",),
    }.items():
        assert {own_address(host)[1] for host in hosts} == {interface}


def test_a_host_that_is_not_this_machine_is_refused_at_once_in_one_line() -> None:
    for host in ("192.0.2.77", "fd77::2", "0.0.0.0"):
        with pytest.raises(
            ConfigError, match=f"^--advertise {host}: no network interface of this machine has the addr"
        ):
            check_advertised("--advertise", host, accepted=True)
    with pytest.raises(ConfigError, match=r"^--advertise no: this name has no address .Name or service not known.$"):
        check_advertised("--advertise", "no", accepted=True)


@every(
    ("advertise", "coordinator", "address"),
    [
        ("127.0.0.1", ["127.0.0.1"], "127.0.0.1"),
        ("127.0.0.1", ["10.77.0.2", "127.0.0.1"], "127.0.0.1"),
        ("10.77.0.1", ["127.0.0.1"], "10.77.0.1"),
        ("own", ["10.77.0.2"], "10.77.0.1"),
        ("both", ["10.77.0.2"], "10.77.0.1"),
        ("six", ["fd77::2"], "fd77::1"),
        ("debian", ["127.0.0.1"], "127.0.1.1"),
        ("10.78.0.3", ["10.77.0.1"], "10.78.0.3"),
    ],
)
def test_a_member_announces_the_address_of_its_host(advertise: str, coordinator: list[str], address: str) -> None:
    assert announced(advertise, coordinator=coordinator) == address


def test_a_name_that_is_loopback_here_stands_for_the_way_to_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_advertised("--advertise", "debian", accepted=True) == ROUTE
    assert check_advertised("--advertise", "debian", accepted=False) == "debian"
    for host in ("127.0.0.1", "localhost", "own"):
        assert check_advertised("--advertise", host, accepted=True) == host
    ways = {"10.77.0.2": "10.77.0.1", "fd88::2": "fd88::1", "127.0.0.1": "127.0.0.1"}
    monkeypatch.setattr(interfaces, "route_to", lambda *to: next((ways[a] for a in to if a in ways), None))
    for coordinator, own in ways.items():
        assert announced(ROUTE, coordinator=["192.0.2.9", coordinator]) == own


def test_loopback_is_refused_where_others_come_and_torch_s_own_choice_of_an_address_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for host in ("127.0.0.1", "127.0.1.1", "localhost", "::1", "debian"):
        with pytest.raises(ConfigError, match=f"^--advertise {host}: the coordinator is at 10.77.0.2, fd77::2, so"):
            announced(host, coordinator=["10.77.0.2", "fd77::2"])
    announced("10.77.0.1", coordinator=["10.77.0.2"])
    assert not caplog.records
    for count, host in enumerate(("fd77::1", "10.78.0.3"), 1):
        announced(host, coordinator=["10.77.0.2"])
        assert caplog.text.count("torch announces another address of the interface") == count


@every("address", ["127.0.0.1", "::1"])
def test_the_way_to_an_address_begins_at_an_own_one(address: str) -> None:
    assert route_to(address) == address
    assert route_to("no", address) == address
    assert route_to("no") is None


@every(("name", "shown"), [("own", "own"), ("debian", "10.77.0.1"), ("no", "10.77.0.1")])
def test_who_listens_on_all_addresses_is_called_by_what_others_reach(
    name: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    monkeypatch.setattr(interfaces, "route_to", lambda *_: "10.77.0.1")
    assert named_host("0.0.0.0") == named_host("::") == shown
    assert named_host("10.9.0.1") == "10.9.0.1"


# ---- hosts and ports to listen at ----


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

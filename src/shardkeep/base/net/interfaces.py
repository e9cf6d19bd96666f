"""Which address of this machine a member announces, and the network interface that has it."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Sequence

import psutil

from shardkeep.base.errors import ConfigError, TransportError
from shardkeep.base.logs.log import EventLog
from shardkeep.base.net.addresses import ANY_HOST, check_exposed, is_loopback, means_loopback, resolve

_log = EventLog("network")
ROUTE = ""
"""In place of a host to announce: the address from which this machine reaches the coordinator."""


def own_address(host: str, option: str = "--advertise") -> tuple[str, str]:
    """The first address of `host` that is this machine's, and its interface. Raises ConfigError: it has none."""
    try:
        found = resolve(host)
    except OSError as error:
        raise ConfigError(f"{option} {host}: this name has no address ({error.strerror or error})") from error
    for address in found:
        for name, own in _addresses().items():
            if address in own:
                return address, name
        if is_loopback(address):  # any of 127.0.0.0/8
            return address, "lo0" if sys.platform == "darwin" else "lo"
    raise ConfigError(f"{option} {host}: no network interface of this machine has the address {', '.join(found)}")


def check_advertised(option: str, advertise: str, *, accepted: bool) -> str:
    """What a member is to announce: `advertise`, or ROUTE for a name that means this machine, but is loopback here.

    Raises ConfigError: other machines may reach it, and that is not `accepted`; it is not this machine's."""
    check_exposed(option, advertise, accepted=accepted)
    address, _ = own_address(advertise, option)
    return ROUTE if accepted and is_loopback(address) and not means_loopback(advertise) else advertise


def announced(advertise: str, *, coordinator: Sequence[str]) -> str:
    """The address by which other members reach this one. `coordinator`: its addresses.

    Raises TransportError without a route to it, and ConfigError for loopback if the coordinator's is not loopback:
    other machines would dial themselves, and the group would fail minutes later."""
    at = ", ".join(coordinator)
    if (own := advertise or route_to(*coordinator)) is None:
        raise TransportError(f"this machine has no route to the coordinator at {at}")
    address, interface = own_address(own)
    if is_loopback(address) and not any(map(is_loopback, coordinator)):
        raise ConfigError(
            f"--advertise {advertise}: the coordinator is at {at}, so members may be on several machines; "
            "give this machine's address as they reach it"
        )
    if not is_loopback(address) and (first := _addresses()[interface][0]) != address:
        _log.warning("torch announces another address of the interface", interface=interface, address=first)
    return address


def named_host(host: str) -> str:
    """The host by which others reach what listens there. Where that is on all addresses: the machine's name, or if
    that is loopback here, the address of its default route."""
    if host not in ANY_HOST:
        return host
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        if not any(map(is_loopback, resolve(name))):
            return name
    return route_to("192.0.2.1", "2001:db8::1") or name  # no machine's addresses (RFC 5737, RFC 3849)


def route_to(*addresses: str) -> str | None:
    """This machine's address on the way to the first of `addresses` to which there is one. Sends nothing."""
    for address in addresses:
        with contextlib.suppress(OSError):
            family, kind, protocol, _, peer = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(peer)
                return str(probe.getsockname()[0])
    return None


def is_own(address: str) -> bool:
    """Whether an address is one of this machine's."""
    return any(address in own for own in _addresses().values())


def _addresses() -> dict[str, list[str]]:
    """The addresses of each interface, in the order in which torch looks at them: IPv4 first."""
    inet, found = (socket.AF_INET, socket.AF_INET6), psutil.net_if_addrs()
    return {name: [each.address for each in found[name] if each.family in inet] for name in found}

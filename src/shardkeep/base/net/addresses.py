"""HOST:PORT texts and the addresses that their hosts have now: parse, check, complete, listen there."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

from shardkeep.base.errors import ConfigError

ANY_HOST = frozenset({"0.0.0.0", "::"})
"""Hosts that are valid for listening but not for connecting."""


def split_address(address: str, *, lowest_port: int = 1) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port". Raises ConfigError that shows the text."""
    host, colon, port = address.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    valid = bool(colon) and bool(host) and port.isascii() and port.isdigit() and lowest_port <= int(port) <= 65535
    if not valid or ("[" not in address and ":" in host):
        raise ConfigError(f"address {address!r} is not HOST:PORT with a port of {lowest_port}..65535")
    return host, int(port)


def is_address(text: str) -> bool:
    """Whether a text is HOST:PORT, and no path."""
    with contextlib.suppress(ConfigError):
        return bool(split_address(text)) and "/" not in text
    return False


def listen_setting(given: object, *words: str) -> object:
    """What a setting says about where to listen: HOST:PORT, port 0 = any free one, or one of `words`.

    Raises ValueError for another text. Other types are for pydantic to refuse; YAML reads `off` as false."""
    if given is False and "off" in words:
        return "off"
    if isinstance(given, str) and given not in words:
        try:
            split_address(given, lowest_port=0)
        except ConfigError:
            allowed = "".join(f"{word}, " for word in words)
            raise ValueError(f"allowed: {allowed}or HOST:PORT with a port of 0 to 65535") from None
    return given


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(host: str) -> tuple[str, ...]:
    """The addresses that a host has now, IPv4 first, as torch takes those of an interface. Blocks while a name server
    is silent. Raises OSError, whose `strerror` says why: it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, "that is no host") from error
    by_family = sorted(found, key=lambda one: one[0] != socket.AF_INET)
    return tuple(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in by_family))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host. A name without an address may be anybody's."""
    with contextlib.suppress(OSError):
        return all(ipaddress.ip_address(address).is_loopback for address in resolve(host))
    return False


def means_loopback(host: str) -> bool:
    """Whether a host is loopback by what it says; not so a machine's name that Debian maps to 127.0.1.1."""
    return is_loopback(host) and ("localhost" in host or host in resolve(host))


def check_exposed(option: str, host: str, *, accepted: bool, by: str = "") -> None:
    """Raises ConfigError for an address that other machines may reach, unless that is `accepted`.

    `by`: options that keep strangers out; empty = nothing does, and the user accepts it."""
    if accepted or is_loopback(host):
        return
    if by:
        allowed = f"; allowed: 127.0.0.1, or any address with {by} (docs/guide/security.md)"
    else:
        accept = "--insecure-data-plane" if option.startswith("--") else "insecure_data_plane=True"
        allowed = ", and anybody who connects to a member can run code as this user, token or not "
        allowed += f"(docs/guide/security.md); on a private network accept it by {accept}"
    raise ConfigError(f"{option} {host}: other machines may reach it{allowed}")


def check_listen(host: str, port: int) -> None:
    """Raises ConfigError for a host without an address, and for a machine's name that only the machine reaches."""
    try:
        found = resolve(host)
    except OSError as error:
        raise ConfigError(f"cannot listen on {join_address(host, port)}: {error.strerror or error}") from error
    if is_loopback(host) and not means_loopback(host):
        raise ConfigError(
            f"cannot listen on {join_address(host, port)}: this name is {found[0]} here, which no other machine "
            "reaches; allowed: an address of this machine, 0.0.0.0, or localhost for this machine alone"
        )


def listening_socket(host: str, port: int, *, backlog: int) -> socket.socket:
    """A socket that does not block. `::` takes connections over IPv4, too; port 0 = any free one.

    Raises ConfigError where it cannot listen, and as `check_listen`."""
    check_listen(host, port)
    # The protocol comes with the address: asyncio sets TCP_NODELAY only where it is named, and without it a reply waits
    # 40 ms for an acknowledgement.
    family, kind, protocol, _, address = socket.getaddrinfo(resolve(host)[0], port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host not in ANY_HOST))
        made.bind(address)
        made.listen(backlog)
    except OSError as error:
        made.close()
        raise ConfigError(f"cannot listen on {join_address(host, port)}: {error.strerror or error}") from error
    made.setblocking(False)
    return made

"""HOST:PORT texts: parse, check, complete. Pure functions."""

from __future__ import annotations

import ipaddress

from shardkeep.base.errors import ConfigError

ANY_HOST = frozenset({"", "0.0.0.0", "::", "[::]"})
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
    try:
        split_address(text)
    except ConfigError:
        return False
    return "/" not in text


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


def check_advertised(advertise: str, *, coordinator: str) -> None:
    """Raises ConfigError for a loopback address if the coordinator's is not loopback.

    On other machines it would mean those machines, and the group would fail minutes later (connection refused)."""
    if is_loopback(advertise) and not is_loopback(coordinator):
        raise ConfigError(
            f"--advertise {advertise}: the coordinator is at {coordinator}, so members may be on several machines; "
            "give this machine's address as they reach it"
        )


def check_exposed(option: str, host: str, *, accepted: bool) -> None:
    """Raises ConfigError for an address that other machines may reach, unless that is `accepted`."""
    if not accepted and not is_loopback(host):
        raise ConfigError(
            f"{option} {host}: other machines may reach it, and anybody who connects to a member can run code as "
            "this user, token or not (docs/guide/security.md); on a private network accept it by --insecure-data-plane"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"

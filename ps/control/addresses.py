"""HOST:PORT texts: parse, check, complete. Pure functions."""

from __future__ import annotations

from shardkeep.base.errors import ConfigError

ANY_HOST = frozenset({"", "0.0.0.0", "::", "[::]"})
"""Hosts to listen on that nobody can connect to."""


def split_address(address: str, *, lowest_port: int = 1) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port". Raises ConfigError that shows the text."""
    host, colon, port = address.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    valid = bool(colon) and bool(host) and port.isascii() and port.isdigit() and lowest_port <= int(port) <= 65535
    if not valid or ("[" not in address and ":" in host):
        raise ConfigError(f"address {address!r} is not HOST:PORT with a port of {lowest_port}..65535")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

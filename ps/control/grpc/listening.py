"""TCP sockets that listen on HOST:PORT, for the servers of HTTP. gRPC and the store bind their own."""

from __future__ import annotations

import socket

from shardkeep.base.errors import ConfigError
from shardkeep.ps.control.grpc.addresses import ANY_HOST, join_address


def listening_socket(host: str, port: int, *, backlog: int) -> socket.socket:
    """A socket that does not block. `::` takes connections over IPv4, too; port 0 = any free one.

    Raises ConfigError where it cannot listen."""
    try:
        # The protocol comes with the address: asyncio sets TCP_NODELAY only where it is named, and without it a reply
        # waits 40 ms for an acknowledgement.
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host not in ANY_HOST))
            made.bind(address)
            made.listen(backlog)
        except OSError:
            made.close()
            raise
    except (OSError, ValueError) as error:
        why = (isinstance(error, OSError) and error.strerror) or "that is no host"
        raise ConfigError(f"cannot listen on {join_address(host, port)}: {why}") from error
    made.setblocking(False)
    return made


def named_host(host: str) -> str:
    """The host by which others reach what listens there: the machine's name where that is on all its addresses."""
    return socket.gethostname() if host in ANY_HOST else host

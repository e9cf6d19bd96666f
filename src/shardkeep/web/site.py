"""Site: what one address of a web server serves, to whom, within which limits. Loads neither starlette nor uvicorn."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkeep.base.errors import ConfigError
from shardkeep.base.net.addresses import join_address, listening_socket, split_address
from shardkeep.base.net.interfaces import named_host
from shardkeep.web.access import Access

if TYPE_CHECKING:
    from shardkeep.web.routes import Routes


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What clients of an address can take, most of it before they show a token.

    `connections`: open at a time; one more takes the place of the one that has sent nothing whole for longest.
    `per_s`, `burst`: connections accepted a second, and at once after a pause. The others wait in the `backlog`: a
    refusal takes most of a millisecond of CPU, which training needs.
    `head_bytes`: of a request before its body. `wait_s`: seconds for the head of a request, for the next one on the
    same connection, and for a client that does not take a reply.
    """

    connections: int
    per_s: float
    burst: int
    backlog: int
    head_bytes: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class Site:
    """`routes`: what makes them; called by the first connection, in the server's thread."""

    routes: Callable[[], Routes]
    access: Access
    limits: Limits


def listener_at(listen: str, backlog: int, *, before: str | None = None) -> tuple[socket.socket, str]:
    """A socket that listens at HOST:PORT, port 0 = any free one, and its address. Raises ConfigError: it cannot.

    `before`: an address to take again if it is free."""
    host, port = split_address(listen, lowest_port=0)
    listener = None
    if before is not None and port == 0:
        with contextlib.suppress(ConfigError):
            if (known := split_address(before))[0] == host:
                listener = listening_socket(*known, backlog=backlog)
    listener = listener or listening_socket(host, port, backlog=backlog)
    return listener, join_address(host, listener.getsockname()[1])


def shown_url(address: str, *, secure: bool) -> str:
    """The URL by which others reach an address; of one that listens on all interfaces, with the machine's name."""
    host, port = split_address(address)
    return f"{'https' if secure else 'http'}://{join_address(named_host(host), port)}"

"""What the kernel has counted on this process's own TCP connections: `tcp_info` of Linux. Knows no message.

Elsewhere, and before Linux 4.19, there is nothing to read: no connections.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_INFO_BYTES = 232  # up to bytes_retrans and what follows it, of struct tcp_info in linux/tcp.h
_LISTENS = 10  # TCP_LISTEN
Ends = tuple[tuple[str, int], tuple[str, int]]
"""Both addresses, the own one first."""


@dataclass(frozen=True)
class Counters:
    """Of one connection or of several."""

    sent: int = 0
    """Bytes handed to the peer's kernel or on the way there, each counted once: no packet headers."""
    received: int = 0
    resent: int = 0
    """Bytes that were sent once more because they were lost or late."""
    segments_out: int = 0
    """Packets sent, acknowledgements included, as they are on a link without offloading."""
    segments_in: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(
            self.sent + other.sent,
            self.received + other.received,
            self.resent + other.resent,
            self.segments_out + other.segments_out,
            self.segments_in + other.segments_in,
        )


def connections() -> dict[Ends, Counters]:
    """Every TCP connection that this process has open. Milliseconds for a hundred descriptors."""
    found: dict[Ends, Counters] = {}
    for one in own_sockets():
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if read := _read(one):
                found[read[0]] = read[1]
    return found


def own_sockets() -> Iterator[socket.socket]:
    """Yields this process's TCP sockets, each through a duplicate descriptor that is closed before the next one.

    Yields none where there is no /proc, or no free descriptor to read it."""
    with contextlib.suppress(OSError):
        for path in list(Path("/proc/self/fd").iterdir()):
            try:
                if not stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                    continue
                copy = os.dup(int(path.name))
            except OSError:  # closed meanwhile by its owner
                continue
            try:
                found = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue
            with found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    yield found


class Watched:
    """The counters of a process's connections by group; those closed by now count as at the last `look`."""

    def __init__(self) -> None:
        self._seen: dict[Ends, Counters] = {}
        self._by_port: dict[int, str] = {}
        self._by_ends: dict[Ends, str] = {}

    def belong(self, group: str, *, ports: Iterable[int] = (), ends: Iterable[Ends] = ()) -> None:
        """Connections from or to one of these ports are of this group, and these connections."""
        self._by_port.update(dict.fromkeys(ports, group))
        self._by_ends.update(dict.fromkeys(ends, group))

    def look(self) -> None:
        """Reads all counters. Call it before connections close."""
        self._seen.update(connections())

    def totals(self) -> dict[str, Counters]:
        """By group, as at the last `look`; connections of no group are left out."""
        sums: dict[str, Counters] = {}
        for ends, counters in self._seen.items():
            (_, own), (_, peer) = ends
            group = self._by_port.get(peer) or self._by_port.get(own) or self._by_ends.get(ends)
            if group is not None:
                sums[group] = sums.get(group, Counters()) + counters
        return sums


def _read(one: socket.socket) -> tuple[Ends, Counters] | None:
    """A socket's addresses and counters, if it is connected. Raises OSError."""
    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < 216 or info[0] == _LISTENS:
        return None
    (received,) = struct.unpack_from("=Q", info, 128)
    segments_out, segments_in = struct.unpack_from("=II", info, 136)
    sent, resent = struct.unpack_from("=QQ", info, 200)
    ends = _address(one.getsockname()), _address(one.getpeername())
    return ends, Counters(sent - resent, received, resent, segments_out, segments_in)


def _address(found: tuple[str, int]) -> tuple[str, int]:
    return found[0].removeprefix("::ffff:"), found[1]

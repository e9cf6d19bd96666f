"""Refuses new connections to a listening socket once every expected member is connected. Knows no RPC.

A socket filter drops each packet that opens a connection. Open connections stay. The library that owns the socket sees
no change. Linux only: elsewhere the socket keeps accepting.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from shardkeep.base.log import EventLog

_log = EventLog("transport")

# linux/filter.h: one instruction, BPF_RET | BPF_K with 0 bytes to keep; socket.h: SO_ATTACH_FILTER
_DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)
_SO_ATTACH_FILTER = 26


class ListenFilter:
    """Filters one listening socket once `awaited` members have connected and the port is known. Thread safe."""

    def __init__(self, *, awaited: int) -> None:
        self._awaited = awaited
        self._here: set[int] = set()
        self._port: int | None = None
        self._lock = threading.Lock()

    def guard(self, port: int) -> None:
        """Names the socket: the one that listens on this port of this process."""
        with self._lock:
            self._port = port
            self._filter_if_complete()

    def arrived(self, member: int) -> None:
        """Records that a member, by its number, is connected. A member that connects again counts once."""
        with self._lock:
            self._here.add(member)
            self._filter_if_complete()

    def _filter_if_complete(self) -> None:
        if self._port is not None and len(self._here) >= self._awaited:
            if not refuse_newcomers(self._port) and sys.platform == "linux":  # a sandbox without socket filters
                _log.warning("the port stays open to newcomers", once="open", port=self._port)
            self._port = None


def refuse_newcomers(port: int) -> bool:
    """Drops new connections to a TCP port on which this process listens.

    Returns False if the process does not listen there or the system has no socket filters."""
    if sys.platform != "linux":
        return False
    program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    filter_ = struct.pack("@HP", 1, ctypes.addressof(program))
    closed = False
    for found in _sockets():
        with contextlib.suppress(OSError):  # closed meanwhile by its owner, or a system without filters
            if _listens(found) and found.getsockname()[1] == port:
                found.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)
                closed = True
    return closed


def listening_ports() -> set[int]:
    """Returns the TCP ports on which this process listens; an empty set where /proc cannot be read."""
    ports = set()
    for found in _sockets():
        with contextlib.suppress(OSError):
            if _listens(found):
                ports.add(int(found.getsockname()[1]))
    return ports


def _sockets() -> Iterator[socket.socket]:
    """Yields this process's sockets, each through a duplicate descriptor that is closed before the next one.

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
                yield found


def _listens(found: socket.socket) -> bool:
    inet = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
    return inet and bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))

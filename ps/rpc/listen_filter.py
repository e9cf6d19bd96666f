"""Refuses new connections to a listening socket once every expected member is connected. Knows no RPC.

A socket filter drops each packet that opens a connection. Open connections stay. The library that owns the socket sees
no change. Linux only: elsewhere the socket keeps accepting.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import sys
import threading

from shardkeep.base.logs.log import EventLog
from shardkeep.base.net.sockets import own_sockets

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
    for own_socket in own_sockets():
        with contextlib.suppress(OSError):  # closed meanwhile by its owner, or a system without filters
            if _listens(own_socket) and own_socket.getsockname()[1] == port:
                own_socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)
                closed = True
    return closed


def listening_ports() -> set[int]:
    """Returns the TCP ports on which this process listens; an empty set where /proc cannot be read."""
    ports = set()
    for own_socket in own_sockets():
        with contextlib.suppress(OSError):
            if _listens(own_socket):
                ports.add(int(own_socket.getsockname()[1]))
    return ports


def _listens(listener: socket.socket) -> bool:
    return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))

"""File descriptors of this process: as many as the system allows, and none for silent connections.

Idle connections to a port of ours would take them all, and the next file that is opened, in a run folder say, would
fail. Linux only, except the limit: elsewhere the kernel does not say what a connection has received.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from shardkeep.base.deadlines import Deadline
from shardkeep.base.logs.log import EventLog

MOST = 1 << 16
"""More is no use to us, and some libraries walk through all that the limit allows."""
LOOK_S = 0.5
SILENT_S = 1.0
"""What a newcomer gets to say something, once descriptors run short. In all our protocols the caller speaks first."""
PATIENCE_S = 10.0
_INFO_BYTES = 232
_LAST_RECEIVED_AT, _RECEIVED_AT = 52, 128  # of struct tcp_info in linux/tcp.h: in ms, in bytes
_log = EventLog("descriptors")
T = TypeVar("T")


def raise_limit() -> None:
    """Lets this process open as many files as the system allows it, at most MOST."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(MOST, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # macOS has a lower limit that it does not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def limit() -> int:
    """How many descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else soft


def keep_free() -> None:
    """Starts the thread that hangs up on silent strangers while fewer than a quarter of the descriptors are free."""
    if sys.platform == "linux":
        threading.Thread(target=_watch, name="descriptors", daemon=True).start()


def when_free(call: Callable[[], T], *, patience_s: float = PATIENCE_S) -> T:
    """What `call`, which may be repeated, returns; waits for a descriptor as long as there is none for it."""
    deadline = Deadline(patience_s)
    while True:
        try:
            return call()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or deadline.over:
                raise
        time.sleep(LOOK_S / 10)


def hang_up_silent(silent_s: float = SILENT_S) -> int:
    """Shuts connections to ports on which this process listens whose peer has sent nothing for so long, and nothing
    before; their owner, a library, sees the end of a connection. How many. Opens nothing itself."""
    ports, peers = set[int](), list[tuple[int, int]]()
    for descriptor, port, listens in _sockets():
        ports |= {port} if listens else set()
        peers += [] if listens else [(descriptor, port)]
    return sum(_hang_up(descriptor, silent_s) for descriptor, port in peers if port in ports)


def _watch() -> None:
    while True:
        time.sleep(LOOK_S)
        if _short() and (count := hang_up_silent()):
            _log.warning("hung up on connections that said nothing", count=count, limit=limit())


def _short() -> bool:
    try:
        return len(os.listdir("/proc/self/fd")) > limit() * 3 // 4  # noqa: PTH208 - one call, twice a second
    except OSError as error:
        return error.errno == errno.EMFILE


def _sockets() -> Iterator[tuple[int, int, bool]]:
    """Descriptor and local port of every TCP socket, and whether it listens. Needs no descriptor of its own."""
    for descriptor in range(limit()):
        try:
            found = socket.socket(fileno=descriptor)
        except OSError:  # no socket, or none at all
            continue
        try:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                listens = bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                yield descriptor, found.getsockname()[1], listens
        except OSError:  # closed meanwhile by its owner
            continue
        finally:
            found.detach()  # it is not ours to close


def _hang_up(descriptor: int, silent_s: float) -> bool:
    try:
        found = socket.socket(fileno=descriptor)
    except OSError:
        return False
    try:
        info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        if len(info) < _RECEIVED_AT + 8:
            return False
        (idle_ms,), (received,) = (
            struct.unpack_from("=I", info, _LAST_RECEIVED_AT),
            struct.unpack_from("=Q", info, _RECEIVED_AT),
        )
        if received or idle_ms < silent_s * 1000:
            return False
        found.shutdown(socket.SHUT_RDWR)
    except OSError:  # closed meanwhile, or not connected
        return False
    finally:
        found.detach()
    return True

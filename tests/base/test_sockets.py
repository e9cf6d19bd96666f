"""What the kernel counts on this process's connections."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator

import pytest

from shardkeep.base.net.sockets import Counters, Ends, Watched, connections

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the counters of a socket")


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection over loopback; the second is the one that listened."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    with near, far:
        yield near, far


def ends_of(one: socket.socket) -> Ends:
    return one.getsockname(), one.getpeername()


def carry(near: socket.socket, far: socket.socket, num_bytes: int) -> None:
    near.sendall(bytes(num_bytes))
    left = num_bytes
    while left:
        left -= len(far.recv(left))


def test_bytes_are_counted_at_both_ends_and_the_sockets_stay_open() -> None:
    with pair() as (near, far):
        carry(near, far, 100_000)
        carry(far, near, 77)
        for _ in range(2):
            found = connections()
            assert (found[ends_of(near)].sent, found[ends_of(near)].received) == (100_000, 77)
            assert (found[ends_of(far)].sent, found[ends_of(far)].received) == (77, 100_000)
        carry(near, far, 1)


def test_listening_and_other_sockets_are_no_connections() -> None:
    before = connections()
    with socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect(("127.0.0.1", 9))
        left, right = socket.socketpair()
        with left, right:
            assert connections().keys() <= before.keys()


def test_groups_keep_what_is_closed_and_leave_out_strangers() -> None:
    watched = Watched()
    with pair() as (near, far), pair() as (stranger, _):
        watched.belong("servers", ports=[far.getsockname()[1]])
        watched.belong("workers", ends=[ends_of(stranger)])
        carry(near, far, 5000)
        watched.look()
    watched.look()
    totals = watched.totals()
    assert set(totals) == {"servers", "workers"}
    assert (totals["servers"].sent, totals["servers"].received) == (5000, 5000)  # both ends are this process's
    assert (totals["workers"].sent, totals["workers"].received) == (0, 0)
    assert totals["servers"].segments_out > 0 and Counters() + totals["workers"] == totals["workers"]

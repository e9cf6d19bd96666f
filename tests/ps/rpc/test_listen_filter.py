"""Listen filters: a listening socket refuses connections once every expected member is connected."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardkeep.ps.rpc.listen_filter import ListenFilter, listening_ports, refuse_newcomers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="socket filters are Linux's")
LIMIT_S = 90.0
SOON_S = 0.3


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    host = "127.0.0.1" if request.param == socket.AF_INET else "::1"
    with socket.create_server((host, 0), family=request.param) as found:
        yield found


def lets_in(listener: socket.socket) -> bool:
    try:
        with socket.create_connection(listener.getsockname()[:2], timeout=SOON_S):
            listener.accept()[0].close()
    except TimeoutError:
        return False
    return True


def test_a_filter_starts_with_the_last_member_and_keeps_connections(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listen_filter = ListenFilter(awaited=2)
    with socket.create_connection(listener.getsockname()[:2], timeout=LIMIT_S) as inside:
        other, _ = listener.accept()
        listen_filter.arrived(0)
        listen_filter.guard(port)
        listen_filter.arrived(0)
        assert lets_in(listener)
        listen_filter.arrived(1)
        assert not lets_in(listener)
        with other:
            inside.sendall(b"still here")
            assert other.recv(100) == b"still here"


def test_a_filter_that_awaits_nobody_starts_at_once_and_on_its_own_port_only(listener: socket.socket) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        ListenFilter(awaited=0).guard(listener.getsockname()[1])
        assert not lets_in(listener)
        assert lets_in(other)


def test_a_port_that_is_not_ours_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert refuse_newcomers(port)
    assert not refuse_newcomers(port)


def descriptors() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def test_looking_for_listening_ports_costs_no_descriptor(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb"), socket.create_server(("127.0.0.1", 0)) as server:
        before = descriptors()
        assert server.getsockname()[1] in listening_ports()
        refuse_newcomers(server.getsockname()[1])
        assert descriptors() == before

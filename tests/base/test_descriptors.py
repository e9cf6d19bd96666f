"""Who connects and says nothing takes no descriptor that the process needs. In a process whose limit is low."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.net.descriptors import hang_up_silent
from shardkeep.base.net.sockets import Counters, Ends, Watched, connections

LIMIT_S = 90.0
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what a connection has received")
CROWDED = """
import json, resource, socket, sys, threading, time
from pathlib import Path
from shardkeep.base.net.descriptors import keep_free, raise_limit, when_free
from shardkeep.base.files import atomic_write

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
raise_limit()
keep_free()
listener = socket.create_server(("127.0.0.1", 0), backlog=1000)
held = []

def accept():  # as a library: holds what connects, and lets go of it when it ends
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            time.sleep(0.01)
            continue
        held.append(peer)
        threading.Thread(target=serve, args=(peer,), daemon=True).start()

def serve(peer):
    while data := peer.recv(64):
        peer.sendall(data)
    peer.close()

threading.Thread(target=accept, daemon=True).start()
print(json.dumps([listener.getsockname()[1], resource.getrlimit(resource.RLIMIT_NOFILE)[0]]), flush=True)
for line in sys.stdin:
    when_free(lambda: Path(line.strip()).write_text("written"), patience_s=20)
    print("written", flush=True)
"""


@linux
@pytest.mark.waits_for_processes
def test_files_are_written_and_who_talks_stays_while_hundreds_connect_and_say_nothing(tmp_path: Path) -> None:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen([sys.executable, "-c", CROWDED], **pipes) as process,
        contextlib.ExitStack() as stack,
        selectors.DefaultSelector() as waiting,
    ):
        stack.callback(process.kill)
        assert process.stdin is not None and process.stdout is not None
        port, soft = json.loads(process.stdout.readline())
        assert soft == 128
        talker = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S))
        talker.sendall(b"first")
        assert talker.recv(64) == b"first"
        for _ in range(200):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            waiting.register(stranger, selectors.EVENT_READ)
        process.stdin.write(f"{tmp_path / 'file'}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "written\n"
        assert (tmp_path / "file").read_text() == "written"
        while len(waiting.get_map()) > 100:  # they are hung up on in turn, as they get in
            ready = waiting.select(LIMIT_S)
            assert ready, f"{len(waiting.get_map())} are still connected"
            for key, _ in ready:
                with contextlib.suppress(ConnectionError):
                    assert key.fileobj.recv(1) == b""  # type: ignore[union-attr]
                waiting.unregister(key.fileobj)
        talker.sendall(b"again")
        assert talker.recv(64) == b"again"


@linux
def test_only_the_silent_that_came_to_a_port_of_ours_are_hung_up_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        silent, speaks = (
            stack.enter_context(socket.create_connection(listener.getsockname(), timeout=LIMIT_S)) for _ in range(2)
        )
        ends = [stack.enter_context(listener.accept()[0]) for _ in range(2)]
        speaks.sendall(b"x")
        assert ends[1].recv(1) == b"x"
        assert hang_up_silent(silent_s=60.0) == 0
        assert hang_up_silent(silent_s=0.0) == 1
        assert silent.recv(1) == b""
        speaks.settimeout(0.01)
        with pytest.raises(TimeoutError):
            speaks.recv(1)


# ---- what the kernel counts on this process's connections ----

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

"""A coordinator to which more connect than it may open files, and say nothing: members still get in."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from shardkeep.base.errors import ShardkeepError
from shardkeep.ps.control.grpc.client import fetch_status
from shardkeep.trust.endpoint import Endpoint

pytestmark = pytest.mark.waits_for_processes
LIMIT_S = 90.0
DESCRIPTORS, STRANGERS = 128, 400
TOKEN = "t" * 32
COORDINATOR = f"""
import json, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))
from shardkeep.ps.control.grpc.server import ControlServer
from tests.support.control_job import Job
with ControlServer(Job().coordinator, token={TOKEN!r}) as server:
    print(json.dumps(server.address), flush=True)
    for line in sys.stdin:
        open("/dev/null").close()
        print("opened", flush=True)
"""


@pytest.fixture
def coordinator() -> Iterator[tuple[subprocess.Popen[str], Endpoint]]:
    process = subprocess.Popen(
        [sys.executable, "-c", COORDINATOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield process, Endpoint(json.loads(process.stdout.readline()), TOKEN)
    process.kill()
    process.communicate()


def test_members_get_in_and_files_can_be_opened_while_strangers_hold_connections(
    coordinator: tuple[subprocess.Popen[str], Endpoint],
) -> None:
    process, endpoint = coordinator
    assert process.stdin is not None and process.stdout is not None
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * STRANGERS:
        pytest.skip("this process itself may hold too few connections")
    host, _, port = endpoint.address.rpartition(":")
    with contextlib.ExitStack() as held:
        for _ in range(STRANGERS):
            stranger = held.enter_context(socket.socket())
            stranger.setblocking(False)
            stranger.connect_ex((host, int(port)))
        end = time.monotonic() + LIMIT_S
        while True:  # those that got in first keep others out until they had the time to speak
            try:
                assert fetch_status(endpoint, timeout_s=LIMIT_S).state == "forming"
                break
            except ShardkeepError as error:
                assert error.retryable and time.monotonic() < end, error
            time.sleep(0.05)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "opened\n"

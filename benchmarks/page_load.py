"""Do viewers and attackers of the live page slow a training job down?

    python benchmarks/page_load.py                 # three rounds of 20 s, each kind of load in turn
    python benchmarks/page_load.py --streams 50    # fewer event streams

One job trains (one server, one worker). In turn, nobody, viewers or strangers load the coordinator's page for some
seconds. Viewers have the token: event streams, half of them never read. Strangers have none: open connections,
requests for every kind of address, garbage. The clients are one process with nice 19, and strangers send at most
`--rate` requests a second: on two cores, the clients' own work is part of what the job loses. Figures: steps a second
beside those with nobody, the CPU seconds of the coordinator and of the clients per second, the memory of the
coordinator, the replies by status.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
from live_job import LASTING, LiveJob

from shardkeep.page.of_job import page_line

TARGET = 0.99
SETTLE_S = 3.0
ADDRESS = re.compile(r"http://([\d.]+):(\d+)/\?token=(\w+)")
JOB = LASTING | {"name": "watched", "telemetry": {"every_s": 1}, "web": {"page": "127.0.0.1:0"}}
TARGETS = ("/", "/events", "/state", "/logs/server/0", "/logs/../../config.yaml", "/?token=" + "0" * 64, "/static/a.js")
GARBAGE = (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"GET / HTTP/9\r\n\r\n", b"\x00" * 4096, b"GET / HTTP/1.1\r\nA: ")


def _has_page(job: LiveJob) -> bool:
    return _address(job) is not None


def _address(job: LiveJob) -> re.Match[str] | None:
    return ADDRESS.search(page_line(job.run) or "")


def watched(job: LiveJob, kind: str, seconds: float, *, streams: int, rate: float) -> harness.Figures:
    """The job's figures while clients of a kind load its page."""
    import psutil

    coordinator = psutil.Process(job.pids()["coordinator 0"])
    with clients(job, kind, streams=streams, rate=rate) as (replies, theirs):
        time.sleep(SETTLE_S)
        cpu, their_cpu, began = _cpu_s(coordinator), _cpu_s(theirs), time.time()
        time.sleep(seconds)
        ended, cpu, their_cpu = time.time(), _cpu_s(coordinator) - cpu, _cpu_s(theirs) - their_cpu
        memory = coordinator.memory_info().rss
    steps, steps_s = job.steps_between(began, ended)
    figures = {"steps_per_s": steps / steps_s, "coordinator_cpu": cpu / (ended - began)}
    figures["clients_cpu"] = their_cpu / (ended - began)
    return figures | {"coordinator_mb": memory / 1e6, **replies}


def _cpu_s(process: Any) -> float:
    return 0.0 if process is None else float(sum(process.cpu_times()[:2]))


@contextlib.contextmanager
def clients(job: LiveJob, kind: str, *, streams: int, rate: float) -> Iterator[tuple[dict[str, float], Any]]:
    """Runs the clients in a process of their own, which is yielded, too. At the end, the mapping has their replies by
    status."""
    import psutil

    replies: dict[str, float] = {}
    if kind == "nobody":
        yield replies, None
        return
    command = [sys.executable, __file__, "--load", kind, "--streams", str(streams), "--rate", str(rate)]
    found = _address(job)
    assert found is not None
    address = {"PAGE": " ".join(found.groups())}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **address})
    try:
        yield replies, psutil.Process(child.pid)
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            told, _ = child.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            child.kill()
            told, _ = child.communicate()
    replies |= {f"status {status}": float(count) for status, count in json.loads(told.splitlines()[-1]).items()}


async def load(kind: str, *, streams: int, rate: float) -> None:
    """Loads the page until SIGTERM, then prints the replies by status."""
    host, port, token = os.environ["PAGE"].split()
    replies: dict[str, int] = {}
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    def head(target: str, *, known: bool) -> bytes:
        bearer = f"Authorization: Bearer {token}\r\n" if known else ""
        return f"GET {target} HTTP/1.1\r\nHost: {host}:{port}\r\n{bearer}\r\n".encode()

    async def connection(sent: bytes, *, reads: bool, limit_s: float | None = None) -> None:
        with contextlib.suppress(OSError):  # a TimeoutError is one
            async with asyncio.timeout(limit_s):
                await talk(sent, reads=reads)

    async def talk(sent: bytes, *, reads: bool) -> None:
        reader, writer = await asyncio.open_connection(host, port, limit=4096)
        with contextlib.closing(writer):
            writer.write(sent)
            if not reads:
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                await stop.wait()
                return
            status = (await reader.readline()).split(b" ")[1:2] or [b"none"]
            replies[status[0].decode()] = replies.get(status[0].decode(), 0) + 1
            while await reader.read(4096):
                pass

    known = kind == "viewers"
    sent = head("/events", known=True) if known else b"GET /events HTTP/1.1\r\n"
    tasks = [asyncio.create_task(connection(sent, reads=number % 2 == 0)) for number in range(streams)]
    number = 0
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 1 / rate)
        if not known:
            number += 1
            target = TARGETS[number % len(TARGETS)]
            what = GARBAGE[number % len(GARBAGE)] + b"\r\n\r\n" if number % 3 == 0 else head(target, known=False)
            tasks.append(asyncio.create_task(connection(what, reads=True, limit_s=10.0)))
            tasks = [task for task in tasks if not task.done()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    print(json.dumps(replies), flush=True)


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--streams", type=int, default=500, help="open connections")
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second without a token")
    parser.add_argument("--load", choices=["viewers", "strangers"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        os.nice(19)
        asyncio.run(load(options.load, streams=options.streams, rate=options.rate))
        return
    options = harness.parse(parser)
    kinds = ("nobody", "viewers", "strangers")
    with tempfile.TemporaryDirectory() as folder, LiveJob(Path(folder), JOB, ready=_has_page) as job:
        contestants: dict[str, harness.Contestant] = {
            kind: lambda seconds, kind=kind: watched(  # type: ignore[misc]
                job, kind, max(seconds, 3.0), streams=options.streams, rate=options.rate
            )
            for kind in kinds
        }
        found = harness.alternate(contestants, rounds=options.rounds, seconds=options.seconds)
    speeds = {kind: harness.ratios(found, kind, "nobody", "steps_per_s") for kind in kinds[1:]}
    for kind, ratio in speeds.items():
        harness.show_ratio(f"steps a second with {kind} / with nobody", ratio, TARGET)
    harness.write(options.json, "page_load", {"rounds": found, "ratios": speeds, "streams": options.streams})


if __name__ == "__main__":
    main()

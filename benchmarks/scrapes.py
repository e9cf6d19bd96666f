"""What do telemetry records and scrapes of metrics cost a job?

    python benchmarks/scrapes.py --rounds 10                # every way to look at a job, in turn
    python benchmarks/scrapes.py --only off telemetry       # telemetry alone

Each contestant is a fresh job (one server, one worker, 26 tables) that is looked at in one way: not at all, by
telemetry records every 5 s, and by metrics that are scraped every 5 s and every second, as Prometheus does. Figures:
steps a second beside the job without telemetry, CPU milliseconds of a step, and the CPU seconds of the threads that
answer scrapes (the kernel's clock of each thread) as a share of the worker's and of all processes'. The scraper is this
process; its CPU is part of what the job loses on two cores.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import harness
from live_job import LASTING, LiveJob, cpu_s, thread_cpu_s

STEPS, SHARE = 0.99, 0.01
SETTLE_S, TIMEOUT_S = 3.0, 5.0
THREAD = "web"
JOB = LASTING | {"name": "looked-at", "web": {"page": "off"}}
METRICS = {"web": {"page": "off", "metrics": "127.0.0.1:0"}}
WAYS: dict[str, tuple[dict[str, Any], float | None]] = {
    "off": ({"telemetry": {"every_s": "off"}}, None),
    "telemetry": ({}, None),
    "scraped every 5 s": (METRICS, 5.0),
    "scraped every second": (METRICS, 1.0),
}
"""The settings of the job, and the seconds between two scrapes of all its processes."""


def looked_at(way: str, seconds: float) -> harness.Figures:
    """The figures of a job that is looked at in one way."""
    settings, every_s = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        ready = (lambda job: len(urls_of(job)) == 3) if every_s else (lambda _job: True)
        with (
            LiveJob(Path(folder), JOB | settings, ready=ready, named_threads=True) as job,
            scraped(job, every_s) as scrapes,
        ):
            time.sleep(SETTLE_S)
            pids, before, began = job.pids(), cpu_of(job), time.time()
            scrapes.clear()
            time.sleep(max(seconds, 3.0))
            ended, after = time.time(), cpu_of(job)
            steps, steps_s = job.steps_between(began, ended)
            took = list(scrapes)
    spent = {name: after[name] - before[name] for name in after}
    figures = {"steps_per_s": steps / steps_s}
    for name in ("worker 0", "server 0"):
        figures[f"{name} cpu_ms"] = 1e3 * spent[name] / (ended - began) * steps_s / steps
    figures["coordinator cpu"] = spent["coordinator 0"] / (ended - began)
    if every_s:
        for name in pids:
            figures[f"{name} thread cpu"] = spent[f"{name} thread"] / (ended - began)
        threads, all_s = (sum(spent[f"{name}{what}"] for name in pids) for what in (" thread", ""))
        figures["worker 0 thread share"] = spent["worker 0 thread"] / max(spent["worker 0"], 1e-9)
        figures["threads share"] = threads / max(all_s, 1e-9)
        figures |= {"scrapes": len(took), "scrape_ms": 1e3 * sum(took) / max(len(took), 1)}
    return figures


def cpu_of(job: LiveJob) -> dict[str, float]:
    """CPU seconds of each process so far, and of its thread that answers scrapes."""
    found: dict[str, float] = {}
    for name, pid in job.pids().items():
        found |= {name: cpu_s(pid), f"{name} thread": thread_cpu_s(pid, THREAD)}
    return found


def urls_of(job: LiveJob) -> list[str]:
    """Where the metrics of each process are, by its telemetry."""
    from shardkeep.records.lines import newest_of_each

    return [record.metrics for record in newest_of_each(job.run / "telemetry.jsonl") if record.metrics]


@contextlib.contextmanager
def scraped(job: LiveJob, every_s: float | None) -> Iterator[list[float]]:
    """Scrapes all processes of a job in a thread. Yields the seconds of each scrape, a list that grows."""
    took: list[float] = []
    if every_s is None:
        yield took
        return
    from shardkeep.trust.tokens import token_of
    from shardkeep.trust.view import view_token

    head = {"Authorization": f"Bearer {view_token(token_of(job.run))}"}
    requests = [urllib.request.Request(url, headers=head) for url in urls_of(job)]
    ended = threading.Event()

    def scrape() -> None:
        while not ended.wait(every_s):
            for request in requests:
                began = time.monotonic()
                with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
                    assert b"shardkeep_" in reply.read()
                took.append(time.monotonic() - began)

    thread = threading.Thread(target=scrape, daemon=True)
    thread.start()
    try:
        yield took
    finally:
        ended.set()
        thread.join(2 * TIMEOUT_S)


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS), help="these ways to look at it")
    options = harness.parse(parser)
    found = harness.alternate(
        {way: partial(looked_at, way) for way in options.only}, rounds=options.rounds, seconds=options.seconds
    )
    ratios, shares = dict[str, Any](), dict[str, Any]()
    for way in found:
        if way != "off":
            ratios[way] = harness.ratios(found, way, "off", "steps_per_s")
            harness.show_ratio(f"steps a second, {way} / off", ratios[way], STEPS)
            cpu = ratios[f"{way}, cpu"] = harness.ratios(found, way, "off", "worker 0 cpu_ms")
            harness.show_ratio(f"CPU of a step of the worker, {way} / off", cpu)
        for key in ("worker 0 thread share", "threads share"):
            if all(key in figures for figures in found[way]):
                share = shares[f"{way}, {key}"] = harness.spread([figures[key] for figures in found[way]])
                told = " / ".join(f"{share[name]:.4f}" for name in ("min", "median", "max"))
                print(f"{f'{way}, {key}':<64} {told}   target {SHARE}", flush=True)
    harness.write(options.json, "scrapes", {"rounds": found, "ratios": ratios, "shares": shares})


if __name__ == "__main__":
    main()

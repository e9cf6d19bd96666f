"""Rounds of contestants in turn, each in fresh pinned processes; ratios within a round; JSON with machine and commit.

A contestant is a function that runs for some seconds and returns its figures; it knows nothing of rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import os
import queue as queue_module
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Figures = dict[str, float]
Contestant = Callable[[float], Figures]
ONE_PROCESS: Mapping[str, Any] = {"servers": 0, "workers": 1, "consistency": {"mode": "sync"}}
"""Settings of a job that repeats bit for bit."""


class CannotRun(Exception):
    """A contestant cannot run here, in one line; the benchmark continues without it."""


def arguments(description: str) -> argparse.ArgumentParser:
    """The options every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured seconds of each contestant and round")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--smoke", action="store_true", help="one round of one second: does it run at all")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where towers train")
    return parser


def seed_arguments(description: str) -> argparse.ArgumentParser:
    """The options of a benchmark of what is learned."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seeds", nargs="+", type=int, default=[7])
    parser.add_argument("--json", type=Path, help="write the figures to this file, and go on with those it has")
    parser.add_argument("--smoke", action="store_true", help="few samples: does it run at all")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments; from now on SIGTERM interrupts like Ctrl-C, so that no contestant's process is left behind."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = parser.parse_args()
    if options.smoke:
        options.rounds, options.seconds = 1, 1.0
    return options


def alternate(contestants: Mapping[str, Contestant], *, rounds: int, seconds: float) -> dict[str, list[Figures]]:
    """Runs all contestants in turn, `rounds` times; their figures by name, one entry a round, without those that
    cannot run."""
    found: dict[str, list[Figures]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name in list(found):
            try:
                figures = contestants[name](seconds)
            except CannotRun as reason:
                print(f"without {name}: {reason}", flush=True)
                del found[name]
                continue
            found[name].append(figures)
            shown = "  ".join(f"{key} {value:,.4g}" for key, value in figures.items())
            print(f"round {number + 1}  {name:<34} {shown}", flush=True)
    return found


def repeat(
    benchmark: str,
    cases: Sequence[Mapping[str, Any]],
    run: Callable[[Mapping[str, Any]], dict[str, Any]],
    options: argparse.Namespace,
) -> None:
    """Runs each case with each seed that the file lacks, and writes the file after each."""
    known = json.loads(options.json.read_text())["results"]["runs"] if options.json and options.json.exists() else []
    done = {(each["group"], each["name"], each["seed"]) for each in known}
    for each in [dict(case) | {"seed": seed} for seed in options.seeds for case in cases]:
        if tuple(each.values()) in done:
            continue
        known.append(each | run(each))
        found = known[-1].get("eval") or known[-1]["auc"]
        shown = {key: round(value, 4) for key, value in found.items() if not key.startswith(("logloss", "normalized"))}
        print(f"{each['group']}, {each['name']}, seed {each['seed']}: {shown}", flush=True)
        write(options.json, benchmark, {"runs": known})


def result_of(processes: Sequence[Any], queue: Any, *, limit_s: float) -> Figures:
    """Starts processes of multiprocessing's and returns what one of them puts into `queue`; leaves none behind.

    Raises RuntimeError as soon as one of them has failed."""
    deadline = time.monotonic() + limit_s
    for process in processes:
        process.start()
    try:
        while True:
            with contextlib.suppress(queue_module.Empty):
                figures: Figures = queue.get(timeout=0.5)
                return figures
            if any(process.exitcode for process in processes) or time.monotonic() > deadline:
                raise RuntimeError(f"no figures: exit codes {[process.exitcode for process in processes]}")
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def spread(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def ratios(found: Mapping[str, list[Figures]], ours: str, other: str, key: str) -> dict[str, float]:
    """ours / other round by round: min, median, max; nothing when one of them could not run."""
    if ours not in found or other not in found:
        return {}
    return spread([a[key] / b[key] for a, b in zip(found[ours], found[other], strict=True)])


def differences(found: Mapping[str, list[Figures]], ours: str, other: str, key: str) -> dict[str, float]:
    """ours - other round by round: min, median, max; nothing when one of them could not run."""
    if ours not in found or other not in found:
        return {}
    return spread([a[key] - b[key] for a, b in zip(found[ours], found[other], strict=True)])


def show_ratio(label: str, ratio: Mapping[str, float], target: float | None = None) -> None:
    wanted = "" if target is None else f"   target {target:.2f}"
    if not ratio:
        print(f"{label:<64} not measured{wanted}", flush=True)
        return
    print(f"{label:<64} {ratio['min']:.2f} / {ratio['median']:.2f} / {ratio['max']:.2f}{wanted}", flush=True)


def write(path: Path | None, benchmark: str, results: Mapping[str, Any]) -> None:
    """Writes the results with date, commit, machine and versions."""
    if path is None:
        return
    from shardkeep.base.machine.versions import machine, versions

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    record = {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "machine": machine(),
        "versions": versions(),
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


def pin(core: int) -> None:
    """Binds this process to one core, with one thread."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core % (os.cpu_count() or 1)})


def merged(config: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings with others over them; a named choice, as an optimizer, is replaced whole."""
    result = dict(config)
    for key, value in more.items():
        old = result.get(key)
        deeper = isinstance(old, Mapping) and isinstance(value, Mapping) and "name" not in value
        result[key] = merged(old, value) if deeper else value
    return result


def settle_garbage_collector() -> None:
    """Takes what is there out of later collections, as a role does once it has started: torch makes half a million
    objects, and every full collection would look at each."""
    gc.collect()
    gc.freeze()


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system

"""Snapshots: what writing one costs pulls, pushes and memory while they continue: 20 M rows, D = 16, row-wise Adagrad.

One server's service in process, asked by a worker's client in one thread; the snapshot is written by the service's own
thread to a temporary folder, once with both threads on one core and once free to run anywhere. Steps pull rows and push
their gradients, each drawn again: 32,768 ids by a Zipf law of 1.05 (the inverse of its continuous form), whose
popularity has nothing to do with the order in which rows came. `without`: the same load before the snapshot.

Then, without load, once more a `full` snapshot is written, a share of the rows pushed once, and an `increment` of just
these rows written.

`--only threads`: a snapshot by one thread and by two, without load, and loading it: CPU, seconds and bytes per row.
"""
# R = rows of the table, U = unique rows of a step, D = embedding dim

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing as mp
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import numpy as np
import psutil
import workload

DIM = 16
RECORD_BYTES = 4 * (2 + DIM + 1)  # on disk
TABLE_BYTES = 100  # in memory, about, with the index
DRAWS = 32_768
NUM_STEPS = 3000  # a snapshot takes fewer; each step has rows that no step before it had
FILL_AT_ONCE = 50_000
POPULAR = 2_654_435_761  # prime: rank to row number
SPREAD = 0x9E3779B97F4A7C15 - 2**64  # odd: ids all over 64 bits
FULL = "full"  # what the increment calls its base
LIMIT_S = 900.0


def drawn_rows(rows: int, seed: int) -> np.ndarray:
    """Row numbers of a step, int64 (U), unique."""
    power = 1.0 - workload.ZIPF
    u = np.random.default_rng(seed).random(DRAWS)
    ranks = (1.0 + u * ((rows + 1.0) ** power - 1.0)) ** (1.0 / power)
    return np.unique(np.minimum(ranks.astype(np.int64) - 1, rows - 1) * POPULAR % rows)


class Server:
    """A service with one table, and a client beside it."""

    def __init__(self, folder: Path) -> None:
        from shardkeep.ps.checkpoints.folder import Checkpoints
        from shardkeep.ps.client.row_client import RowClient
        from shardkeep.ps.config import ConsistencyConfig, TableSpec
        from shardkeep.ps.server.service import ShardService
        from shardkeep.ps.server.table.initializers.config import InitConfig
        from shardkeep.ps.server.table.optimizers.rowwise_adagrad import RowwiseAdagradConfig
        from shardkeep.ps.transport.transport import LocalTransport

        spec = TableSpec(name="t", dim=DIM, optimizer=RowwiseAdagradConfig(lr=0.01), init=InitConfig(scale=0.05))
        mode = ConsistencyConfig(mode="bounded", staleness=2)
        self.checkpoints = Checkpoints(folder)
        settings: dict[str, Any] = {"tables": [spec], "consistency": mode, "num_workers": 1, "seed": 1}
        service = ShardService(shard=0, checkpoints=self.checkpoints, **settings)
        self.client = RowClient(LocalTransport([service.handle]), tables=[spec], consistency=mode)
        self.table = service.tables[0]
        service.tables.changed.follow("")
        self._grad_UD = np.random.default_rng(1).normal(size=(FILL_AT_ONCE, DIM)).astype(np.float32) * 1e-3
        self.step = 0

    def push_once(self, rows: np.ndarray) -> None:
        """Changes rows, given by number, each once."""
        for begin in range(0, rows.size, FILL_AT_ONCE):
            self.exchange(self.request(rows[begin : begin + FILL_AT_ONCE]))

    def request(self, row_U: np.ndarray) -> Any:
        return self.client.request({"t": np.sort(row_U * np.int64(SPREAD))})

    def exchange(self, request: Any) -> tuple[float, float]:
        """One step; the seconds of its pull and of its push."""
        started = time.perf_counter()
        pull = self.client.pull(self.step, request)
        rows_UD = pull.result()["t"]
        pulled = time.perf_counter()
        self.client.push(self.step, request, {"t": self._grad_UD[: len(rows_UD)]}, pulls=[pull])
        self.client.wait_acknowledged()
        self.step += 1
        return pulled - started, time.perf_counter() - pulled


class Load:
    """Steps one after the other, and what they took."""

    def __init__(self, server: Server, requests: list[Any]) -> None:
        self._server, self._requests = server, itertools.cycle(requests)

    def run(self, name: str, over: Callable[[float], bool]) -> harness.Figures:
        """Figures of the steps until `over`, asked with the seconds since the first."""
        pulls, pushes, rows, started = [], [], 0, time.perf_counter()
        while not over(elapsed := time.perf_counter() - started):
            request = next(self._requests)
            pull_s, push_s = self._server.exchange(request)
            pulls.append(pull_s)
            pushes.append(push_s)
            rows += len(request.ids["t"])
        found = {"m_rows_per_s": rows / elapsed / 1e6}
        for what, times in (("pull", pulls), ("push", pushes)):
            for share, text in ((50, "median"), (99, "p99"), (100, "longest")):
                found[f"{text}_{what}_ms"] = float(np.percentile(times, share)) * 1e3
        return {f"{key}_{name}": value for key, value in found.items()}


class Idle:
    """No load."""

    def run(self, _name: str, over: Callable[[float], bool]) -> harness.Figures:
        while not over(0.0):
            time.sleep(0.005)
        return {}


class Peak(threading.Thread):
    """Follows the process's resident memory until told to end."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._process, self._over = psutil.Process(), threading.Event()
        self.before = self.most = self._process.memory_info().rss

    def run(self) -> None:
        while not self._over.wait(0.005):
            self.most = max(self.most, self._process.memory_info().rss)

    def end(self) -> int:
        """The growth at its most, in bytes."""
        self._over.set()
        self.join()
        return self.most - self.before


def one_snapshot(server: Server, load: Load | Idle, base: str = "") -> harness.Figures:
    """Marks, then continues with the load until the snapshot is written, of rows that changed since `base`."""
    from shardkeep.ps.wire.admin import CheckpointSaved, Done, SnapshotFiles, TakeSnapshot, WriteSnapshot

    step, checkpoints = server.step, server.checkpoints
    checkpoints.begin(step)
    peak = Peak()
    peak.start()
    started = time.perf_counter()
    server.client.calls.ask(TakeSnapshot(step, base), Done)
    pause_s = time.perf_counter() - started
    answers: list[Any] = []
    write = functools.partial(server.client.calls.ask, WriteSnapshot(step), SnapshotFiles, LIMIT_S)
    asking = threading.Thread(target=lambda: answers.extend(write()))
    asking.start()
    figures = load.run("during", lambda _: not asking.is_alive())
    wall_s = time.perf_counter() - started
    extra = peak.end()
    size = sum(file["size"] for file in answers[0].files)
    server.client.calls.ask(CheckpointSaved(step, FULL), Done)
    checkpoints.abandon(step)
    return figures | {
        "mark_ms": pause_s * 1e3,
        "snapshot_s": wall_s,
        "mb_per_s": size / wall_s / 1e6,
        "written_mb": size / 1e6,
        "extra_mb": extra / 1e6,
        "extra_share": extra / server.table.size_bytes,
        "table_mb": server.table.size_bytes / 1e6,
    }


def increment(server: Server, row_C: np.ndarray) -> harness.Figures:
    """A snapshot of all rows, one of those that changed after it, and their ratios."""
    full = one_snapshot(server, Idle())
    server.push_once(row_C)
    part = one_snapshot(server, Idle(), FULL)
    kept = "mark_ms", "snapshot_s", "written_mb"
    return (
        {f"full_{key}": full[key] for key in kept}
        | {f"increment_{key}": part[key] for key in kept}
        | {f"increment_{key}_share": part[key] / full[key] for key in kept[1:]}
    )


def snapshot_process(
    rows: int, changed: float, cores: int | None, folder: str, seconds: float, seed: int, queue: Any
) -> None:
    if cores == 1:
        harness.pin(0)
    from shardkeep.base.machine.allocator import keep_freed_memory

    keep_freed_memory()
    server = Server(Path(folder))
    server.push_once(np.arange(rows))
    requests = [server.request(drawn_rows(rows, seed * NUM_STEPS + i)) for i in range(NUM_STEPS)]
    load = Load(server, requests)
    harness.settle_garbage_collector()
    load.run("warm_up", lambda elapsed: elapsed > min(seconds, 3.0))
    found = load.run("without", lambda elapsed: elapsed > seconds) | one_snapshot(server, load)
    row_C = np.arange(int(changed * rows)) * POPULAR % rows  # the popular ones, wherever they lie
    queue.put(found | increment(server, row_C))


def threads_process(
    rows: int, changed: float, cores: int | None, folder: str, seconds: float, seed: int, queue: Any
) -> None:
    """Writes and loads a table of rows that came in no order, without a service. System time depends on whether a
    virtual machine's host has given out its memory; so the user's time is reported apart."""
    from shardkeep.base.machine.allocator import keep_freed_memory
    from shardkeep.ps.checkpoints.folder import Checkpoints
    from shardkeep.ps.config import TableSpec
    from shardkeep.ps.server.snapshot.files import load_snapshots, write_snapshot
    from shardkeep.ps.server.tables import Tables

    keep_freed_memory()
    specs, checkpoints, found = [TableSpec(name="t", dim=DIM)], Checkpoints(folder), harness.Figures()
    tables = Tables(specs, seed=seed)
    for begin in range(0, rows, FILL_AT_ONCE):
        ids = np.arange(begin, min(begin + FILL_AT_ONCE, rows), dtype=np.int64) * np.int64(SPREAD)
        tables[0].load(ids, np.full((ids.size, DIM), 0.1, np.float32), np.ones((ids.size, 1), np.float32))
    found["bytes_per_row"] = tables[0].size_bytes / rows

    def timed(name: str, call: Callable[[], Any]) -> Any:
        wall, before = time.perf_counter(), os.times()
        result, after = call(), os.times()
        user_s, system_s = after.user - before.user, after.system - before.system
        found.update({f"{name}_s": time.perf_counter() - wall, f"{name}_user_s": user_s, f"{name}_system_s": system_s})
        return result

    for threads in (1, 2):
        write = functools.partial(write_snapshot, tables.snapshot(), checkpoints.begin(threads), shard=0)
        files = timed(f"snapshot_{threads}", functools.partial(write, threads=threads))
    del write
    written, digests = checkpoints.commit(2, files, {}), tables.digests()
    del tables
    again = Tables(specs, seed=seed)
    timed("load", lambda: load_snapshots(again, written, shard=0, num_shards=1))
    if again.digests() != digests:
        raise RuntimeError("the rows that were loaded are not those that were written")
    found["loaded_bytes_per_row"] = again[0].size_bytes / rows
    shutil.rmtree(written.folder)
    queue.put(found)


def contestant(
    rows: int, changed: float, cores: int | None, folder: str, target: Callable[..., None] = snapshot_process
) -> harness.Contestant:
    seeds = itertools.count(1)

    def run(seconds: float) -> harness.Figures:
        context = mp.get_context("spawn")
        queue = context.Queue()
        settings = (rows, changed, cores, folder, seconds, next(seeds), queue)
        process = context.Process(target=target, args=settings)
        return harness.result_of([process], queue, limit_s=LIMIT_S + 2 * seconds)

    return run


def report(found: dict[str, list[harness.Figures]]) -> dict[str, Any]:
    results: dict[str, Any] = {"rounds": found}
    for name, rounds in found.items():
        for key, label, target in (
            ("mark_ms", "ms that the mark takes", 50.0),
            ("longest_pull_ms_without", "longest pull without a snapshot, ms", None),
            ("longest_pull_ms_during", "longest pull during one, ms", 50.0),
            ("extra_share", "extra memory / the table's", 0.10),
            ("mb_per_s", "MB/s written", None),
            ("full_snapshot_s", "seconds of a full one without load", None),
            ("full_written_mb", "MB of a full one", None),
            ("increment_mark_ms", "ms that the mark of an increment takes", 50.0),
            ("increment_snapshot_s", "seconds of an increment without load", None),
            ("increment_written_mb", "MB of an increment", None),
            ("increment_written_mb_share", "bytes of an increment / of a full one", None),
            ("increment_snapshot_s_share", "seconds of an increment / of a full one", None),
        ):
            results[f"{name} {key}"] = harness.spread([figures[key] for figures in rounds])
            harness.show_ratio(f"{name}: {label}", results[f"{name} {key}"], target)
        ratios = [figures["m_rows_per_s_during"] / figures["m_rows_per_s_without"] for figures in rounds]
        results[f"{name} during / without"] = harness.spread(ratios)
        harness.show_ratio(f"{name}: rows/s during / without", results[f"{name} during / without"])
    return results


def report_threads(found: dict[str, list[harness.Figures]]) -> dict[str, Any]:
    rounds, results = found["threads"], dict[str, Any]({"rounds": found})
    for key in rounds[0]:
        results[key] = harness.spread([figures[key] for figures in rounds])
        harness.show_ratio(key, results[key])
    results["two threads"] = harness.spread([figures["snapshot_1_s"] / figures["snapshot_2_s"] for figures in rounds])
    harness.show_ratio("seconds of one thread / of two", results["two threads"], 1.8)
    return results


def parsed() -> argparse.Namespace:
    parser = harness.arguments(__doc__)
    parser.add_argument("--rows", type=int, help="rows of the table; 20 M")
    parser.add_argument("--changed", type=float, default=0.1, help="share of the rows pushed before the increment; 0.1")
    parser.add_argument("--only", choices=["load", "threads"], default="load", help="under load, or by threads; load")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder")
    options = harness.parse(parser)
    if options.device != "cpu":
        parser.error(f"--device {options.device}: nothing here trains a tower")
    if options.rows is None:
        options.rows = 200_000 if options.smoke else 20_000_000
    if options.rows < 10_000:
        parser.error(f"--rows {options.rows}: allowed: 10,000 or more")
    if not 0.0 <= options.changed <= 1.0:
        parser.error(f"--changed {options.changed}: allowed: 0 to 1")
    free, needed = psutil.virtual_memory().available, 1.5 * TABLE_BYTES * options.rows
    if free < needed:
        parser.error(f"--rows {options.rows}: takes {needed / 1e9:.1f} GB; {free / 1e9:.1f} GB are free")
    options.folder = options.folder or Path(tempfile.gettempdir())
    free, needed = shutil.disk_usage(options.folder).free, 1.2 * RECORD_BYTES * options.rows
    if free < needed:
        parser.error(f"--folder {options.folder}: takes {needed / 1e9:.1f} GB; {free / 1e9:.1f} GB are free")
    return options


def main() -> None:
    options = parsed()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="snapshots-", dir=options.folder) as folder:
        places = {"one core": 1, "all cores": None}
        contestants = {name: contestant(options.rows, options.changed, at, folder) for name, at in places.items()}
        if options.only == "threads":
            contestants = {"threads": contestant(options.rows, options.changed, None, folder, threads_process)}
        found = harness.alternate(contestants, rounds=options.rounds, seconds=options.seconds)
    results = (report_threads(found) if options.only == "threads" else report(found)) | {
        "rows": options.rows,
        "changed": options.changed,
    }
    harness.write(options.json, "snapshots", json.loads(json.dumps(results)))


if __name__ == "__main__":
    main()

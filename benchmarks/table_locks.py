"""What do threads of one server gain by a lock that pulls share, and by a lock for each range of one table's rows?

Measured: CPU of a pull and of an update of one table, of dividing a message among ranges of hashes and joining what
they give, and of the rest of a server's work on a step of one worker. A simulation of cores and locks makes of these
steps per second, and the share of time that threads wait for a table. It leaves out the interpreter's lock.
With --threads, real threads do the same: on a machine with work beside it, only their CPU counts.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import harness
import numba
import numpy as np
from many_ranks import popularity

from shardkeep.base.machine.allocator import keep_freed_memory
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.jagged import Gradients, SectionIds
from shardkeep.ps.server import tables as tables_module
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.server.tables import SharedLock, Tables
from shardkeep.ps.transport.transport import LocalTransport

DIM, MESSAGES = 16, 64
OWN, SHARED, RANGES = "own", "shared", "ranges"
REST, PULL, UPDATE = range(3)
SPEC = TableSpec(name="t", dim=DIM)
CORES, THREADS = (2, 4, 16), (4, 8, 16, 32)
STEPS = 4000


class OwnLock(SharedLock):
    """As before pulls shared it."""

    def share(self) -> None:
        self.__enter__()

    def unshare(self) -> None:
        self.__exit__()


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def divided(ids: Any, grad: Any, ranges: int, order: Any, starts: Any, ids_out: Any, grad_out: Any) -> None:
    """Ids and gradients by the range of their hash; in each range the ids still rise."""
    starts[:] = 0
    for i in range(ids.size):
        starts[_range(ids[i], ranges) + 1] += 1
    for r in range(ranges):
        starts[r + 1] += starts[r]
    at = starts[:ranges].copy()
    for i in range(ids.size):
        r = _range(ids[i], ranges)
        order[at[r]] = i
        ids_out[at[r]] = ids[i]
        grad_out[at[r]] = grad[i]
        at[r] += 1


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def joined(order: Any, rows: Any, out: Any) -> None:
    for i in range(order.size):
        out[order[i]] = rows[i]


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _range(id_: int, ranges: int) -> int:
    x = np.uint64(id_) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.int64(((x ^ (x >> np.uint64(31))) >> np.uint64(32)) * np.uint64(ranges) >> np.uint64(32))


@functools.cache
def messages(rows: int) -> list[SectionIds]:
    """Popular ids and rare ones, unique and sorted."""
    rng, (shares, numbers), made = np.random.default_rng(1), popularity(), []
    for _ in range(MESSAGES):
        ids = np.empty(0, dtype=np.int64)
        while ids.size < rows:
            drawn = np.searchsorted(shares, rng.random(rows) * shares[-1])
            ids = np.union1d(ids, numbers[np.minimum(drawn, len(numbers) - 1)])
        made.append(SectionIds(np.array([0]), np.array([0, rows]), np.sort(rng.permutation(ids)[:rows])))
    return made


def filled(sent: list[SectionIds], values: np.ndarray) -> Tables:
    tables = Tables([SPEC], seed=1)
    for ids in sent:
        tables.apply([Gradients(ids, values)], step=0)
    return tables


def costs(rows: int, seconds: float) -> harness.Figures:
    """Median CPU ms of each piece."""
    sent, values = messages(rows), np.full(rows * DIM, 1e-3, np.float32)
    tables, into, grad_UD = filled(sent, values), np.empty_like(values), values.reshape(rows, DIM)
    order, starts, ids_out, grad_out = (
        np.empty(rows, np.int64),
        np.empty(17, np.int64),
        np.empty(rows, np.int64),
        grad_UD.copy(),
    )
    took: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[..., Any], *args: Any) -> Any:
        began = time.thread_time()
        result = call(*args)
        took.setdefault(name, []).append(1e3 * (time.thread_time() - began))
        return result

    service = ShardService(shard=0, tables=[SPEC], consistency=ConsistencyConfig(), num_workers=1, seed=1)
    client = RowClient(LocalTransport([functools.partial(timed, "handle", service.handle)]), tables=[SPEC])
    harness.settle_garbage_collector()
    deadline = time.monotonic() + seconds
    for n in itertools.count():
        ids = sent[n % MESSAGES]
        found = timed("pull", tables.pull, ids, into)
        timed("update", functools.partial(tables.apply, step=n), [Gradients(ids, values, pulled=found)])
        for ranges in (2, 16):
            place = ids.ids_V, grad_UD, ranges, order, starts[: ranges + 1], ids_out, grad_out
            timed(f"divide {ranges}", divided, *place)
            timed(f"join {ranges}", joined, order, grad_out, into.reshape(rows, DIM))
        request = client.request({"t": ids.ids_V})
        pulled = client.pull(n, request)
        pulled.result()
        client.push(n, request, {"t": grad_UD}, pulls=[pulled])
        client.wait_acknowledged()
        if time.monotonic() > deadline and n > MESSAGES:
            break
    figures = {name: float(np.median(each[MESSAGES:])) for name, each in took.items()}
    by_call = np.median(np.reshape(took["handle"][2 * MESSAGES :], (-1, 2)), axis=0)
    return figures | {"rest": float(by_call.sum()) - figures["pull"] - figures["update"]}


class Machine:
    """Threads in turn on cores, with locks. Times in ms; a piece of work needs its lock, then a core, to its end."""

    def __init__(self, cores: int, locks: int) -> None:
        self.cores = [0.0] * cores  # when each is free
        self.alone, self.shared = [0.0] * locks, [0.0] * locks  # when the last holder ends
        self.waited = 0.0

    def work(self, now: float, ms: float, lock: int = -1, *, shares: bool = False) -> float:
        """When it is done. `lock`: -1 = none."""
        ready = max(now, self.cores[0])
        free = 0.0 if lock < 0 else self.alone[lock] if shares else max(self.alone[lock], self.shared[lock])
        self.waited += max(0.0, free - ready) if lock >= 0 else 0.0
        end = max(ready, free) + ms
        heapq.heapreplace(self.cores, end)
        if lock >= 0:
            held = self.shared if shares else self.alone
            held[lock] = max(held[lock], end)
        return end


def simulated(cost: harness.Figures, lock: str, ranges: int, cores: int, threads: int) -> harness.Figures:
    """Steps per second of a server with one table, and the share of the threads' time that waits for it."""
    machine, rng = Machine(cores, ranges), np.random.default_rng(0)
    table = {PULL: cost["pull"] / ranges, UPDATE: cost["update"] / ranges}
    moved = {PULL: cost["join 16"], UPDATE: cost["divide 16"]}
    queue, first = [(0.0, thread, REST, 0) for thread in range(threads)], [0] * threads
    done = now = 0.0
    while done < STEPS:
        now, thread, work, piece = heapq.heappop(queue)
        then = work, piece + 1
        if work == REST:
            first[thread] = int(rng.integers(ranges))
            end, then = machine.work(now, cost["rest"]), (PULL, -1 if lock == RANGES else 0)
        elif piece < 0:
            end = machine.work(now, moved[work])
        else:
            which = (first[thread] + piece) % ranges
            end = machine.work(now, table[work], which, shares=work == PULL and lock != OWN)
            if piece + 1 == ranges:
                then = ((UPDATE, -1 if lock == RANGES else 0), (REST, 0))[work == UPDATE]
                done += work == UPDATE
        heapq.heappush(queue, (end, thread, *then))
    return {"per_s": 1e3 * done / now, "waits": machine.waited / (threads * now)}


def real(rows: int, threads: int, shares: bool, seconds: float) -> harness.Figures:
    """Threads that pull and push as fast as they can."""
    sent, values = messages(rows), np.full(rows * DIM, 1e-3, np.float32)
    with mock.patch.object(tables_module, "SharedLock", SharedLock if shares else OwnLock):
        tables = filled(sent, values)
    done, cpu, end = [0] * threads, [0.0] * threads, threading.Event()

    def work(thread: int) -> None:
        into, began = np.empty_like(values), time.thread_time()
        while not end.is_set():
            ids = sent[(thread * 7 + done[thread]) % MESSAGES]
            tables.apply([Gradients(ids, values, pulled=tables.pull(ids, into))], step=1)
            done[thread] += 1
        cpu[thread] = time.thread_time() - began

    running, began = [threading.Thread(target=work, args=(t,)) for t in range(threads)], time.perf_counter()
    for each in running:
        each.start()
    end.wait(seconds)
    end.set()
    for each in running:
        each.join()
    wall = time.perf_counter() - began
    return {"per_s": sum(done) / wall, "cpu_ms": 1e3 * sum(cpu) / sum(done), "cores": sum(cpu) / wall}


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.set_defaults(seconds=2.0, rounds=9)
    parser.add_argument("--threads", type=int, nargs="*", default=[], help="measure so many real threads, too")
    parser.add_argument("--rows", type=int, default=8192)
    options = harness.parse(parser)
    keep_freed_memory()
    found = harness.alternate(
        {"server": lambda seconds: costs(options.rows, seconds)}, rounds=options.rounds, seconds=options.seconds
    )
    cost = {key: harness.spread([each[key] for each in found["server"]]) for key in found["server"][0]}
    for key, spread in cost.items():
        harness.show_ratio(f"{key}, CPU ms of {options.rows} rows", spread)
    medians = {key: spread["median"] for key, spread in cost.items()}
    results: dict[str, Any] = {"rows": options.rows, "costs": cost, "load": os.getloadavg()}
    for cores, threads in itertools.product(CORES, THREADS):
        row = {
            f"{lock} {ranges}": simulated(medians, lock, ranges, cores, threads)
            for lock, ranges in ((OWN, 1), (SHARED, 1), (RANGES, 2), (RANGES, 16))
        }
        results[f"simulated, {cores} cores, {threads} threads"] = row
        print(
            f"{cores:2} cores {threads:2} threads  "
            + "  ".join(f"{name}: {f['per_s']:6.0f}/s, waits {f['waits']:4.0%}" for name, f in row.items())
        )
    for threads in options.threads:
        kinds = {OWN: False, SHARED: True}
        ran = {
            name: lambda seconds, shares=shares, threads=threads: real(options.rows, threads, shares, seconds)
            for name, shares in kinds.items()
        }
        measured = harness.alternate(ran, rounds=options.rounds, seconds=options.seconds)
        ratio = {key: harness.ratios(measured, SHARED, OWN, key) for key in ("per_s", "cpu_ms")}
        results[f"measured, {threads} threads"] = {"rounds": measured, "ratio": ratio}
        for key, spread in ratio.items():
            harness.show_ratio(f"{threads} threads, {key}, shared / own", spread)
    harness.write(options.json, "table_locks", results)


if __name__ == "__main__":
    main()

"""W2: pull and push of 53,248 Zipf ids a step, without a tower: one server over RPC against what peers reach.

PyTorch, in process, keeps the 26 tables merged in one tensor and does unique, index_select, index_add_ and row-wise
Adagrad; FBGEMM runs in process too; RPC by hand and OpenEmbedding have a server. All spread the rows to samples and
sum the samples' gradients back, as a model's step must.
"""
# B = batch, F = features, U = unique ids, D = embedding dim, N = B * F

from __future__ import annotations

import argparse
import itertools
import multiprocessing as mp
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
import workload
from opponents import contestant

NUM_BATCHES = 64
WARM_UP_S = 3.0

OURS, PYTORCH, OPENEMBEDDING = "shardkeep, 1 server over RPC", "PyTorch in process", "OpenEmbedding, 1 server"
IN_ORDER = "OpenEmbedding in its TensorFlow layer's order"
CONTESTANTS = {
    "shardkeep": OURS,
    "pytorch": PYTORCH,
    "fbgemm_tbe": "FBGEMM TBE in process",
    "rpc_by_hand": "RPC by hand, 1 server",
    "openembedding": OPENEMBEDDING,
    "openembedding_in_order": IN_ORDER,
}
TARGETS = {
    PYTORCH: {16: 2.2, 64: 2.0, 128: 1.6},
    OPENEMBEDDING: {16: 2.5, 64: 2.5, 128: 2.5},
    IN_ORDER: {16: 2.5, 64: 2.5, 128: 2.5},
}


def pytorch_in_process(dim: int, seconds: float, seed: int, queue: Any) -> None:
    import torch

    harness.pin(0)
    torch.set_num_threads(1)
    offsets = np.concatenate([[0], np.cumsum(workload.TABLE_SIZES)[:-1]])
    ids = torch.from_numpy(workload.draw_ids(NUM_BATCHES, seed=seed) + offsets[None, :, None]).reshape(NUM_BATCHES, -1)
    table = torch.empty(sum(workload.TABLE_SIZES), dim).uniform_(-0.05, 0.05)
    sums = torch.zeros(len(table))
    grad_ND = torch.randn(ids.shape[1], dim) * 1e-3

    def step(i: int) -> None:
        unique_U, inverse_N = torch.unique(ids[i % NUM_BATCHES], return_inverse=True)
        rows_UD = table.index_select(0, unique_U)
        rows_UD.index_select(0, inverse_N)  # what the model would see
        grad_UD = torch.zeros_like(rows_UD).index_add_(0, inverse_N, grad_ND)
        sums.index_add_(0, unique_U, grad_UD.pow(2).mean(1))
        rate_U = 0.01 / (sums.index_select(0, unique_U).sqrt() + 1e-8)
        table.index_add_(0, unique_U, grad_UD * rate_U.unsqueeze(1), alpha=-1.0)

    queue.put(timed(step, seconds, repeat(step, WARM_UP_S), ids.shape[1]))


def repeat(step: Callable[[int], None], seconds: float, first: int = 0) -> int:
    """Runs step(first), step(first + 1), ... for some seconds; the number of the step that would come next."""
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        step(first)
        first += 1
    return first


def timed(step: Callable[[int], None], seconds: float, first: int, ids_per_step: int) -> harness.Figures:
    cpu, started = harness.cpu_seconds(), time.perf_counter()
    count = (repeat(step, seconds, first) - first) * ids_per_step
    elapsed = time.perf_counter() - started
    return {
        "ids": count,
        "m_ids_per_s": count / elapsed / 1e6,
        "cpu_ns_per_id": (harness.cpu_seconds() - cpu) / count * 1e9,
    }


Policies = dict[str, Any]
"""Settings of all tables in addition."""


def _specs(dim: int, policies: Policies) -> list[Any]:
    from shardkeep.ps.config import TableSpec
    from shardkeep.ps.server.table.initializers.config import InitConfig
    from shardkeep.ps.server.table.optimizers.rowwise_adagrad import RowwiseAdagradConfig

    common = {"dim": dim, "optimizer": RowwiseAdagradConfig(lr=0.01), "init": InitConfig(scale=0.05), **policies}
    return [TableSpec.model_validate({"name": f"C{f}", **common}) for f in range(len(workload.TABLE_SIZES))]


def _join(port: int, role: str, handler: Any = None) -> Any:
    from shardkeep.ps.rpc.group import RpcGroup, connect_store

    store = connect_store("127.0.0.1", port, timeout_s=60)
    return RpcGroup.form(
        store, generation=0, role=role, index=0, num_servers=1, num_workers=1, host="127.0.0.1", timeout_s=60,
        handler=handler,
    )  # fmt: skip


def server_process(port: int, dim: int, policies: Policies, conn: Any) -> None:
    from shardkeep.base.machine.allocator import keep_freed_memory

    harness.pin(1)
    keep_freed_memory()
    from shardkeep.ps.config import ConsistencyConfig
    from shardkeep.ps.server.service import ShardService

    service = ShardService(shard=0, tables=_specs(dim, policies), num_workers=1, seed=1,
        consistency=ConsistencyConfig(mode="bounded", staleness=2),
    )  # fmt: skip
    transport = _join(port, "server", service.handle)
    harness.settle_garbage_collector()
    while (asked := conn.recv()) is not None:
        conn.send(harness.cpu_seconds() if asked == "cpu" else service.report())
    transport.close()


def worker_process(port: int, dim: int, policies: Policies, seconds: float, seed: int, conn: Any, queue: Any) -> None:
    from shardkeep.base.machine.allocator import keep_freed_memory

    harness.pin(0)
    keep_freed_memory()
    import torch

    from shardkeep.ps.client.row_client import RowClient
    from shardkeep.ps.config import ConsistencyConfig
    from shardkeep.ps.transport.metered import LedgerMeter, MeteredTransport, WorkerTraffic
    from shardkeep.workers.data.batch import Batch, Ragged
    from shardkeep.workers.data.schema import Feature, Schema
    from shardkeep.workers.embeddings.layer import Embeddings
    from shardkeep.workers.prefetch import Prefetch

    torch.set_num_threads(1)
    specs = _specs(dim, policies)
    names = [spec.name for spec in specs]
    schema = Schema((), tuple(Feature(name, name) for name in names))
    ids = workload.draw_ids(NUM_BATCHES, seed=seed)
    dense, label = np.zeros((workload.BATCH, 0), np.float32), np.zeros((workload.BATCH, 1), np.float32)
    batches = [Batch(dense, {n: Ragged(ids[b, f]) for f, n in enumerate(names)}, label) for b in range(NUM_BATCHES)]
    consistency = ConsistencyConfig(mode="bounded", staleness=2)
    transport = _join(port, "worker")
    metered = MeteredTransport(transport, LedgerMeter(WorkerTraffic()))  # as in a job
    client = RowClient(metered, tables=specs, consistency=consistency)
    embeddings = Embeddings(schema, client.tables)
    grads = {name: torch.randn(workload.BATCH, dim) * 1e-3 for name in names}

    def prepare(i: int) -> Any:
        plan = embeddings.plan(batches[i % NUM_BATCHES])
        return plan, client.request(plan.unique)

    ahead = Prefetch(prepare, start=0, stop=1 << 40, depth=4)
    under_way: deque[Any] = deque()
    asked = 0

    def step(i: int) -> None:
        nonlocal asked
        while len(under_way) < consistency.window:
            plan, request = ahead.next()
            under_way.append((plan, request, client.pull(asked, request)))
            asked += 1
        plan, request, pull = under_way.popleft()
        rows = pull.result()
        leaves = embeddings.lookup(plan, rows)
        for name, leaf in leaves.items():
            leaf.grad = grads[name]
        sums = client.gradients(i, request)
        embeddings.collect(plan, leaves, sums)
        plan, next_request = ahead.next()
        under_way.append((plan, next_request, client.exchange(i, request, sums, asked, next_request, pulls=[pull])))
        asked += 1

    harness.settle_garbage_collector()
    first = repeat(step, WARM_UP_S)
    conn.send("cpu")
    server_cpu = conn.recv()
    figures = timed(step, seconds, first, ids.shape[1] * ids.shape[2])
    conn.send("cpu")
    figures["server_cpu_ns_per_id"] = (conn.recv() - server_cpu) / figures["ids"] * 1e9
    figures["worker_cpu_ns_per_id"] = figures.pop("cpu_ns_per_id")
    figures["cpu_ns_per_id"] = figures["server_cpu_ns_per_id"] + figures["worker_cpu_ns_per_id"]
    for _, _, pull in under_way:
        pull.result()
    client.wait_acknowledged()
    ahead.close()
    conn.send("report")
    tables = conn.recv()["tables"]
    figures["rows"] = sum(table["rows"] for table in tables)
    figures["evicted_rows"] = sum(table.get("evicted_rows", 0) for table in tables)
    queue.put(figures)
    transport.close()
    conn.send(None)


def shardkeep_over_rpc(dim: int, seconds: float, seed: int, policies: Policies | None = None) -> harness.Figures:
    """`policies`: settings of all tables in addition."""
    from torch.distributed import TCPStore

    context = mp.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mine, theirs = context.Pipe()
    queue = context.Queue()
    processes = [
        context.Process(target=server_process, args=(store.port, dim, policies or {}, mine)),
        context.Process(target=worker_process, args=(store.port, dim, policies or {}, seconds, seed, theirs, queue)),
    ]
    return harness.result_of(processes, queue, limit_s=seconds + 120)


def contestants(dim: int, names: list[str]) -> dict[str, harness.Contestant]:
    context, seeds = mp.get_context("spawn"), itertools.count(1)

    def in_process(seconds: float) -> harness.Figures:
        queue = context.Queue()
        process = context.Process(target=pytorch_in_process, args=(dim, seconds, next(seeds), queue))
        return harness.result_of([process], queue, limit_s=seconds + 120)

    own = {"shardkeep": lambda seconds: shardkeep_over_rpc(dim, seconds, next(seeds)), "pytorch": in_process}
    return {CONTESTANTS[name]: own.get(name) or contestant(name, workload="w2", dim=dim) for name in names}


def show(dim: int, found: dict[str, list[harness.Figures]]) -> dict[str, Any]:
    """Prints shardkeep's ratios to every other beside their targets."""
    ratio, cpu = {}, {}
    for other in found:
        if other != OURS:
            ratio[other] = harness.ratios(found, OURS, other, "m_ids_per_s")
            cpu[other] = harness.ratios(found, OURS, other, "cpu_ns_per_id")
            harness.show_ratio(f"D={dim} ids/s, shardkeep / {other}", ratio[other], TARGETS.get(other, {}).get(dim))
            harness.show_ratio(
                f"D={dim} CPU per id, shardkeep / {other}", cpu[other], 1.0 if other == PYTORCH else None
            )
    return {"rounds": found, "ratio": ratio, "cpu_ratio": cpu}


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    options: argparse.Namespace = harness.parse(parser)
    if options.device != "cpu":
        parser.error(f"--device {options.device}: W2 has no tower that could train there")
    results: dict[str, Any] = {}
    for dim in options.dims:
        print(f"D = {dim}")
        ran = contestants(dim, options.only)
        results[f"D={dim}"] = show(dim, harness.alternate(ran, rounds=options.rounds, seconds=options.seconds))
    harness.write(options.json, "pull_push", results)


if __name__ == "__main__":
    main()

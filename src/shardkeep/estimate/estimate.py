"""What a job will need, from its config and a look at its data: memory, bytes and messages, and the pace of the links.

Starts no process. How fast the machines compute it tells of one thing alone: widths of the dense model.
"""
# S = servers, W = workers

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from functools import partial
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardkeep.assembly.item_side import build_sides
from shardkeep.assembly.kernel_needs import needed_kernels
from shardkeep.assembly.model import build_dense_model, row_spec, table_specs
from shardkeep.assembly.worker import training_job
from shardkeep.base.arrays import Float64s
from shardkeep.base.compiling.kernels import load_kernels
from shardkeep.base.errors import ConfigError, DataError
from shardkeep.base.settings import MOST_STEPS
from shardkeep.compression.tower.compressor import DenseCompression
from shardkeep.compression.tower.exchange import Ranks
from shardkeep.config import JobConfig
from shardkeep.estimate.dry_run import Played, TableRows, play
from shardkeep.estimate.padding import padding_gain
from shardkeep.estimate.tower import MATTERS_FROM, PAYS_FROM, sharded_bytes, tower_memory
from shardkeep.ps.config import TableSpec
from shardkeep.ps.placement import BUCKETS
from shardkeep.ps.server.table.layout import RowLayout
from shardkeep.workers.collectives import wire_bytes
from shardkeep.workers.collectives.wire_bytes import goes_direct
from shardkeep.workers.data.samples import Data, Progress
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.dense.state import floating_buffers
from shardkeep.workers.dense.tower import MakeCompression
from shardkeep.workers.run import step_slices

ID_BYTES, VALUE_BYTES = 8, 4
INDEX_BYTES = 12
"""Of a row, on the average: entries of 8 bytes, 0.6 to 0.7 of them taken (ps/server/table/index.py), and pages."""
MILLION = 1_000_000
Part = dict[str, Any]
CLASSES = {
    "pull": "ids to the servers",
    "pull answer": "rows to the workers",
    "push": "gradients to the servers",
    "push answer": "acknowledgements",
}


def estimate(config: JobConfig, *, gbit_per_s: float, progress: Progress | None = None) -> Part:
    """The job's estimate as JSON types; seconds, and the conversion of files that were never read before.

    Without data (`note` says why) it has the tables alone, at a million rows each.

    Args:
        config: The job; `data.root` must be resolved.
        gbit_per_s: Bandwidth of each process's link, each way, in 10^9 bits.
        progress: Told how far the conversion is.

    Raises:
        ConfigError: The bandwidth or a setting is wrong.
    """
    if not 0.0 < gbit_per_s < float("inf"):
        raise ConfigError(f"--gbit-per-s {gbit_per_s:g}: allowed: a number above 0")
    load_kernels(needed_kernels(config, "server", "worker"))
    try:
        data = open_data(config.data, seed=config.seed, progress=progress, items=config.items)
    except DataError as error:
        tables = [row_spec(config, name) for name in _named_tables(config)]
        servers = max(config.servers, 1)
        rows = TableRows(MILLION, np.full(servers, 1.0 / servers))
        memory = memory_of(tables, {table.name: rows for table in tables})
        return {"job": _job(config), "note": f"{error}", **memory}
    return _with_data(config, data, gbit_per_s)


def _with_data(config: JobConfig, data: Data, gbit_per_s: float) -> Part:
    tables = table_specs(config, data.train.schema)
    slices = step_slices(training_job(config, data))
    steps = min(slices.num_steps, config.train.max_steps or slices.num_steps)
    played = play(config, tables, data, slices, steps)
    tower = tower_of(config, data)
    traffic = traffic_of(played, tower, workers=config.workers)
    per_step = sum(row["bytes"] for row in traffic)
    links = links_of(played, tower, config, gbit_per_s)
    bound_ms = max((link["bound_ms"] for link in links), default=0.0)
    return {
        "job": _job(config) | {"steps": steps, "step_samples": slices.global_batch, "samples": len(data.train)},
        "drawn": {"steps": played.steps, "samples": played.samples, "rows_counted": played.counted},
        **memory_of(tables, played.rows),
        "tower": tower,
        "step": {
            "ids_per_worker": played.ids,
            "distinct_per_worker": played.unique,
            **_unpooled(config, data, tables, played),
            "calls": played.calls,
            "traffic": traffic,
            "tables": table_traffic(played),
        },
        "bytes_per_step": per_step,
        "bytes_per_sample": per_step / slices.global_batch,
        "gbit_per_s": gbit_per_s,
        "links": links,
        "journal": _journal(config, played, bound_ms),
        "bound_ms": bound_ms,
        "bound_samples_per_s": slices.global_batch / bound_ms * 1e3 if bound_ms else None,
    }


def _unpooled(config: JobConfig, data: Data, tables: Sequence[TableSpec], played: Played) -> Part:
    """The rows of sequences in a micro-batch; nothing without sequences. Their gradients take as much memory again."""
    if not played.unpooled:
        return {}
    dims = {table.name: table.dim for table in tables}
    ids = {c: played.unpooled[c.name] * config.train.batch_size for g in data.train.schema.sequences for c in g.ids}
    size = sum(count * dims[column.table] * VALUE_BYTES for column, count in ids.items())
    return {"unpooled": {"ids": sum(ids.values()), "bytes": size}}


def _job(config: JobConfig) -> Part:
    keys = {"name": config.name, "servers": config.servers, "workers": config.workers}
    return keys | {"batch_size": config.train.batch_size, "accumulate": config.train.accumulate}


def _journal(config: JobConfig, played: Played, bound_ms: float) -> Part | None:
    """What the busiest server appends to its journal; None = it has none. How fast the job trains is not known: the
    pace of the links is the most."""
    if not config.servers or config.recovery.journal == "off" or not config.recovery.restarts:
        return None
    size = float(played.bytes_S.get("push", np.zeros(1)).max())
    return {"bytes_per_step": size, "most_bytes_per_s": size / bound_ms * 1e3 if bound_ms else None}


def _named_tables(config: JobConfig) -> list[str]:
    """The tables that the config itself names; what else there is only the data knows."""
    named = [c.table or c.column for c in config.data.sparse if "*" not in c.column or c.table]
    return list(dict.fromkeys(named + [name for name in config.tables if name != "default"])) or ["default"]


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory_of(tables: Sequence[TableSpec], rows: Mapping[str, TableRows]) -> Part:
    """Bytes of each table over all servers, and of each server over all tables.

    A table has no more rows than its capacity."""
    listed: list[Part] = []
    num_servers = len(next(iter(rows.values())).shares_S)
    servers: list[Part] = [{"index": s, "rows": 0, "bytes": 0} for s in range(num_servers)]
    for table in tables:
        limit, found = table.evict.max_rows if table.evict else None, rows[table.name]
        capacity = (limit or 0) // BUCKETS * BUCKETS
        count = min(found.rows, capacity or math.inf)
        rows_S, counted_S = (_split(number, found.shares_S) for number in (count, found.candidates))
        parts = [table_bytes(table, *both) for both in zip(rows_S, counted_S, strict=True)]
        for server, part in zip(servers, parts, strict=True):
            server["rows"] += part["rows"]
            server["bytes"] += part["bytes"]
        total = {key: sum(part[key] for part in parts) for key in parts[0]}
        head: Part = {"name": table.name, "dim": table.dim, "optimizer": table.optimizer.name}
        head |= {"precision": {"rows": table.dtype, "state": table.state_dtype}}
        head |= {"capacity": capacity} if capacity else {}
        listed.append(head | total | {"bytes_per_row": total["bytes"] / max(total["rows"], 1)})
    return {"tables": listed, "servers": servers}


def _split(count: float, shares_S: Float64s) -> list[int]:
    """The whole numbers of all servers, which add up."""
    ends_S = np.round(np.cumsum(shares_S) * count).astype(int)
    return [int(part) for part in np.diff(ends_S, prepend=0)]


def table_bytes(table: TableSpec, rows: int, counted: int = 0) -> dict[str, int]:
    """What `rows` rows of a table and `counted` ids without a row take on one server: its parts, and all of the
    memory's pages."""
    layout, index = RowLayout.of(table), rows * INDEX_BYTES
    sizes = [rows * layout.width * VALUE_BYTES, index]
    found = {
        "rows": rows,
        "weights": rows * layout.row_words * VALUE_BYTES,
        "slots": rows * layout.slot_words * VALUE_BYTES,
        "ids": rows * ID_BYTES,
        "index": index,
    }
    if layout.num_counters:
        found["counters"] = rows * layout.num_counters * VALUE_BYTES
    if table.candidates is not None:
        width = RowLayout.of(table.candidates, counts=True).width
        sizes += [counted * width * VALUE_BYTES, counted * INDEX_BYTES]
        found |= {"candidates": counted, "candidate_bytes": sum(sizes[-2:])}
    return found | {"bytes": sum(-(-size // PAGESIZE) * PAGESIZE for size in sizes)}


# ---- traffic ---------------------------------------------------------------------------------------------------------


def tower_of(config: JobConfig, data: Data) -> Part:
    """Parameters of the dense model, and what all workers together send to add up their gradients in a step."""
    schema = data.train.schema
    embeddings, _ = build_sides(config, data, {spec.name: spec for spec in table_specs(config, schema)})
    model = build_dense_model(config, schema, embeddings)
    trained = [p for p in model.parameters() if p.requires_grad]
    size, count, fsdp = sum(p.nbytes for p in trained), sum(p.numel() for p in trained), config.tower.parallel == "fsdp"
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    ring_bytes = size if config.consistency.mode != "sync" else None
    if fsdp:
        reduced = sharded_bytes(model, config.workers, config.train.accumulate)
    else:
        make = partial(DenseCompression, config.compression.tower, import_from=Path(config.data.root))
        reduced = reduce_bytes(make, shapes, config.workers, ring_bytes=ring_bytes)
    spread = sum(
        sum(wire_bytes.broadcast(config.workers, sum(b.nbytes for b in buffers), source=True).values())
        for buffers in floating_buffers(model)
    )
    matters = config.workers > 1 and (fsdp or count >= MATTERS_FROM)
    return {
        "parameters": count,
        "bytes": size,
        "reduce_bytes": reduced * config.workers + spread,
        "reduce_bytes_per_worker": reduced,
        **({"memory": tower_memory(config, model), "fsdp_pays_from": PAYS_FROM} if matters else {}),
        "padding": padding_gain(config, model),
    }


def reduce_bytes(
    make: MakeCompression, shapes: Mapping[str, tuple[int, ...]], workers: int, *, ring_bytes: int | None
) -> int:
    """Bytes that a worker sends for one sum of the tower's gradients over all workers, headers included, after any
    warm-up. `ring_bytes`: of all gradients, where an uncompressed sum of more than a few is a ring all-reduce, as
    outside of `sync`; None = it adds in rank order. The gradients are random: packets whose size depends on the values
    differ from those of real ones."""
    sent, ranks, random = 0, Ranks(0, workers), torch.Generator().manual_seed(0)
    dense = make(shapes, torch.device("cpu"))
    if dense.name == "none" and ring_bytes is not None and not goes_direct(ring_bytes * (workers - 1)):
        sent = sum(wire_bytes.all_reduce(workers, ring_bytes).values())
    elif workers > 1:
        dense.begin(MOST_STEPS)
        rounds = dense.sum(list(shapes), [torch.randn(shape, generator=random) for shape in shapes.values()], ranks)
        exchange = next(rounds)
        with contextlib.suppress(StopIteration):
            while True:
                sent += sum(wire_bytes.exchange(workers, exchange).values())
                mine = exchange.packets if exchange.packets.ndim == 1 else exchange.packets[0]
                exchange = rounds.send(torch.stack([mine] * workers))
    return sent


def traffic_of(played: Played, tower: Mapping[str, Any], *, workers: int) -> list[Part]:
    """Bytes of a full step over all workers, by class."""
    rows: list[Part] = []
    for name, text in CLASSES.items():
        rows.append({"class": name, "text": text, "bytes": float(played.bytes_S.get(name, np.zeros(1)).sum())})
    if workers > 1:
        rows.append({"class": "dense", "text": "gradients of the tower", "bytes": float(tower["reduce_bytes"])})
    return rows


def table_traffic(played: Played) -> list[Part]:
    """What each table adds to a full step over all workers: ids and rows of its pulls, ids and gradients of its
    pushes, without what messages have around them."""
    return [
        {
            "name": name,
            "pull_bytes": found.get("pull", 0.0) + found.get("pull answer", 0.0),
            "push_bytes": found.get("push", 0.0),
        }
        for name, found in played.table_bytes.items()
    ]


def links_of(played: Played, tower: Mapping[str, Any], config: JobConfig, gbit_per_s: float) -> list[Part]:
    """What a step brings into and out of the busiest server and a worker, and the time that takes at least."""
    if not config.servers:
        return []
    pull, rows, push, acks = (played.bytes_S.get(name, np.zeros(config.servers)) for name in CLASSES)
    reduced = tower["reduce_bytes_per_worker"]
    to_servers, to_workers = float((pull + push).sum()), float((rows + acks).sum())
    ends = [
        ("busiest server", float((pull + push).max()), float((rows + acks).max())),
        ("worker", to_workers / config.workers + reduced, to_servers / config.workers + reduced),
    ]
    per_ms = gbit_per_s * 1e9 / 8 / 1e3
    return [{"process": n, "in_bytes": i, "out_bytes": o, "bound_ms": max(i, o) / per_ms} for n, i, o in ends]

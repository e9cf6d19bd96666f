"""What the dense model takes of a worker's memory, whole (`ddp`) and in shards (`fsdp`), and what shards send."""
# W = workers

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from shardkeep.assembly.worker import kept_steps
from shardkeep.compression.tower.exchange import Exchange
from shardkeep.config import JobConfig
from shardkeep.workers.collectives import wire_bytes
from shardkeep.workers.config import TowerOptimizerConfig
from shardkeep.workers.dense.shards import blocks_of

VALUE_BYTES = 4
PAYS_FROM = 50_000_000
"""Parameters from which fsdp takes clearly less memory (benchmarks/fsdp_memory.py): below, freed memory stays with the
process."""
MATTERS_FROM = 20_000_000
"""Parameters from which the choice is shown. Here ddp takes 0.9 GB and fsdp 1.13 of it; less fits anywhere."""
FIRST_SUM = 3
"""Copies of all gradients, beside one from each worker, in DDP's first step, which sums them flat."""
AT_ONCE = 4
"""Copies of the largest block that FSDP has at once: gathered, the next one's, its gradient, and what is sent of it."""


def tower_memory(config: JobConfig, model: nn.Module) -> dict[str, dict[str, int]]:
    """Bytes of a worker for the dense model with ddp and with fsdp: `parameters`, `gradients`, `optimizer`, `exchanged`
    (the most that sums and gathers have at once), `peak`, and `kept`, the states for recovery, in mapped files."""
    workers, slots = config.workers, _slots(config.tower.optimizer)
    whole, split = (_values(model.parameters(), ranks) for ranks in (1, workers))
    blocks = [_values(block.parameters(), 1) for block in blocks_of(model)]
    root = whole - sum(blocks)
    exchanged = {"ddp": (FIRST_SUM + workers) * whole, "fsdp": 2 * root + AT_ONCE * max(blocks, default=0)}
    kept = kept_steps(config) * (1 + slots) * whole if config.recovery.restarts else 0
    found = {}
    for kind, own, states in (("ddp", whole, kept), ("fsdp", split, 0)):
        sums = exchanged[kind] if workers > 1 else 0
        # DDP's first sum comes before the optimizer has a state
        peak = 2 * own + (max(slots * own, sums) if kind == "ddp" else slots * own + sums)
        values = {"parameters": own, "gradients": own, "optimizer": slots * own, "exchanged": sums, "peak": peak}
        found[kind] = {key: VALUE_BYTES * count for key, count in (values | {"kept": states}).items()}
    return found


def sharded_bytes(model: nn.Module, workers: int, micro_batches: int) -> int:
    """Bytes that a worker sends in a step for the parameters and gradients of a model in shards, as float32: each block
    is gathered for each of both passes, the rest once."""
    blocks = [list(block.parameters()) for block in blocks_of(model)]
    listed = {p for block in blocks for p in block}
    groups = [(block, 2) for block in blocks] + [([p for p in model.parameters() if p not in listed], 1)]
    sent = 0
    for parameters, gathers in groups:
        part = VALUE_BYTES * _values(parameters, workers)
        packets = Exchange(torch.empty(workers, part, dtype=torch.uint8, device="meta"))
        gathered, spread = wire_bytes.all_gather(workers, part), wire_bytes.exchange(workers, packets)
        sent += gathers * sum(gathered.values()) + sum(spread.values())
    return micro_batches * sent if workers > 1 else 0


def _values(parameters: Iterable[nn.Parameter], workers: int) -> int:
    """Values of one worker, which has as many rows of each parameter as the one with most."""
    return sum(-(-p.shape[0] // workers) * p[0].numel() if p.ndim else 1 for p in parameters)


def _slots(optimizer: TowerOptimizerConfig) -> int:
    """Values of the optimizer's state for each parameter."""
    return int(bool(optimizer.momentum)) if optimizer.name == "sgd" else 2

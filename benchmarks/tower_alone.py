"""The DLRM tower of W1 alone, as plain PyTorch: shardkeep's own module, inputs ready, one pinned process, no rows.

Forward, binary cross entropy, backward into the 26 embeddings as leaves, SGD. What no row access can beat.
"""
# B = batch, D = embedding dim

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import numpy as np
import workload

READY = 4
"""Batches of inputs made ahead; more would only wait in slower memory."""


Prepare = Callable[[], tuple[Callable[[int], None], Callable[[], None]]]
"""Makes a step, and what waits for the device to end all steps."""


def tower_alone(
    *,
    dim: int,
    seconds: float,
    warm_up_s: float = 3.0,
    batch: int = workload.BATCH,
    core: int = 0,
    device: str = "cpu",
    as_in_job: bool = False,
) -> harness.Figures:
    """`alone` for the tower of W1. `as_in_job`: with linear layers multiplied as in shardkeep's workers, too
    (workers/dense/cpu/onednn.py)."""
    prepare = partial(_prepared, dim, batch, device, as_in_job)
    return alone(prepare, batch=batch, seconds=seconds, warm_up_s=warm_up_s, core=core, as_in_job=as_in_job)


def alone(
    prepare: Prepare,
    *,
    batch: int,
    seconds: float,
    warm_up_s: float = 3.0,
    core: int | None = 0,
    as_in_job: bool = False,
) -> harness.Figures:
    """samples_per_s, steps_per_s and cpu_us_per_sample of a step in a fresh process on `core`; None = on
    all of them.

    `as_in_job`: with malloc set as in shardkeep's workers (src/shardkeep/base/machine/allocator.py); else as glibc has
    it: there page faults come and go from run to run."""
    context = mp.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_train, args=(prepare, batch, seconds, warm_up_s, core, as_in_job, queue))
    return harness.result_of([process], queue, limit_s=seconds + warm_up_s + 120)


def _train(
    prepare: Prepare, batch: int, seconds: float, warm_up_s: float, core: int | None, as_in_job: bool, queue: Any
) -> None:
    if core is not None:
        harness.pin(core)
    if as_in_job:
        from shardkeep.base.machine.allocator import keep_freed_memory

        keep_freed_memory()
    step, finish = prepare()
    count = _repeat(step, warm_up_s, 0)
    finish()
    cpu, started = harness.cpu_seconds(), time.perf_counter()
    steps = _repeat(step, seconds, count) - count
    finish()
    elapsed, cpu = time.perf_counter() - started, harness.cpu_seconds() - cpu
    queue.put({
        "samples_per_s": steps * batch / elapsed,
        "steps_per_s": steps / elapsed,
        "cpu_us_per_sample": cpu / (steps * batch) * 1e6,
    })  # fmt: skip


def _prepared(dim: int, batch: int, device: str, as_in_job: bool) -> tuple[Callable[[int], None], Callable[[], None]]:
    import torch
    import torch.nn.functional as F

    from shardkeep.workers.dense import onednn
    from shardkeep.workers.models.dlrm import Dlrm
    from shardkeep.workers.models.layers.hidden import HiddenOptions

    torch.set_num_threads(1)
    torch.manual_seed(1)
    names = [f"C{f + 1}" for f in range(len(workload.TABLE_SIZES))]
    model = Dlrm(
        num_dense=workload.NUM_DENSE, features=dict.fromkeys(names, dim), default_dim=dim, bottom=[512, 256],
        hidden=[512, 256], options=HiddenOptions(),
    ).to(device)  # fmt: skip
    if as_in_job and onednn.why_not(torch.device(device)) is None and onednn.helps():
        onednn.use_for(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    dense, label = (torch.from_numpy(array).to(device) for array in workload.draw_dense(READY, seed=1, batch=batch))
    rng = np.random.default_rng(1)
    rows = [{n: _leaf(rng, batch, dim).to(device).requires_grad_() for n in names} for _ in range(READY)]

    def step(i: int) -> None:
        leaves = rows[i % READY]
        logits_B1 = model(dense[i % READY], leaves)
        loss = F.binary_cross_entropy_with_logits(logits_B1, label[i % READY])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for leaf in leaves.values():
            leaf.grad = None

    return step, torch.cuda.synchronize if device == "cuda" else lambda: None


def _leaf(rng: np.random.Generator, batch: int, dim: int) -> Any:
    import torch

    return torch.from_numpy(rng.uniform(-0.05, 0.05, (batch, dim)).astype(np.float32))


def _repeat(step: Callable[[int], None], seconds: float, first: int) -> int:
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        step(first)
        first += 1
    return first

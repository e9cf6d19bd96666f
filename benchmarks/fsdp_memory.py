"""How much memory does a worker take for a large tower, with `tower.parallel: fsdp` beside `ddp`?

Two workers as processes over gloo, without servers, rows or Rewind: some steps, then a checkpoint, then an evaluation.
The figure is the peak of the process (VmHWM), without what it has when torch is loaded.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import harness

WORKERS, BATCH, COLUMNS = 2, 64, 13
SIZES = {"5 x 4 M": (5, 2000), "8 x 6.25 M": (8, 2500), "8 x 25 M": (8, 5000)}
"""Equal hidden layers, and their width."""
TARGET = 0.65
"""Of the largest tower."""
MB = 1e6


def main() -> None:
    parser = harness.arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=4, help="steps of each tower")
    options = harness.parse(parser)
    sizes = dict(list(SIZES.items())[: 1 if options.smoke else None])
    results: dict[str, Any] = {"workers": WORKERS, "batch": BATCH, "towers": {}}
    for name, (layers, width) in sizes.items():
        contestants = {kind: _contestant(kind, layers, width, options.steps) for kind in ("ddp", "fsdp")}
        found = harness.alternate(contestants, rounds=options.rounds, seconds=0.0)
        shares = {key: harness.ratios(found, "fsdp", "ddp", key) for key in ("trained_mb", "saved_mb", "step_ms")}
        for key, share in shares.items():
            target = TARGET if name == "8 x 25 M" and key != "step_ms" else None
            harness.show_ratio(f"{name}: {key}, fsdp / ddp", share, target)
        results["towers"][name] = {"parameters": layers * width**2, "rounds": found, "fsdp / ddp": shares}
    harness.write(options.json, "fsdp_memory", results)


def _contestant(kind: str, layers: int, width: int, steps: int) -> harness.Contestant:
    def run(_seconds: float) -> harness.Figures:
        import torch.distributed as dist

        context = multiprocessing.get_context("spawn")
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        queue = context.Queue()
        arguments = (kind, layers, width, steps, store.port, queue)
        processes = [context.Process(target=_worker, args=(rank, *arguments)) for rank in range(WORKERS)]
        return harness.result_of(processes, queue, limit_s=1800)

    return run


def _worker(rank: int, kind: str, layers: int, width: int, steps: int, port: int, queue: Any) -> None:
    import torch
    import torch.distributed as dist

    from shardkeep.base.machine.versions import peak_rss_bytes
    from shardkeep.workers.checkpoint.tower_state import save_tower, tower_state
    from shardkeep.workers.collectives.process_group import ProcessCollective

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    collective = ProcessCollective(store, rank=rank, world_size=WORKERS, generation=1, timeout_s=600.0)
    tower = _tower(kind, layers, width)
    built = peak_rss_bytes()
    tower.join(collective)
    dense, label = torch.randn(BATCH, COLUMNS), torch.randint(2, (BATCH, 1)).float()
    began = time.perf_counter()
    for step in range(steps):
        if step == 1:
            began = time.perf_counter()  # the first one forms DDP's buckets
        tower.backward(dense, {}, label, 1 / BATCH / WORKERS)
        tower.update(step)
    figures = {"step_ms": 1e3 * (time.perf_counter() - began) / max(steps - 1, 1), "built_mb": built / MB}
    figures |= {"trained_mb": peak_rss_bytes() / MB, "rest_mb": _resident() / MB}
    with tempfile.TemporaryDirectory() as folder:
        if kind == "fsdp" or not rank:
            state = tower_state(tower, None if rank else Path(folder))
            if not rank:
                save_tower(state, Path(folder))
            del state
    figures["saved_mb"] = peak_rss_bytes() / MB
    with tower.whole():
        tower.predict(dense, {})
    figures["evaluated_mb"] = peak_rss_bytes() / MB
    collective.barrier(purpose="agreements")
    collective.close()
    if not rank:
        queue.put(figures)


def _tower(kind: str, layers: int, width: int) -> Any:
    import torch

    from shardkeep.workers.config import TowerConfig, TrainConfig
    from shardkeep.workers.dense.loss import Objective
    from shardkeep.workers.dense.tower import Tower
    from shardkeep.workers.model_config import DnnConfig
    from shardkeep.workers.models.registry import build_model

    torch.manual_seed(0)
    config = DnnConfig(hidden=[width] * (layers + 1))
    return Tower(
        build_model(config, num_dense=COLUMNS, features={}, default_dim=8),
        config=TowerConfig(parallel=kind, amp="off", compile="off"),
        objective=Objective.of(TrainConfig(batch_size=BATCH), ()),
        device=torch.device("cpu"),
        sync=False,
    )


def _resident() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    main()

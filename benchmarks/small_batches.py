"""Many small messages (W1 with batch 64): steps per second against the official tutorial's way, 1 server + 1 worker.

Beside them what no step over torch RPC can go below: bare round trips between two pinned processes, set up as
shardkeep is, empty and of a step's sizes (one pull with its answer, then one push with its acknowledgement).
"""
# U = unique ids of a step over all tables, D = embedding dim

from __future__ import annotations

import multiprocessing as mp
import tempfile
import time
import warnings
from typing import Any

import harness
import numpy as np
import workload
from tower_alone import tower_alone
from w1_job import WARM_UP_S, shardkeep_job

BATCH = 64
TARGET = 3.0
OURS, TUTORIAL, TOWER, ECHO = "shardkeep", "official tutorial", "the tower alone", "bare torch RPC"


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[16])
    parser.add_argument("--batch", type=int, default=BATCH, help="samples per worker and step")
    options = harness.parse(parser)
    results = {f"D={dim}": compare(dim, options) for dim in options.dims}
    harness.write(options.json, "small_batches", results)


def compare(dim: int, options: Any) -> dict[str, Any]:
    from opponents import contestant

    print(f"D = {dim}, batch {options.batch}")

    def ours(seconds: float) -> harness.Figures:
        warm_up_s = 1.0 if options.smoke else WARM_UP_S
        return shardkeep_job(
            dim=dim, servers=1, workers=1, seconds=seconds, warm_up_s=warm_up_s, batch=options.batch,
            device=options.device,
        )  # fmt: skip

    def tower(seconds: float) -> harness.Figures:
        return tower_alone(dim=dim, seconds=seconds, batch=options.batch, device=options.device)

    def echo(seconds: float) -> harness.Figures:
        return round_trips(unique_ids(options.batch), dim, seconds)

    tutorial = contestant("rpc_tutorial", workload="w1", dim=dim, workers=1, batch=options.batch)
    found = harness.alternate(
        {OURS: ours, TUTORIAL: tutorial, TOWER: tower, ECHO: echo}, rounds=options.rounds, seconds=options.seconds
    )
    ratio = harness.ratios(found, OURS, TUTORIAL, "samples_per_s")
    harness.show_ratio(f"D={dim} steps/s at batch {options.batch}, shardkeep / tutorial", ratio, TARGET)
    times = {
        "shardkeep's step": harness.spread([1e6 / f["steps_per_s"] for f in found[OURS]]),
        "the tutorial's step": harness.spread([1e6 * options.batch / f["samples_per_s"] for f in found[TUTORIAL]]),
        "the tower alone": harness.spread([1e6 / f["steps_per_s"] for f in found[TOWER]]),
        "an empty round trip": harness.spread([f["empty_us"] for f in found[ECHO]]),
        "a step's two round trips": harness.spread([f["step_us"] for f in found[ECHO]]),
    }
    for what, us in times.items():
        print(f"{what:<28} {us['min']:8.0f} / {us['median']:8.0f} / {us['max']:8.0f} us")
    return {"rounds": found, "ratio": ratio, "us": times}


def unique_ids(batch: int) -> int:
    """U of a step, mean over some."""
    ids_NFB = workload.draw_ids(8, seed=1, batch=batch)
    return round(np.mean([sum(len(np.unique(ids_B)) for ids_B in ids_FB) for ids_FB in ids_NFB]))


def round_trips(num_unique: int, dim: int, seconds: float) -> harness.Figures:
    """Microseconds of an empty round trip and of those of a step that pulls and pushes `num_unique` rows."""
    context = mp.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        rest = (f"file://{folder}/meeting", num_unique * 8, num_unique * 4 * dim, seconds, queue)
        processes = [context.Process(target=_member, args=(rank, *rest)) for rank in range(2)]
        return harness.result_of(processes, queue, limit_s=seconds + 120)


_ANSWERS: dict[int, Any] = {}


def _answer(message: Any, size: int) -> Any:
    """On the server: `size` bytes, made once."""
    import torch

    return _ANSWERS.setdefault(size, torch.zeros(size, dtype=torch.uint8))


def _member(rank: int, meeting: str, id_bytes: int, row_bytes: int, seconds: float, queue: Any) -> None:
    import torch
    from torch.distributed import rpc

    harness.pin(1 - rank)  # rank 0 answers, on core 1
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=4, init_method=meeting, _transports=["uv"], _channels=["cma", "basic"]
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)
        rpc.init_rpc(f"member{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 1:
        empty, ids, push = (torch.zeros(n, dtype=torch.uint8) for n in (0, id_bytes, id_bytes + row_bytes))
        queue.put({
            "empty_us": _timed([(empty, 0)], seconds / 2),
            "step_us": _timed([(ids, row_bytes), (push, 0)], seconds / 2),
        })  # fmt: skip
    rpc.shutdown()


def _timed(calls: list[tuple[Any, int]], seconds: float) -> float:
    """Microseconds that these calls take, one after the other."""
    from torch.distributed import rpc

    def once() -> None:
        for message, size in calls:
            rpc.rpc_sync("member0", _answer, args=(message, size))

    for _ in range(100):
        once()
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        once()
        count += 1
    return (time.perf_counter() - started) / count * 1e6


if __name__ == "__main__":
    main()

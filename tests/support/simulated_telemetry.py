"""The figures of the processes of a simulated job, by step: loss, parts of a step, bytes, rows, memory.

tests/support/simulated_runs.py writes them. Every figure depends on the scene, the process and the step alone.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.simulated_runs import Scene

Record = dict[str, Any]
Counts = dict[str, Any]
GIGABYTE = 1_000_000_000
PARTS = {  # shares of a step of a worker that waits for nobody
    "data": 0.01,
    "pull_wait": 0.05,
    "lookup": 0.04,
    "forward": 0.25,
    "backward": 0.35,
    "collect": 0.02,
    "dense_reduce": 0.10,
    "optimizer": 0.03,
    "keep": 0.02,
    "push": 0.11,
    "other": 0.02,
}
SLOW = 2.5
"""A slow worker's forward and backward pass take so many times the others'."""
STEP_IDS = 26 * 1200
"""Unique ids of one worker's step, in all tables."""
FLOPS_PER_SAMPLE, FLOPS_PER_S, FLOPS_PER_S_ALONE = 2_105_856, 41e9, 82e9
"""Of the dense model's matrix products."""
BEST_AUC, FIRST_AUC = 0.8504, 0.62
BEST_LOSS, FIRST_LOSS = 0.44, 0.69


class Figures:
    """What the processes of one scene count."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def progress(self, step: int) -> Record:
        """A record of kind progress."""
        scene = self._scene
        return {
            "step": step,
            "total_steps": scene.steps,
            "epoch": 0,
            "samples": self._samples(step),
            "loss": self.loss(step),
            "samples_per_s": self._speed(step),
            "dropped_rows": 0,
            "skipped_steps": 0,
            "step_ms": self.step_ms(0, step),
            "staleness": self.staleness(step),
        }

    def evaluation(self, step: int) -> Record:
        """A record of kind eval."""
        scene = self._scene
        good = self._learned(step) - self._diverged(step)
        auc = max(0.5, FIRST_AUC + (BEST_AUC - 0.01 - FIRST_AUC) * good + self._noise("auc", step) * 0.001)
        logloss = self.loss(step)
        total = sum_of(self.worker_bytes(index, step) for index in range(scene.workers))
        sums = {kind: sum(total[kind].values()) for kind in ("push", "pull", "tower")}
        return {
            "step": step,
            "auc": auc,
            "logloss": logloss,
            "normalized_entropy": logloss / 0.63,
            "calibration": 1.0 + 0.02 * self._noise("calibration", step),
            "samples": 60_000,
            "unseen": {f"C{t + 1}": [600, 60_000] for t in range(scene.tables)},
            "best_auc": BEST_AUC,
            "train_samples": self._samples(step),
            "train_bytes": {**sums, "total": sum(sums.values())},
        }

    def checkpoint(self, step: int) -> Record:
        """A record of a checkpoint, without its phase."""
        size = sum(table["bytes"] for table in self._tables(step)) * max(1, self._scene.servers) + 700_000
        text = f"step {step} in step-{step:08d}: {size / 1e6:.1f} MB, 0.87 s, training held up 0.03 s"
        return {"step": step, "bytes": size, "seconds": 0.87, "held_s": 0.026, "text": text}

    def telemetry(self, role: str, index: int, step: int, *, every_s: float, restarted: bool) -> Record:
        """One process's record of kind telemetry, without its head."""
        memory = {"rss_bytes": self.rss(role, index, step), "limit_bytes": 8 * GIGABYTE, "metrics": None}
        if role == "coordinator":
            members = self._scene.workers + self._scene.servers
            return {"state": "training", "members": members, **memory}
        if role == "worker":
            return {**self._worker(index, step, every_s=every_s), **memory}
        since = self._scene.lost_at if restarted and index == self._scene.lost_server else 0
        return {**self._server(step, since=since), **memory}

    def step_ms(self, worker: int, step: int | None = None) -> dict[str, float]:
        """The parts of a step in ms; all workers' steps end together, with the slowest one's."""
        scene = self._scene
        slow = scene.slow_worker
        base = (
            scene.step_ms if slow is None else scene.step_ms / (1 + (SLOW - 1) * (PARTS["forward"] + PARTS["backward"]))
        )
        parts = {name: share * base for name, share in PARTS.items()}
        if step is not None:
            parts = {k: v * (1 + 0.05 * self._noise(f"{k} {worker}", step)) for k, v in parts.items()}
        if worker == slow:
            parts["forward"] *= SLOW
            parts["backward"] *= SLOW
        if scene.workers == 1 or not scene.servers:
            parts["dense_reduce"] = 0.0
        elif slow is not None and worker != slow:
            parts["dense_reduce"] += (SLOW - 1) * base * (PARTS["forward"] + PARTS["backward"])
        parts = {name: round(value, 4) for name, value in parts.items()}
        return {"total": round(sum(parts.values()), 4), **parts}

    def mean_step_ms(self) -> dict[str, float]:
        """The parts of a step over all workers."""
        found = [self.step_ms(worker) for worker in range(self._scene.workers)]
        return {name: round(sum(one[name] for one in found) / len(found), 4) for name in found[0]}

    def loss(self, step: int) -> float:
        """The loss of training."""
        better = (FIRST_LOSS - BEST_LOSS) * self._learned(step)
        return FIRST_LOSS - better + 1.4 * self._diverged(step) + 0.004 * self._noise("loss", step)

    def staleness(self, step: int, *, workers: int = 1) -> dict[str, int]:
        """The histogram of the rows' ages."""
        if not self._scene.servers:
            return {"0": step * workers}
        return {"0": workers, "1": workers, "2": max(0, step - 2) * workers}

    def rss(self, role: str, index: int, step: int) -> int:
        """Memory of a process."""
        first = {"coordinator": 0.25, "worker": 0.55, "server": 0.4}[role] * GIGABYTE
        rows = sum(table["bytes"] for table in self._tables(step)) if role == "server" else 0
        return int(first * (1 + 0.01 * index)) + rows

    def worker_bytes(self, worker: int, step: int) -> Counts:
        """What one worker sent and received until `step`, by kind."""
        ids = step * STEP_IDS * 8
        push, pull = ids * 8, ids * 8
        tower = step * 460_000 if self._scene.workers > 1 and self._scene.servers else 0
        if self._scene.compression:
            push, pull = push // 4, pull // 2
        framing = step * 400
        return {
            "push": {"framing": framing // 2, "ids": ids, "rpc": step * 2000, "values": push},
            "pull": {"framing": framing, "ids": ids, "rpc": step * 2100, "values": pull},
            "tower": {"framing": framing, "values": tower} if tower else {},
            "read": {"framing": 2304, "ids": 1_840_464, "metrics": 243_552, "rpc": 11_280, "values": 14_723_712},
            "control": 24_528,
        }

    def fp32_bytes(self, worker: int, step: int) -> Counts:
        """What one worker would have sent until `step` as float32 without compression."""
        rows = step * STEP_IDS * 72
        return {"push": rows, "pull": rows, "tower": 460_000 * step if self.worker_bytes(worker, step)["tower"] else 0}

    def summary_tables(self, step: int) -> list[Record]:
        """The tables of summary.json: all servers' rows."""
        servers = max(1, self._scene.servers)
        return [
            {"name": t["name"], "rows": t["rows"] * servers, "bytes": t["bytes"] * servers, "load_factor": 0.4}
            for t in self._tables(step)
        ]

    def products(self) -> Record:
        """What summary.json says of the dense model's matrix products."""
        rates = {"flops_per_s": FLOPS_PER_S, "flops_per_s_alone": FLOPS_PER_S_ALONE}
        return {"flops_per_sample": FLOPS_PER_SAMPLE, **rates}

    def _worker(self, worker: int, step: int, *, every_s: float) -> Record:
        scene = self._scene
        steps = max(1, round(every_s * 1000 / scene.step_ms))
        parts = self.step_ms(worker, step)
        counts = bytes_of(self.worker_bytes(worker, step))
        waits = {f"server {i}": round(parts["pull_wait"] / scene.servers, 3) for i in range(scene.servers)}
        return {
            "step": step,
            "samples": self._samples(step),
            "loss": self.loss(step) + 0.003 * self._noise(f"rank {worker}", step),
            "samples_per_s": self._speed(step),
            "steps": steps,
            "step_ms": parts,
            "wait_ms": waits,
            "bytes": counts,
            "fp32_bytes": self.fp32_bytes(worker, step),
            "staleness": self.staleness(step),
            "ids": step * scene.batch_size * 26,
            "unique_ids": step * STEP_IDS,
            "dropped_rows": 0,
            "skipped_steps": 0,
            "unsent_rows": 0,
            "unsent_share": None,
            "flops": step * scene.batch_size * FLOPS_PER_SAMPLE,
            "flops_per_s": FLOPS_PER_S,
            "compile_s": 0.0,
            "compile_rss_bytes": 0,
        }

    def _server(self, step: int, *, since: int) -> Record:
        scene = self._scene
        counted = step - since
        each = max(1, scene.steps // 5)
        last = step // each * each
        checkpoint = {"step": last, "seconds": 0.87, "time": scene.at(last + 0.9).isoformat(timespec="milliseconds")}
        return {
            "step": step,
            "tables": self._tables(step),
            "pulls": counted * scene.workers,
            "pushes": counted * scene.workers,
            "request_ms": round(2.5 + 0.5 * self._noise("request", step), 3),
            "parked_pulls": 0,
            "journal_bytes": (step - last) * 40_000,
            "checkpoint": checkpoint if last else None,
        }

    def _tables(self, step: int) -> list[Record]:
        """One server's tables: small ones are full soon, large ones grow."""
        share = step / max(1, self._scene.steps)
        found = []
        for i in range(self._scene.tables):
            largest = int(100 * 10_000 ** (i / max(1, self._scene.tables - 1)))
            rows = int(largest * (1 - math.exp(-40 * share * 100 / largest**0.5))) // max(1, self._scene.servers)
            found.append({"name": f"C{i + 1}", "rows": rows, "bytes": rows * 92, "created": rows})
        return found

    def _samples(self, step: int) -> int:
        return step * self._scene.batch_size * self._scene.workers

    def _speed(self, step: int) -> float:
        scene = self._scene
        each = scene.batch_size * scene.workers / scene.step_ms * 1000
        halted = scene.lost_server is not None and 0 <= step - scene.lost_at < 5000 / scene.step_ms
        return each * (0.5 if halted else 1.0) * (1 + 0.03 * self._noise("speed", step))

    def _learned(self, step: int) -> float:
        """From 0 to 1: how far training is, as curves of AUC go."""
        return 1 - math.exp(-6 * step / self._scene.steps)

    def _diverged(self, step: int) -> float:
        """From 0 to 1: how much of it is lost again, if the learning rate is too high."""
        late = step / self._scene.steps - 0.2
        return 1 - math.exp(-4 * late) if self._scene.rate_too_high and late > 0 else 0.0

    def _noise(self, what: str, step: int) -> float:
        """From -1 to 1, the same for the same figure and step."""
        return zlib.crc32(f"{self._scene.seed} {step} {what}".encode()) / (1 << 31) - 1


def bytes_of(counts: Counts) -> Counts:
    """The `bytes` of a record from the counts by kind."""
    push, pull, tower, read = (sum(counts[kind].values()) for kind in ("push", "pull", "tower", "read"))
    ids = counts["pull"].get("ids", 0)
    total = push + pull + tower + read + counts["control"]
    return {
        **counts,
        "to_servers": push + ids,
        "from_servers": pull - ids + read,
        "between_workers": tower,
        "total": total,
    }


def sum_of(several: Iterable[Counts]) -> Counts:
    """The sum of several workers' counts by kind."""
    total: Counts = {"push": {}, "pull": {}, "tower": {}, "read": {}, "control": 0}
    for counts in several:
        total["control"] += counts["control"]
        for kind in ("push", "pull", "tower", "read"):
            for part, count in counts[kind].items():
                total[kind][part] = total[kind].get(part, 0) + count
    return total

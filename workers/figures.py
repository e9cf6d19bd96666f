"""WorkerFigures: what one worker counts, for telemetry records and exporters. Counts and changes nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardkeep.compression.ledger import Ledger
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.control.telemetry import process_figures
from shardkeep.workers.fp32_bytes import DenseSums, fp32_bytes
from shardkeep.workers.step_counts import StepCounts
from shardkeep.workers.telemetry import Telemetry
from shardkeep.workers.timing.clock import PARTS

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """The figures of one worker since its process began. Any thread may ask for them.

    Attributes:
        step: Returns the number of steps that the job has done.
        generation: Returns the generation that the worker is in.
        sums: Of dense gradients; None = the loop is the user's own, and so are these sums.
        metrics: The address of the process's metrics; None = there is none.
    """

    client: RowClient
    telemetry: Telemetry
    counts: StepCounts
    ledger: Ledger
    step: Callable[[], int]
    generation: Callable[[], int]
    sums: DenseSums | None
    metrics: str | None = None

    def figures(self) -> Record:
        """Counts and seconds, as JSON types. `step` and `samples` are the job's position; `steps` and
        `trained_samples` only grow. `train_s`, `step_s` and `wait_s` are seconds: of training, by part of a step,
        and by server that was waited for."""
        client, watch, totals = self.client, self.telemetry.watch, self.ledger.totals()
        waits = {} if client.waits is None else dict(client.waits.seconds)
        return {
            "generation": self.generation(),
            "step": self.step(),
            "samples": self.telemetry.samples,
            **self.counts.figures(),
            "train_s": watch.now(),
            "step_s": {part: watch.seconds[part] for part in PARTS},
            "wait_s": {f"server {server}": waits[server] for server in sorted(waits)},
            "bytes": totals,
            "fp32_bytes": fp32_bytes(client, self.sums, self.telemetry, totals),
            "staleness": {str(steps): times for steps, times in sorted(dict(client.staleness_seen).items())},
            "dropped_rows": self.telemetry.dropped_rows,
            "skipped_steps": self.telemetry.skipped_steps,
            "unsent_rows": client.memory.num_unsent,
            "unsent_share": client.compressor.unsent_share,
            **process_figures(),
            "metrics": self.metrics,
        }


def worker_record(now: Record, last: Record) -> Record:
    """The telemetry record of a worker: the figures, and means over the steps since the last ones."""
    steps, seconds = now["steps"] - last["steps"], max(now["train_s"] - last["train_s"], 1e-9)
    per_step = 1e3 / max(steps, 1)
    parts = {part: (now["step_s"][part] - last["step_s"][part]) * per_step for part in now["step_s"]}
    waits = {server: (s - last["wait_s"].get(server, 0.0)) * per_step for server, s in now["wait_s"].items()}
    losses = now["losses"] - last["losses"]
    finite = losses > 0 and now["bad_losses"] == last["bad_losses"]
    return {
        "generation": now["generation"],
        "step": now["step"],
        "samples": now["samples"],
        "loss": round((now["loss_sum"] - last["loss_sum"]) / losses, 6) if finite else None,
        "samples_per_s": round((now["trained_samples"] - last["trained_samples"]) / seconds, 3),
        "steps": steps,
        "step_ms": _rounded({"total": sum(parts.values())} | parts),
        "wait_ms": _rounded({server: ms for server, ms in waits.items() if ms}),
        "bytes": now["bytes"],
        "fp32_bytes": now["fp32_bytes"],
        "staleness": now["staleness"],
        "ids": now["ids"],
        "unique_ids": now["unique_ids"],
        "dropped_rows": now["dropped_rows"],
        "skipped_steps": now["skipped_steps"],
        "unsent_rows": now["unsent_rows"],
        "unsent_share": now["unsent_share"],
        "rss_bytes": now["rss_bytes"],
        "limit_bytes": now["limit_bytes"],
        "metrics": now["metrics"],
    }


def _rounded(parts: Mapping[str, float]) -> dict[str, float]:
    return {name: round(ms, 4) for name, ms in parts.items()}

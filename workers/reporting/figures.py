"""WorkerFigures: what one worker counts, for telemetry records and exporters. Counts and changes nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from shardkeep.compression.ledger import Ledger
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.control.telemetry import process_figures
from shardkeep.workers.reporting.counters import StepCounters

if TYPE_CHECKING:
    from shardkeep.workers.reporting.dense_figures import DenseFigures

Record = dict[str, Any]
_SO_FAR = (
    "bytes", "fp32_bytes", "staleness", "ids", "unique_ids", "dropped_rows", "skipped_steps", "unsent_rows",
    "unsent_share", "rss_bytes", "limit_bytes", "metrics",
    "flops", "compile_s", "compile_rss_bytes",
)  # fmt: skip
"""Figures that a record has as they are."""
_VALUE_PARTS = ("values", "scales", "moments", "indices", "flush")
"""Parts of the ledger that fp32 without selection has not, or has in another size."""


class DenseSums(Protocol):
    """How dense gradients are summed over the workers."""

    @property
    def plain(self) -> bool:
        """Whether they are not compressed."""
        ...

    @property
    def plain_bytes(self) -> int:
        """Bytes of a step without compression."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """The figures of one worker since its process began. Any thread may ask for them.

    Attributes:
        step: Returns the number of steps that the job has done.
        generation: Returns the generation that the worker is in.
        sums: Of dense gradients; None = the loop is the user's own, and so are these sums.
        metrics: The address of the process's metrics; None = there is none.
        dense: Of the dense model; None = the loop is the user's own, and so is the model.
    """

    client: RowClient
    counters: StepCounters
    ledger: Ledger
    step: Callable[[], int]
    generation: Callable[[], int]
    sums: DenseSums | None
    metrics: str | None = None
    dense: DenseFigures | None = None

    def figures(self) -> Record:
        """Counts and seconds, as JSON types. `step` and `samples` are the job's position; `steps` and
        `trained_samples` only grow. `train_s`, `step_s` and `wait_s` are seconds: of training, by part of a step,
        and by server that was waited for."""
        client, totals = self.client, self.ledger.totals()
        waits = {} if client.waits is None else dict(client.waits.seconds)
        return {
            "generation": self.generation(),
            "step": self.step(),
            **self.counters.figures(),
            "wait_s": {f"server {server}": waits[server] for server in sorted(waits)},
            "bytes": totals,
            "fp32_bytes": fp32_bytes(client, self.sums, self.counters, totals),
            "staleness": {str(steps): times for steps, times in sorted(dict(client.pulls.staleness_seen).items())},
            "unsent_rows": client.memory.num_unsent,
            "unsent_share": client.compressor.counts.unsent_share,
            **process_figures(),
            "metrics": self.metrics,
            **({} if self.dense is None else self.dense.figures()),
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
        **{name: now[name] for name in ("generation", "step", "samples")},
        "loss": round((now["loss_sum"] - last["loss_sum"]) / losses, 6) if finite else None,
        "samples_per_s": round((now["trained_samples"] - last["trained_samples"]) / seconds, 3),
        "steps": steps,
        "step_ms": _rounded({"total": sum(parts.values())} | parts),
        "wait_ms": _rounded({server: ms for server, ms in waits.items() if ms}),
        **{name: now[name] for name in _SO_FAR if name in now},
        **({"flops_per_s": _rate(now, last)} if "flops" in now else {}),
    }


def _rate(now: Record, last: Record) -> float | None:
    """Floating-point operations a second since the last record; None = none were made."""
    flops, seconds = now["flops"] - last["flops"], now["flops_s"] - last["flops_s"]
    return round(flops / seconds) if flops and seconds else None


def _rounded(parts: Mapping[str, float]) -> dict[str, float]:
    return {name: round(ms, 4) for name, ms in parts.items()}


def fp32_bytes(
    client: RowClient, sums: DenseSums | None, counters: StepCounters, totals: Mapping[str, Any]
) -> dict[str, int]:
    """Bytes of pulls, pushes and dense gradients if all values were sent as float32, without compression.

    Ids, masks, headers and what torch RPC adds are counted as they were sent, coded or not. Values are four bytes
    each: of all rows of each step's batch, from the cache too, and of all gradients, selected or not. A step that
    was trained again counts once, and its retries as they were sent. Without compression and recoveries it equals
    `bytes`.

    Args:
        sums: Of dense gradients; None = the loop is the user's own, and so are these sums.
        totals: Of the worker's ledger.
    """
    dense = sum(totals["tower"].values())
    if sums is not None and not sums.plain:
        dense = counters.counts.steps * sums.plain_bytes
    return {
        "pull": _without_values(totals["pull"]) + 4 * client.pulls.num_values,
        "push": _without_values(totals["push"]) + 4 * client.pushes.num_values,
        "tower": dense,
    }


def _without_values(parts: Mapping[str, int]) -> int:
    return sum(size for part, size in parts.items() if part not in _VALUE_PARTS)

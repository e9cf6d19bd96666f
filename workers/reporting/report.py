"""Report: what one worker tells about its training: phase, progress, evaluations, checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.control.telemetry import TelemetryRecords
from shardkeep.workers.data.sampling import StepSlices
from shardkeep.workers.reporting.counters import StepCounters


class ProgressSink(Protocol):
    """Where a worker's reports go: the control plane, or a run folder in one process."""

    def report(self, kind: str, record: dict[str, Any]) -> None: ...
    def update(self, *, step: int, phase: str, unsent_rows: int | None = None) -> None: ...


class Report:
    """Reports the training of one process. Every rank calls it; progress and evaluations come from rank 0 alone.

    Args:
        every_s: Seconds between two progress records.
        records: Make telemetry records, of every rank.
    """

    def __init__(
        self,
        progress: ProgressSink,
        client: RowClient,
        counters: StepCounters,
        *,
        every_s: float,
        records: Sequence[TelemetryRecords] = (),
    ) -> None:
        self.last_evaluation: dict[str, Any] | None = None
        self._progress = progress
        self._client = client
        self._counters = counters
        self._every_s = every_s
        self._has_choices = False
        self._records = tuple(records)

    def closing(self, step: int) -> None:
        """Reports that `step`, the last one, is done."""
        self._progress.update(step=step, phase="closing")

    def ended(self) -> None:
        """Sends the last telemetry records: no step follows."""
        self._counters.settle()
        for records in self._records:
            records.send()

    def phase(self, step: int, phase: str) -> None:
        """Reports what this worker does now; `step` steps are done."""
        self._progress.update(step=step, phase=phase, unsent_rows=self._client.memory.num_unsent)

    def warning(self, phase: str, text: str) -> None:
        """Reports a line for the user."""
        self._progress.report("phase", {"phase": phase, "text": f"warning: {text}", "warning": text})

    def lowered_rates(self, step: int, factor: float) -> None:
        """Reports that the learning rates are `factor` times the config's from `step` on."""
        text = f"no better evaluation: from step {step:,} on {factor:g} times the learning rates of the config"
        self._progress.report("phase", {"phase": "plateau", "text": text, "step": step, "lr_factor": factor})

    def progressive(self, step: int, metrics: dict[str, Any]) -> None:
        """Reports the metrics of samples of steps before `step`, each scored before it was trained."""
        if self._client.rank == 0:
            shown = [f"{name} {value:.4f}" for name, value in metrics.items() if isinstance(value, float)][:2]
            text = f"to step {step:,}  {'  '.join(shown)}  on {metrics['samples']:,} samples before training on them"
            self._progress.report("phase", {"phase": "progressive", "text": text, "step": step} | metrics)

    def stopped(self, step: int, figures: dict[str, Any]) -> None:
        """Reports that the job stops before `step`, with what the steps of this start came to."""
        self._progress.report("event", {"text": f"stopped at step {step}", "phase": "stopped", "figures": figures})

    def choices(self, choices: Mapping[str, str]) -> None:
        """Reports once in the process's life what the tower chose."""
        if not self._has_choices and self._client.rank == 0:
            self._has_choices = True
            text = "; ".join(f"{what} {choice}" for what, choice in sorted(choices.items()))
            self._progress.report("phase", {"phase": "tower", "text": text})

    def step_done(self, step: int, slices: StepSlices, *, total_steps: int) -> None:
        """Reports progress if it is due, or if `step` was the last one."""
        due = self._counters.report_due(self._every_s) or step == total_steps - 1
        if due and self._client.rank == 0:
            done = {"step": step + 1, "total_steps": total_steps, "epoch": slices.epoch(step)}
            self._progress.report("progress", done | self._snapshot())
        for records in self._records:
            records.look()

    def loop_steps(self, steps: int, *, ended: bool = False) -> None:
        """As `step_done`, of a loop of the user's own that has done `steps` steps. It may have no loss and no samples.

        `ended`: no step follows, so all that is new is reported."""
        due = self._counters.has_news if ended else self._counters.report_due(self._every_s)
        if due and self._client.rank == 0:
            unknown = () if self._counters.samples else ("samples", "samples_per_s")
            known = {key: value for key, value in self._snapshot().items() if key not in unknown and value is not None}
            self._progress.report("progress", {"step": steps, "loop": True} | known)
        for records in self._records:
            records.send() if ended else records.look()

    def _snapshot(self) -> dict[str, Any]:
        staleness = {str(steps): times for steps, times in sorted(self._client.pulls.staleness_seen.items())}
        return self._counters.report() | {"staleness": staleness}

    def evaluation(self, step: int, metrics: dict[str, Any], trained: dict[str, Any]) -> None:
        """Reports an evaluation after `step` steps, and what training took until then."""
        self.last_evaluation = metrics
        if self._client.rank == 0:
            self._progress.report("eval", {"step": step} | metrics | trained)

    def checkpoints(self, records: Iterable[dict[str, Any]]) -> None:
        """Reports checkpoints that are complete or failed."""
        for record in records:
            self._progress.report("phase", {"phase": "checkpoint"} | record)

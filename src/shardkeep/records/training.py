"""Records of metrics.jsonl about training: progress, evaluations, and phases that say figures.

`TrainingFigures` are what progress and the telemetry of a worker share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardkeep.records.record import Record, key, numbers


@dataclass(frozen=True, kw_only=True)
class TrainingFigures(Record):
    """What a worker says of its training."""

    step: int | None = key("steps of the job that are done; a recovery may lower it", metric="gauge train_step")
    samples: int | None = key("samples of these steps, of all workers and starts", metric="gauge train_samples")
    loss: float | None = key("mean loss since its last record; null = no step, or a loss was not finite", null=True)
    samples_per_s: float | None = key("rate of all workers since its last record, without evaluations and checkpoints")
    dropped_rows: int | None = key("rows of gradients that were not finite", metric="counter dropped_rows_total")
    skipped_steps: int | None = key("steps without an update of the dense model", metric="counter skipped_steps_total")
    step_ms: Mapping[str, float] = key("mean ms of a step, `total` and by [part](../guide/performance.md)", empty=dict)
    staleness: Mapping[str, int] = key("number of pulls by the staleness of their rows", empty=dict)

    @property
    def steps_per_s(self) -> float | None:
        """Steps a second, by the mean step."""
        total_ms = self.step_ms.get("total")
        return round(1e3 / total_ms, 3) if total_ms else None


@dataclass(frozen=True, kw_only=True)
class Progress(TrainingFigures):
    """Progress of worker 0 since its last record."""

    total_steps: int | None = key("steps of the job")
    epoch: int | None = key("epoch of the last step, from 0")
    loop: bool | None = key("whether the training loop is the user's own")


@dataclass(frozen=True, kw_only=True)
class Scores(Record):
    """Scores of samples. `others` has the metrics and a `note`; with several labels each metric is METRIC/LABEL."""

    step: int | None = key("steps that were done before")
    samples: int | None = key("samples that were scored")
    weights: float | None = key("the sum of their weights")
    unseen: Mapping[str, Any] = key("by feature: values without a row, and all values", empty=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that are numbers."""
        return numbers(self.others)


@dataclass(frozen=True, kw_only=True)
class Evaluation(Scores):
    """An evaluation on the job's evaluation data."""

    train_samples: int | None = key("samples that were trained until then")
    train_bytes: Mapping[str, int] = key("their bytes by direction", empty=dict)

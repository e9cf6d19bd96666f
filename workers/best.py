"""Best: the evaluations of a job by step, which of them was the best, and whether to stop. Holds no model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardkeep.base.errors import ConfigError
from shardkeep.base.files import atomic_write
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.early_stopping import METRIC_SIGNS, EarlyStoppingConfig

Evaluations = list[tuple[int, dict[str, Any]]]


class Best:
    """Every rank has the same evaluations. They are keyed by step, so a step that is evaluated again counts once.

    Args:
        config: None = nothing is recorded, and there is no best.
    """

    def __init__(self, config: EarlyStoppingConfig | None) -> None:
        self.config = config
        self._by_step: dict[int, dict[str, Any]] = {}
        self._file: Path | None = None

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records the evaluation after `step` steps. Raises ConfigError if it lacks the metric."""
        if self.config is None:
            return
        if self.config.metric not in metrics:
            known = [name for name in metrics if name.partition("/")[0] in METRIC_SIGNS]
            raise ConfigError(
                f"train.early_stopping.metric: {self.config.metric} is not evaluated; allowed: {', '.join(known)}"
            )
        self._by_step[step] = dict(metrics)
        self._write()

    def keep_in(self, file: Path) -> None:
        """Takes the evaluations that a process before this one left in `file`, and writes later ones there. Raises
        OSError."""
        if self.config is not None:
            if file.exists():
                self.load(json.loads(file.read_text(encoding="utf-8")))
            self._file = file

    def _write(self) -> None:
        if self._file is not None:
            atomic_write(self._file, json.dumps(sorted(self._by_step.items())))

    def forget_after(self, step: int) -> None:
        """Drops evaluations after later steps: the job goes back to `step`."""
        self._by_step = {each: metrics for each, metrics in self._by_step.items() if each <= step}

    @property
    def step(self) -> int | None:
        """The step of the best evaluation, the earliest one of equals; None = there is none."""
        return self._place()[0]

    @property
    def ends(self) -> bool:
        """Whether the job ends: the last `patience` evaluations did not improve."""
        return self.config is not None and self._place()[1] >= self.config.patience

    def metrics(self) -> dict[str, Any] | None:
        """`step` and the metrics of the best evaluation."""
        return None if self.step is None else {"step": self.step} | self._by_step[self.step]

    def _place(self) -> tuple[int | None, int]:
        """The best step, and the number of evaluations since."""
        if self.config is None:
            return None, 0
        sign = METRIC_SIGNS[self.config.metric.partition("/")[0]]
        best, best_value, since = None, -math.inf, 0
        for step in sorted(self._by_step):
            value = self._by_step[step][self.config.metric]
            value = -math.inf if value is None else sign * float(value)  # None = undefined, such as one class
            if best is None or value > best_value + self.config.min_delta:
                best, best_value, since = step, value, 0
            else:
                since += 1
        return best, since

    def facts(self) -> dict[str, Any]:
        """What a checkpoint says of it, as JSON types; {} = nothing."""
        return {} if self.config is None else {"evaluations": sorted(self._by_step.items()), "best_step": self.step}

    def load(self, evaluations: Sequence[Sequence[Any]]) -> None:
        """Takes the evaluations of a checkpoint's facts."""
        if self.config is not None:
            self._by_step = {int(step): dict(metrics) for step, metrics in evaluations}
            self._write()

    def share(self, collective: Collective) -> None:
        """Takes the evaluations of the rank that has most: a replacement may have none. Every rank calls it."""
        if self.config is None:
            return
        counts = collective.all_gather(torch.tensor([len(self._by_step)]), purpose="agreements").view(-1).tolist()
        source = counts.index(max(counts))
        told = sorted(self._by_step.items()) if collective.rank == source else None
        self.load(collective.broadcast_object(told, source=source, purpose="agreements"))

"""EvaluationHistory: a job's evaluations by step, and what they decide: the best one, the end, the learning rates.

All of it follows from the evaluations alone, so that a recovery repeats it. Holds no model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardkeep.base.errors import ConfigError
from shardkeep.base.files import atomic_write
from shardkeep.base.logs.log import EventLog
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.collectives.operations import all_gather, broadcast_object
from shardkeep.workers.config import EarlyStoppingConfig, PlateauConfig, sign_of

_log = EventLog("best")


class EvaluationHistory:
    """Every rank has the same evaluations. They are keyed by step, so a step that is evaluated again counts once.

    Args:
        config: None = there is no best, and no early end.
        plateau: None = the learning-rate factor stays 1. Without both nothing is recorded.
    """

    def __init__(self, config: EarlyStoppingConfig | None, plateau: PlateauConfig | None = None) -> None:
        self.config = config
        self.plateau = plateau
        self.lr_factor = 1.0
        """Multiplies the learning rates of the next step."""
        watching = {"early_stopping": config, "plateau": plateau}
        self.watched = {f"train.{key}": each for key, each in watching.items() if each is not None}
        """The settings that need evaluations, by their keys."""
        self._by_step: dict[int, dict[str, Any]] = {}
        self._file: Path | None = None

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records the evaluation after `step` steps. Raises ConfigError if a watched metric is missing or undefined."""
        for key, each in self.watched.items():
            if each.metric not in metrics:
                known = [name for name in metrics if sign_of(name) is not None]
                raise ConfigError(f"{key}.metric: {each.metric} is not evaluated; allowed: {', '.join(known)}")
            if metrics[each.metric] is None:
                why = metrics.get("/".join(["note", *each.metric.split("/", 1)[1:]]), "it has no value")
                raise ConfigError(
                    f"{key}.metric: {each.metric} is undefined after {step:,} steps ({why}); allowed: another metric, "
                    "or evaluation data that define it"
                )
        if self.watched:
            self._by_step[step] = dict(metrics)
            self._changed()

    def keep_in(self, file: Path | None) -> None:
        """Takes the evaluations that a process before this one left in `file`, and writes later ones there. None =
        nowhere. Raises OSError."""
        if self.watched and file is not None:
            if file.exists():
                self.load(json.loads(file.read_text(encoding="utf-8")))
            self._file = file

    def _changed(self) -> None:
        self.lr_factor = self._factor()
        if self._file is not None:
            try:
                atomic_write(self._file, json.dumps(sorted(self._by_step.items())))
            except OSError as error:  # only a replacement of this process lacks them, and the others have them
                _log.warning(f"{self._file}: not written ({error.strerror or error})", once="unwritten")

    def forget_after(self, step: int) -> None:
        """Drops evaluations after later steps: the job goes back to `step`."""
        self._by_step = {each: metrics for each, metrics in self._by_step.items() if each <= step}
        self.lr_factor = self._factor()

    @property
    def step(self) -> int | None:
        """The step of the best evaluation, the earliest one of equals; None = there is none."""
        return self._place()[0]

    @property
    def ends(self) -> bool:
        """Whether the job ends: the last `patience` evaluations did not improve."""
        return self.config is not None and self.since >= self.config.patience

    @property
    def since(self) -> int:
        """The number of evaluations after the best one."""
        return self._place()[1]

    def metrics(self) -> dict[str, Any] | None:
        """`step` and the metrics of the best evaluation."""
        return None if self.step is None else {"step": self.step} | self._by_step[self.step]

    def _place(self) -> tuple[int | None, int]:
        """The best step, and the number of evaluations since."""
        if self.config is None:
            return None, 0
        best, best_value, since = None, -math.inf, 0
        for step, value in self._values(self.config.metric):
            if best is None or value > best_value + self.config.min_delta:
                best, best_value, since = step, value, 0
            else:
                since += 1
        return best, since

    def _factor(self) -> float:
        """The learning-rate factor after the evaluations so far, as torch's ReduceLROnPlateau has it."""
        factor, best_value, since, plateau = 1.0, -math.inf, 0, self.plateau
        for _, value in self._values(plateau.metric) if plateau is not None else ():
            assert plateau is not None
            improves = value > best_value + plateau.min_delta
            best_value, since = (value, 0) if improves else (best_value, since + 1)
            if since == plateau.patience:
                factor, since = max(factor * plateau.factor, plateau.min_factor), 0
        return factor

    def _values(self, metric: str) -> Iterator[tuple[int, float]]:
        """Each step with the metric, more of it being better; one that is not finite is worst."""
        sign = sign_of(metric) or 1
        for step in sorted(self._by_step):
            value = self._by_step[step].get(metric)
            yield step, sign * float(value) if value is not None and math.isfinite(value) else -math.inf

    def facts(self) -> dict[str, Any]:
        """What a checkpoint says of it, as JSON types; {} = nothing."""
        best = {} if self.config is None else {"best_step": self.step}
        return {"evaluations": sorted(self._by_step.items())} | best if self.watched else {}

    def load(self, evaluations: Sequence[Sequence[Any]]) -> None:
        """Takes the evaluations of a checkpoint's facts."""
        if self.watched:
            self._by_step = {int(step): dict(metrics) for step, metrics in evaluations}
            self._changed()

    def share(self, collective: Collective) -> None:
        """Takes the evaluations of the rank that has most: a replacement may have none. Every rank calls it."""
        if not self.watched:
            return
        counts = all_gather(collective, torch.tensor([len(self._by_step)]), purpose="agreements").view(-1).tolist()
        source = counts.index(max(counts))
        known = sorted(self._by_step.items()) if collective.rank == source else None
        self.load(broadcast_object(collective, known, source=source, purpose="agreements"))

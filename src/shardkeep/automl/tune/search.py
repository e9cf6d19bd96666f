"""A search's trials in Optuna's journal, which outlives this process. Optuna samples, prunes and keeps them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from shardkeep.automl.tune.space import Values
from shardkeep.base.errors import UserError
from shardkeep.workers.config import sign_of

REDUCTION = 3
"""Of the trials at evaluation 1, 3, 9 and so on, one in so many goes on (Li et al., MLSys 2020)."""
CAUSE = "cause"
"""The attribute of a trial that failed: why."""


class Search:
    """Trials of one process at a time. Every call may raise OSError: the journal is written at once."""

    def __init__(self, journal: Path, space: Mapping[str, Values], *, metric: str, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        _mend(journal)
        self.space, self.metric, self.sign = dict(space), metric, sign_of(metric) or 1
        self.study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(journal))),
            pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=REDUCTION),
            study_name="tune",
            direction="maximize" if self.sign > 0 else "minimize",
            load_if_exists=True,
        )
        known = len(self.study.trials)  # so that it does not draw again what it drew before it was killed
        self.study.sampler = optuna.samplers.TPESampler(seed=(seed + known) % 2**32, constant_liar=True)

    def begin(self, job: Mapping[str, Any], first: Mapping[str, Any]) -> None:
        """Begins with the settings `first`, or continues: what ran when the process was killed runs again. Raises
        UserError where the trials there are those of another `job`."""
        before = self.study.user_attrs.get("job")
        if before is None:
            self.study.enqueue_trial(dict(first), skip_if_exists=True)
            self.study.set_user_attr("job", dict(job))
        elif key := next((key for key in {**before, **job} if before.get(key) != job.get(key)), None):
            raise UserError(f"holds trials with {key}={before.get(key)!r}, now it is {job.get(key)!r}")
        for trial in self.study.get_trials(states=[TrialState.RUNNING]):
            self.study.tell(trial.number, state=TrialState.FAIL)
            self.study.enqueue_trial(trial.params)

    def ask(self) -> Trial:
        """The next trial, with its settings in `params`."""
        return self.study.ask(dict(self.space))

    def loses(self, trial: Trial, number: int, value: float) -> bool:
        """Adds the value of evaluation `number` of a trial, from 1. Whether the trial is to be stopped."""
        trial.report(value, number)
        return trial.should_prune()

    def completed(self, trial: Trial, value: float) -> None:
        self.study.tell(trial, value)

    def stopped(self, trial: Trial) -> None:
        """The trial was ended early."""
        self.study.tell(trial, state=TrialState.PRUNED)

    def failed(self, trial: Trial, cause: str) -> None:
        """The trial counts as worse than all others, for the sampler as well."""
        trial.set_user_attr(CAUSE, cause)
        self.study.tell(trial, -self.sign * math.inf)

    @property
    def finished(self) -> list[FrozenTrial]:
        """Those that ended here: completed, stopped early, or failed."""
        return self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))

    @property
    def best(self) -> FrozenTrial | None:
        """The best of those that completed, the earliest of equals."""
        done = [each for each in self.finished if each.state is TrialState.COMPLETE and CAUSE not in each.user_attrs]
        return max(done, key=lambda trial: self.sign * float(trial.value or 0.0), default=None)


def _mend(journal: Path) -> None:
    """Takes away what a killed process left in the middle: half a line, and Optuna's lock, which our own replaces."""
    Path(f"{journal}.lock").unlink(missing_ok=True)
    if journal.exists():
        os.truncate(journal, journal.read_bytes().rfind(b"\n") + 1)

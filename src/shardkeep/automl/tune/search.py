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

from shardkeep.automl.tune.plan import REDUCTION, Plan
from shardkeep.base.config.differences import differences
from shardkeep.base.errors import UserError, first_line
from shardkeep.config import load_config

CAUSE = "cause"
"""The attribute of a trial that failed: why."""


class Search:
    """Opens the trials of a plan in a folder, or begins with the job as it stands. What ran when its process was killed
    runs again. Raises UserError where the folder has those of another plan. Every call may raise OSError."""

    def __init__(self, plan: Plan, out: Path) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        journal = out / "journal.log"
        _mend(journal)
        self.plan, self._worst = plan, -math.inf * plan.sign
        try:
            self.study = optuna.create_study(
                storage=JournalStorage(JournalFileBackend(str(journal))),
                pruner=optuna.pruners.NopPruner(),
                study_name="tune",
                direction="maximize" if plan.sign > 0 else "minimize",
                load_if_exists=True,
            )
        except (ValueError, TypeError, KeyError, AssertionError) as error:  # a line that Optuna did not write
            raise UserError(f"{journal}: damaged ({first_line(error)}); give --out a new folder") from error
        drawn = len(self.study.trials)  # another seed, so that it does not draw the same again
        self.study.sampler = optuna.samplers.TPESampler(seed=(plan.job.seed + drawn) % 2**32, constant_liar=True)
        known = self.study.user_attrs
        if "facts" not in known:
            for params in plan.first():
                self.study.enqueue_trial(params, skip_if_exists=True)
            for key, value in (
                ("library", plan.library),
                ("job", plan.job.model_dump(mode="json")),
                ("facts", plan.facts()),
            ):
                self.study.set_user_attr(key, value)
        elif other := _difference(plan, known):
            raise UserError(f"--out {out}: has trials with {other}; give --out a new folder")
        self.remark = ""
        """On trials by another code of shardkeep; "" = there are none."""
        if (library := known.get("library", plan.library)) != plan.library:
            self.remark = f"the search began with shardkeep {library}, now it is {plan.library}; its trials stay"
        for trial in self.study.get_trials(states=[TrialState.RUNNING]):
            self.study.tell(trial.number, state=TrialState.FAIL)
            self.study.enqueue_trial(trial.params)

    def halve(self, first: int) -> None:
        """Stops trials early from now on, after `first` evaluations at the soonest. Those of a grid go to their end."""
        if not self.plan.grid:
            self.study.pruner = optuna.pruners.SuccessiveHalvingPruner(first, reduction_factor=REDUCTION)

    def ask(self) -> Trial:
        """The next trial, with its settings in `params`. Those that the sampler draws again give way to new ones."""
        had = [each.params for each in self.study.trials if each.state not in (TrialState.FAIL, TrialState.WAITING)]
        space: dict[str, Any] = dict(self.plan.space)
        trial = self.study.ask(space)
        if trial.params in had and (fresh := next((p for p in self.plan.combinations() if p not in had), None)):
            self.study.tell(trial, state=TrialState.FAIL)
            self.study.enqueue_trial(fresh)
            return self.study.ask(space)
        return trial

    def end(self, trial: Trial, value: float | None = None, cause: str = "") -> None:
        """Ends a trial: with the value of its model, early without one, or for a cause as worse than all others."""
        if cause:
            trial.set_user_attr(CAUSE, cause)
            value = self._worst
        self.study.tell(trial, value, state=TrialState.PRUNED if value is None else None)

    @property
    def ended(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))

    @property
    def best(self) -> FrozenTrial | None:
        """The best of the trials that completed, the earliest of equals."""
        done = [each for each in self.ended if each.state is TrialState.COMPLETE and CAUSE not in each.user_attrs]
        return max(done, key=lambda trial: self.plan.sign * (trial.value or 0.0), default=None)


def _difference(plan: Plan, known: Mapping[str, Any]) -> str:
    """The first fact of a search that the plan has otherwise; "" = there is none."""
    before = load_config(known["job"], judged="nothing")  # as the code of now reads it
    jobs = [job.model_dump(mode="json") for job in (before, plan.job)]
    found = next(differences(jobs[0] | known["facts"], jobs[1] | plan.facts()), None)
    return "" if found is None else f"{found.key}={found.before!r}, now it is {found.now!r}"


def _mend(journal: Path) -> None:
    """Takes away what a killed process left: half a line, and Optuna's lock, which that of the folder replaces."""
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
    if journal.exists():
        os.truncate(journal, journal.read_bytes().rfind(b"\n") + 1)

"""report.html of a search: curves, what the settings are worth, all of them side by side, and a table of trials."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import optuna
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import FrozenTrial, TrialState, create_trial

from shardkeep.automl.tune.search import CAUSE, Search
from shardkeep.base.files import atomic_write
from shardkeep.base.plugging.packages import missing
from shardkeep.page.document import document, figure, section, table, wide_table

WORTH = "The share of each setting in what sets the best trials apart (PED-ANOVA, Watanabe et al., IJCAI 2023)."
CURVES = "The metric of each trial by its evaluations, with early stopping the best so far. Short lines were stopped."
PARALLEL = "Each trial is a line through its settings. Dark lines are better."


def write_report(search: Search, path: Path, line: str) -> None:
    """Writes the report, with `line` on the best trial first. Raises OSError."""
    every = _all_completed(search)
    worth = get_param_importances(every, evaluator=PedAnovaImportanceEvaluator()) if len(every.trials) > 1 else {}
    head = ("trial", search.plan.metric, "s", *search.plan.space)
    parts = [
        f'<h1>{escape(search.plan.job.name)}: tuned</h1><p class="lead">{escape(line)}</p>',
        section("Settings", f"<p>{WORTH}</p>", table((), [(key, f"{share:.0%}") for key, share in worth.items()])),
        *_pictures(search, every),
        section("Trials", wide_table(head, [_row(trial) for trial in search.ended])),
    ]
    atomic_write(path, document(f"{search.plan.job.name}: tuned", parts))


def outcome_text(trial: FrozenTrial) -> str:
    """The metric of a trial, or what became of it."""
    if CAUSE in trial.user_attrs:
        return f"failed: {trial.user_attrs[CAUSE]}"
    value = "" if trial.value is None else f"{trial.value:.5f}"
    return value if trial.state is TrialState.COMPLETE else f"stopped early at {value or 'its start'}"


def _all_completed(search: Search) -> optuna.Study:
    """The trials without those that failed, as if all had completed: a stopped one with its last value."""
    found = optuna.create_study(direction=search.study.direction)
    for each in search.ended:
        if each.value is not None and math.isfinite(each.value):
            found.add_trial(create_trial(params=each.params, distributions=each.distributions, value=each.value))
    return found


def _pictures(search: Search, every: optuna.Study) -> Iterator[str]:
    if words := missing("matplotlib"):
        yield f"<p>{escape(f'The report has no plots: it {words}')}</p>"
    elif every.trials:
        import matplotlib
        from optuna.visualization.matplotlib import plot_intermediate_values, plot_parallel_coordinate

        with matplotlib.rc_context({"backend": "Agg", "text.parse_math": False}), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna calls its plots experimental
            axes = plot_intermediate_values(search.study)
            axes.set(xlabel="evaluation", ylabel=search.plan.metric)
            axes.legend().remove()
            yield figure(CURVES, _png(axes))
            yield figure(PARALLEL, _png(plot_parallel_coordinate(every, target_name=search.plan.metric)))


def _png(axes: Any) -> bytes:
    from matplotlib import pyplot

    found = io.BytesIO()
    axes.set(title="")
    axes.figure.set_size_inches(13.0, 5.0)
    axes.figure.savefig(found, dpi=100, bbox_inches="tight")
    pyplot.close(axes.figure)
    return found.getvalue()


def _row(trial: FrozenTrial) -> Sequence[str]:
    seconds = "" if trial.duration is None else f"{trial.duration.total_seconds():.1f}"
    settings = (f"{value:.3g}" if isinstance(value, float) else str(value) for value in trial.params.values())
    return (str(trial.number), outcome_text(trial), seconds, *settings)

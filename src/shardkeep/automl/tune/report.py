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

CAPTIONS = {
    "plot_intermediate_values": "The metric of each trial by its evaluations. A line that ends early was stopped.",
    "plot_parallel_coordinate": "Each trial is a line through its settings; dark lines are the better ones.",
}
"""The pictures, by Optuna's function that draws each."""


def write_report(search: Search, path: Path, lines: Sequence[str]) -> None:
    """Writes the report; `lines` on the best trial come first. Raises OSError."""
    trials, every = search.finished, all_values(search)
    worth = importance(every)
    parts = [
        "<h1>shardkeep tune</h1>",
        *(f'<p class="lead">{escape(line)}</p>' for line in lines),
        section("What the settings are worth", table((), [(key, f"{share:.0%}") for key, share in worth.items()])),
        "<p>The share of each setting in what separates the best trials from the others (PED-ANOVA, IJCAI 2023).</p>",
        *pictures(search.study, every),
        section("Trials", wide_table(("trial", search.metric, "seconds", *search.space), list(map(_row, trials)))),
    ]
    atomic_write(path, document("shardkeep tune", parts))


def outcome_text(trial: FrozenTrial) -> str:
    """The metric of a trial, or why it has none."""
    if CAUSE in trial.user_attrs:
        return f"failed: {trial.user_attrs[CAUSE]}"
    value = "" if trial.value is None else f" {trial.value:.5f}"
    return value.strip() if trial.state is TrialState.COMPLETE else f"stopped early{' at' if value else ''}{value}"


def all_values(search: Search) -> optuna.Study:
    """The trials that did not fail as if all had completed, those stopped early with their last value."""
    found = optuna.create_study(direction=search.study.direction)
    known = [each for each in search.finished if each.value is not None and math.isfinite(each.value)]
    found.add_trials([create_trial(params=t.params, distributions=t.distributions, value=t.value) for t in known])
    return found


def importance(study: optuna.Study) -> dict[str, float]:
    """The share of each setting in the difference of good trials; the largest first, {} = there are too few trials."""
    if len(study.trials) < 2:
        return {}
    return get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())


def pictures(study: optuna.Study, every: optuna.Study) -> Iterator[str]:
    """The pictures as HTML; without matplotlib, what to install."""
    if words := missing("matplotlib"):
        yield f"<p>{escape(f'The report has no plots: it {words}')}</p>"
        return
    if not every.trials:
        return
    import matplotlib
    from matplotlib import pyplot
    from optuna.visualization import matplotlib as plots

    with matplotlib.rc_context({"backend": "Agg"}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna calls its plots experimental
        for (name, caption), shown in zip(CAPTIONS.items(), (study, every), strict=True):
            axes: Any = getattr(plots, name)(shown)
            if (legend := axes.get_legend()) is not None:
                legend.remove()
            axes.set(title="", xlabel="evaluation") if shown is study else axes.set(title="")
            axes.figure.set_size_inches(12.0, 5.0)
            png = io.BytesIO()
            axes.figure.savefig(png, dpi=110, bbox_inches="tight")
            pyplot.close(axes.figure)
            yield figure(caption, png.getvalue())


def _row(trial: FrozenTrial) -> Sequence[str]:
    seconds = "" if trial.duration is None else f"{trial.duration.total_seconds():.1f}"
    settings = (f"{value:.3g}" if isinstance(value, float) else str(value) for value in trial.params.values())
    return (str(trial.number), outcome_text(trial), seconds, *settings)

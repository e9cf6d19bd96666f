"""What a model of several labels says: joint logits, scores and their names. Exact, in float64, on the CPU."""

# N = samples, T = labels, P = scores

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkeep.base.arrays import Float64s, Floats
from shardkeep.workers.label_config import TaskColumn, afters


def joint_outputs(outputs_NT: NDArray[np.floating[Any]], tasks: Sequence[TaskColumn]) -> Float64s:
    """The logits of labels over all samples, float64 (N, T), as `joint_logits` in workers/dense/loss.py has them; those
    of labels that come after none stay as they are."""
    joint_NT = np.array(outputs_NT, np.float64)
    for t, after in enumerate(afters(tasks)):
        if after is not None:
            before_N, own_N = -joint_NT[:, after], -joint_NT[:, t]
            joint_NT[:, t] = -np.logaddexp(np.logaddexp(before_N, own_N), before_N + own_N)
    return joint_NT


def score_names(labels: Sequence[str], tasks: Sequence[TaskColumn]) -> list[str]:
    """Names of the scores: `score`, or of several labels `score_LABEL`, and behind them `score_LABEL_given_BEFORE` of
    each label that comes after another one."""
    if len(labels) == 1:
        return ["score"]
    conditional = [f"{task.column}_given_{task.after}" for task in tasks if task.after is not None]
    return [f"score_{name}" for name in (*labels, *conditional)]


def task_scores(outputs_NT: Floats, tasks: Sequence[TaskColumn]) -> Floats:
    """What a person reads of several labels, float32 (N, P): probabilities, or the value of a number."""
    with np.errstate(invalid="ignore"):  # NaN stays NaN
        scores_NT = _probabilities(joint_outputs(outputs_NT, tasks))
        conditional_NT = _probabilities(outputs_NT[:, [task.after is not None for task in tasks]])
    numbers = [task.objective.of_numbers for task in tasks]
    scores_NT[:, numbers] = outputs_NT[:, numbers]
    return np.concatenate([scores_NT, conditional_NT], axis=1)


def _probabilities(logits_NT: Floats | Float64s) -> Floats:
    """1 / (1 + exp(-logit)) in float64, rounded once."""
    scores_NT: Floats = np.exp(-np.logaddexp(0.0, -logits_NT.astype(np.float64))).astype(np.float32)
    return scores_NT

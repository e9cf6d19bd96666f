"""Warnings of what the model learns, or does not. As src/shardkeep/page/warnings/processes.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean, median, pvariance, stdev

from shardkeep.page.warnings.warning import Sight, Warning

STUCK_STEPS = 500
RISE, NOISE = 0.05, 4
"""A loss rises if it grows by this share of its lowest mean, and by so many times what it differs between records."""
AUC_DROP = 0.002
OVERFIT, OVERFIT_NOISE = 0.05, 4.0
"""A model overfits if its loss on evaluation rows is above that of training by this share, and by so many standard
errors of what they differ by."""
OF_LOSS = {"bce": "logloss", "mse": "mse"}
"""The metric of an evaluation that is the loss of training."""
AUC_GUESSING = 0.52
"""A model with a lower AUC does not rank better than chance."""
WORSE_THAN_AVERAGE = 1.02
"""A normalized entropy from here on is worse than always predicting the average of the evaluation rows, which has 1."""
AUC_TOO_GOOD = 0.9999
"""No model of clicks ranks so well: a feature tells the label."""
CONSTANT_LOSS = math.log(2)
"""The binary cross-entropy of the constant prediction 0.5."""
EXPLODED = 3.0
"""A loss has exploded if it was so many times `CONSTANT_LOSS`."""


def not_finite(sight: Sight) -> list[Warning]:
    """A loss that is no number, or gradients and steps that were dropped."""
    losses = sight.records.losses
    told = []
    if losses and losses[-1][1] is None:
        told.append(f"the loss is not finite at step {losses[-1][0]:,}")
    if dropped := most_of(sight, "dropped_rows"):
        told.append(f"{dropped:,} rows of gradients were dropped because they were not finite")
    if skipped := most_of(sight, "skipped_steps"):
        told.append(f"{skipped:,} steps were skipped because their gradients were not finite")
    if not told:
        return []
    remedy = "clip gradients" if sight.loop else "set train.clip_norm"
    return [Warning("bad", "; ".join(told),
                    f"The learning rate is too high, or the data hold extreme values. Lower lr, or {remedy}.",
                    "convergence")]  # fmt: skip


def most_of(sight: Sight, key: str) -> int:
    """The newest count of dropped rows or skipped steps."""
    return max(getattr(one, key) or 0 for one in (sight.records.view.progress, *sight.records.counts.workers))


def rising_loss(sight: Sight) -> list[Warning]:
    """A loss that grows by more than its noise."""
    points = [(step, loss) for step, loss in sight.records.losses if loss is not None]
    if len(points) < 8:
        return []
    low_at = min(range(len(points) - 3), key=lambda at: fmean(loss for _, loss in points[at : at + 3]))
    before, after = [loss for _, loss in points[low_at : low_at + 3]], [loss for _, loss in points[-3:]]
    rise = fmean(after) - fmean(before)
    noise = median(abs(a - b) for (_, a), (_, b) in pairwise(points))
    if low_at + 3 > len(points) - 3 or rise <= max(RISE * abs(fmean(before)), NOISE * noise):
        return []
    text = f"the loss rises: {fmean(before):.4f} at step {points[low_at][0]:,}, {fmean(after):.4f} now"
    return [Warning("bad", text, "The learning rate is probably too high.", "convergence")]


def worse_than_guessing(sight: Sight) -> list[Warning]:
    """A binary cross-entropy above that of the constant prediction 0.5."""
    losses = [loss for _, loss in list(sight.records.losses)[-3:] if loss is not None]
    loss_name = loss_of(sight)
    step = sight.records.losses[-1][0] if sight.records.losses else 0
    if sight.loop or loss_name != "bce" or not losses or step < 100 or fmean(losses) <= CONSTANT_LOSS * 1.02:
        return []
    text = f"after {step:,} steps the loss is {fmean(losses):.3f}; a constant prediction of 0.5 has 0.693"
    return [Warning("bad", text, "The learning rate is probably too high, or labels and features do not match.",
                    "convergence")]  # fmt: skip


def loss_of(sight: Sight) -> str:
    """The name of the loss function; "" = several labels have their own, or weights multiply it."""
    data = sight.config.get("data") or {}
    if data.get("labels") or data.get("weight"):
        return ""
    return str(((sight.config.get("train") or {}).get("loss") or {}).get("name") or "")


def exploded_loss(sight: Sight) -> list[Warning]:
    """A binary cross-entropy that was far above a constant prediction's, and fell back to it.

    A model that has learned nothing since then is the worse case: its units are often dead."""
    points = [(int(row[1] or 0), loss) for row in sight.records.training.rows if (loss := row[3]) is not None]
    if loss_of(sight) != "bce" or not points or worse_than_guessing(sight):
        return []
    step, peak = max(points, key=lambda point: point[1])
    if peak <= EXPLODED * CONSTANT_LOSS:
        return []
    text = f"the loss was {peak:,.1f} at step {step:,}; a constant prediction of 0.5 has 0.693"
    if any(aucs[-1][1] >= AUC_GUESSING for aucs in aucs_of(sight).values()):
        return [Warning("note", text, "It has fallen since. The learning rate is too high for the first steps: set "
                        "warmup_steps.", "convergence")]  # fmt: skip
    return [Warning("bad", text, "The learning rate is probably too high. Lower it and start again: dead units do not "
                    "recover.", "convergence")]  # fmt: skip


def overfits(sight: Sight) -> list[Warning]:
    """A loss on evaluation rows above that of the training records before it: the last tenth, at least three."""
    metric, seen = OF_LOSS.get(loss_of(sight), ""), sight.records.evaluations
    losses = [] if not seen else [
        float(loss) for row in sight.records.training.rows
        if (loss := row[3]) is not None and int(row[1] or 0) <= (seen[-1].step or 0)
    ]  # fmt: skip
    if not losses or (found := seen[-1].metrics.get(metric)) is None:
        return []
    recent = losses[-max(3, len(losses) // 10) :]
    loss = fmean(recent)
    own = found / math.sqrt(seen[-1].samples or 1)  # the loss of a sample deviates by about its mean
    noise = math.hypot(own, stdev(recent) / math.sqrt(len(recent)) if len(recent) > 1 else 0.0)
    if found - loss <= max(OVERFIT * loss, OVERFIT_NOISE * noise):
        return []
    above = f"{100 * (found / loss - 1):.0f} % above {loss:.4f}" if loss > 0 else f"above {loss:.4f}"
    text = f"the loss is {found:.4f} on evaluation rows, {above} in training"
    stops = "" if stops_early(sight) else "train.early_stopping, "
    return [Warning("warn", text, "The model overfits, or evaluation rows are of another kind, such as later ones. Set "
                    f"{stops}fewer epochs, weight_decay of tables and tower, model.dropout, a smaller dim, or "
                    "admit.min_count.", "convergence")]  # fmt: skip


def stops_early(sight: Sight) -> bool:
    """Whether the job ends by its evaluations."""
    return bool((sight.config.get("train") or {}).get("early_stopping"))


def aucs_of(sight: Sight) -> dict[str, list[tuple[int, float]]]:
    """Step and AUC of each evaluation, by `AUC`, or of several labels by `AUC/LABEL`. No list is empty."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in sight.records.evaluations:
        for key, value in record.metrics.items():
            metric, slash, label = key.partition("/")
            if metric == "auc" and value is not None:
                found.setdefault(f"AUC{slash}{label}", []).append((int(record.step or 0), value))
    return found


def guessing(sight: Sight) -> list[Warning]:
    """An AUC of chance, twice in a row."""
    return [
        Warning("bad", f"after {aucs[-1][0]:,} steps {name} is {aucs[-1][1]:.4f}: the model guesses",
                "The learning rate is far too high or too low, or labels and features do not match.", "convergence")
        for name, aucs in aucs_of(sight).items()
        if len(aucs) >= 2 and max(auc for _, auc in aucs[-2:]) < AUC_GUESSING and aucs[-1][0] >= 100
    ]  # fmt: skip


def worse_than_average(sight: Sight) -> list[Warning]:
    """Probabilities on evaluation rows that are worse than their average, though the ranks may be good."""
    newest = sight.records.evaluations[-1] if sight.records.evaluations else None
    entropy = None if newest is None else newest.metrics.get("normalized_entropy")
    if newest is None or entropy is None or entropy < WORSE_THAN_AVERAGE or (newest.step or 0) < 100:
        return []
    text = f"normalized entropy is {entropy:.2f} at step {newest.step:,}: always predicting the average scores better"
    return [Warning("warn", text, "Ranks may still be right, probabilities are not. Stop by the loss "
                    "(train.early_stopping.metric: logloss), or set weight_decay or lower learning rates.",
                    "convergence")]  # fmt: skip


def too_good(sight: Sight) -> list[Warning]:
    """An AUC that only a model has that is given the label."""
    return [
        Warning("warn", f"{name} is {aucs[-1][1]:.5f}: a feature probably tells the label",
                "Leave out columns that are known only after the label: its time, its amount, a copy of it.",
                "convergence")
        for name, aucs in aucs_of(sight).items()
        if aucs[-1][1] > AUC_TOO_GOOD
    ]  # fmt: skip


def stuck_loss(sight: Sight) -> list[Warning]:
    """A loss that has not moved by more than its noise for 500 steps or more."""
    points = [(step, loss) for step, loss in sight.records.losses if loss is not None]
    if sight.state not in ("training", "recovering") or not points:
        return []
    length, still = STUCK_STEPS, 0
    while (part := [p for p in points if p[0] > points[-1][0] - length]) and points[0][0] <= points[-1][0] - length:
        half = len(part) // 2
        if half < 3 or _moved([loss for _, loss in part[:half]], [loss for _, loss in part[half:]]):
            break
        still, length = length, length * 2
    if not still:
        return []
    return [Warning("note", f"the loss has not moved for {still:,} steps",
                    "Normal near the end of training. Early: raise or decay the learning rate, or check the labels.",
                    "convergence")]  # fmt: skip


def _moved(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two means differ by more than twice their standard error, and by 0.1 %."""
    error = math.sqrt(pvariance(one) / len(one) + pvariance(other) / len(other))
    return abs(fmean(one) - fmean(other)) > max(2 * error, 1e-3 * abs(fmean(one)))


def falling_auc(sight: Sight) -> list[Warning]:
    """An AUC below the best one of two evaluations or more ago: overfitting, if the training loss falls meanwhile. Not
    of a job that stops early, which waits for this and keeps the best model."""
    if stops_early(sight):
        return []
    return [warning for name, aucs in aucs_of(sight).items() for warning in _falling(sight, name, aucs)]


def _falling(sight: Sight, name: str, aucs: Sequence[tuple[int, float]]) -> Iterator[Warning]:
    best = max(range(len(aucs)), key=lambda at: aucs[at][1])
    if best > len(aucs) - 3 or aucs[best][1] - aucs[-1][1] < AUC_DROP:
        return
    text = f"{name} falls: {aucs[best][1]:.4f} at step {aucs[best][0]:,}, {aucs[-1][1]:.4f} at step {aucs[-1][0]:,}"
    remedy = "Stop earlier" if sight.loop else "Set train.early_stopping"
    advice = f"The model overfits, or the learning rate is too high. {remedy}."
    losses = [(row[1] or 0, loss) for row in sight.records.training.rows if (loss := row[3]) is not None]
    after = [loss for step, loss in losses if step >= aucs[best][0]]
    if len(after) >= 6:
        falls = fmean(after[-3:]) < fmean(after[:3])
        advice = (
            f"The training loss falls, so the model overfits. {remedy}, or train fewer epochs."
            if falls
            else "The training loss does not fall either: the learning rate is probably too high."
        )
    yield Warning("warn", text, advice, "convergence")

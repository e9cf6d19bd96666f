"""All warnings of a run, the worst first."""

from __future__ import annotations

from shardkeep.page.warnings.learning import (
    exploded_loss,
    falling_auc,
    guessing,
    not_finite,
    overfits,
    rising_loss,
    stuck_loss,
    too_good,
    worse_than_average,
    worse_than_guessing,
)
from shardkeep.page.warnings.processes import failed, memory, no_step, old_checkpoint, recovering, restarts, silent
from shardkeep.page.warnings.steps import large_tower, slow_worker, slower, waits, waits_for_cores, waits_for_samples
from shardkeep.page.warnings.warning import Check, Level, Sight, Warning


def told(sight: Sight) -> list[Warning]:
    """Warnings of the job itself."""
    texts = [event.warning or event.text for event in sight.records.events if event.warning or event.unkept]
    return [Warning("note", text, "The job said so itself.") for text in list(dict.fromkeys(texts))[-3:]]


CHECKS: tuple[Check, ...] = (
    failed, recovering, no_step, not_finite, rising_loss, worse_than_guessing, exploded_loss, guessing, slow_worker,
    overfits, waits, waits_for_samples, waits_for_cores, slower, memory, silent, restarts, old_checkpoint, falling_auc,
    worse_than_average, too_good, large_tower, stuck_loss, told,
)  # fmt: skip
_ORDER: dict[Level, int] = {"bad": 0, "warn": 1, "note": 2}


def warnings_of(sight: Sight) -> list[Warning]:
    """All warnings, the worst first."""
    return sorted((found for check in CHECKS for found in check(sight)), key=lambda found: _ORDER[found.level])

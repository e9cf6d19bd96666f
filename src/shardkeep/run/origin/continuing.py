"""`shardkeep coordinator --continue`: how a coordinator continues with what is in a run folder."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from itertools import takewhile
from typing import Any, Literal

from shardkeep.base.errors import JobError, UserError
from shardkeep.config import JobConfig
from shardkeep.run.checkpoints import checkpoints_of
from shardkeep.run.origin.resume import other_owner
from shardkeep.run.reader import RunReader

Way = Literal["begin", "take over", "resume", "completed"]
MOST_FAILURES = 3
"""A job may fail so often without a new checkpoint."""


def way_in(job: JobConfig, run: RunReader) -> tuple[Way, int]:
    """`way_of` what is in a run folder."""
    state = None
    with contextlib.suppress(UserError):  # nothing is kept, or it is damaged
        state = str(run.take_over()["state"]["state"])
    kept = checkpoints_of(job, run.path).complete() if other_owner(job, run.path) is None else []
    begun = run.config_path.is_file()
    return way_of(run.last_summary(), state, max((step for step, _ in kept), default=None) if begun else None)


def way_of(summary: Mapping[str, Any] | None, state: str | None, checkpoint: int | None) -> tuple[Way, int]:
    """How a coordinator continues, and the step where it begins or resumes. Raises JobError for a job that failed too
    often. The last start's summary, the job's state as it was kept, and the newest checkpoint: None = there is none."""
    if summary is None and state not in (None, "stopping"):
        return "take over", 0
    if summary is not None and summary["status"] == "completed":
        return "completed", 0
    if summary is not None and summary["status"] == "failed":
        _check_failures(summary.get("starts", ()), checkpoint or 0)
    return ("begin", 0) if checkpoint is None else ("resume", checkpoint)


def _check_failures(starts: list[dict[str, Any]], step: int) -> None:
    since = list(takewhile(lambda start: start["from_step"] == step, reversed(starts)))
    since += starts[: len(starts) - len(since)][-1:]  # the start that wrote the checkpoint
    causes = [start.get("message") or "?" for start in since if start["status"] == "failed"]
    if len(causes) >= MOST_FAILURES:
        raise JobError(
            f"--continue: the job failed {len(causes)} times without a checkpoint after step {step}, first: "
            f"{causes[-1]}; to try again, give --start-step {step} in place of --continue"
        )

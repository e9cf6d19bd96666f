"""The start of a job in a run folder: what it continues with, and which config leads.

`way_of` alone decides whether it is a new start or the repair of a job that runs:

begin, resume   a new start: the given config leads. A resume changes what `--resume` may change.
take over       a repair: the run folder's config.yaml leads, that of the last new start.
completed       nothing starts, and the config must be that of the job.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from itertools import takewhile
from typing import Any, Literal, NamedTuple

from shardkeep.base.config.differences import listed
from shardkeep.base.errors import ConfigError, JobError, UserError, first_line
from shardkeep.config import JobConfig, stored_config
from shardkeep.run.checkpoints import checkpoints_of
from shardkeep.run.new_folder import taken
from shardkeep.run.origin.resume import changes, differing, newest, other_owner, with_shuffle_of
from shardkeep.run.reader import RunReader

Given = JobConfig | ConfigError
"""The config of a command, or why it cannot be read: a repair does not need it."""
Way = Literal["begin", "take over", "resume", "completed"]
MOST_FAILURES = 3
"""A job may fail so often without a new checkpoint."""


class Start(NamedTuple):
    """How a job starts: at which step, and by the config that leads. `remark`: what the given config has otherwise."""

    way: Way
    step: int
    config: JobConfig
    remark: str = ""


def start_in(given: Given, run: RunReader) -> Start:
    """The start by what is in a run folder. Raises UserError for a config that cannot lead, JobError as `way_of`."""
    state, known = None, stored_config(run.path) if run.config_path.is_file() else None
    with contextlib.suppress(UserError):  # nothing is kept, or it is damaged
        state = str(run.take_over()["state"]["state"])
    kept = checkpoints_of(known, run.path).complete() if known and other_owner(known, run.path) is None else []
    start = led(*way_of(run.last_summary(), state, max((step for step, _ in kept), default=None)), given, run)
    if known and start.way == "resume" and start.config.checkpoint.dir != known.checkpoint.dir:
        return start._replace(step=newest(start.config, run.path).step)
    return start


def led(way: Way, step: int, given: Given, run: RunReader) -> Start:
    """The start with the config that leads. Raises UserError for a given one that cannot be read, or differs where it
    may not."""
    unused = f"{run.config_path} leads until the next start; not used:"
    if isinstance(given, ConfigError):
        if way != "take over":
            raise given
        return Start(way, step, stored_config(run.path), f"{unused} {first_line(given)}")
    if way == "begin" or not run.config_path.is_file():
        return Start(way, step, given)
    before = stored_config(run.path)
    given = with_shuffle_of(before, given)
    found = differing(before, given)
    if way == "take over" or not found:
        return Start(way, step, before, f"{unused} {listed(found)}" if found else "")
    if way == "completed":
        raise UserError(f"--run-dir {run.path}: {taken(run.path, given)}")
    changes(before, given, given=f"--run-dir {run.path}: holds another job, so choose another folder;")
    if not given.data.refit:
        given = given.model_copy(update={"data": given.data.model_copy(update={"fitted": before.data.fitted})})
    return Start(way, step, given, f"changed: {listed(found)}")


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
            f"{causes[-1]}; to try again, use `shardkeep train --resume`, a coordinator with --start-step {step}, or "
            "another --run-dir"
        )

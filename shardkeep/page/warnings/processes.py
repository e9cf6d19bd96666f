"""Warnings of a job's processes: how it ended, who died or hangs, memory, the age of checkpoints.

One function per warning; each returns a list, which may be empty."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from shardkeep.page.records import Record, number
from shardkeep.page.sections import recoveries
from shardkeep.page.warnings.warning import Level, Sight, Warning, one, several, span

NO_STEP_S = 60.0
SILENT_S = 15.0
SILENT_RECORDS = 4
"""A process is silent after so many intervals without a record, and after `SILENT_S`."""
CHECKPOINT_S, CHECKPOINT_PERIODS = 600.0, 2.0
"""A checkpoint is old after so many seconds, and so many of its periods."""
UNKNOWN_PERIOD_S = 1800.0
MEMORY_SHARE = 0.9
RESTART_S = 600.0
RECOVERIES_PER_HOUR = 3


def failed(sight: Sight) -> list[Warning]:
    """The job ended without completing."""
    message = str((sight.records.summary or {}).get("message") or "")
    if sight.state in ("failed", "killed"):
        return [Warning("bad", f"the job {sight.state}: {message}" if message else f"the job {sight.state}",
                        "The log of the process that ended first says why.", "members")]  # fmt: skip
    if sight.state == "gone":
        advice = (
            "Start the loop again."
            if sight.loop
            else f"Resume it: shardkeep train --resume {sight.records.reader.path}"
        )
        return [Warning("bad", "no process of the job is left, and it wrote no summary", advice, "members")]
    return []


def recovering(sight: Sight) -> list[Warning]:
    """The job has no group at the moment."""
    if sight.state != "recovering":
        return []
    why = next((str(e["text"]) for e in reversed(sight.records.events) if "lost" in e), "")
    text = f"the job recovers: {why}" if why else "the job recovers from a lost process"
    return [Warning("warn", text, "Training resumes when all members are back.", "members")]


def no_step(sight: Sight) -> list[Warning]:
    """No progress for a minute while the job trains."""
    last = max((row[0] or 0.0 for row in sight.records.training.rows[-1:]), default=0.0)
    for _, record in sight.records.role("worker"):
        if number(record.get("steps")):
            last = max(last, record["at"])
    if not sight.running or not last or sight.now - last <= NO_STEP_S:
        return []
    return [Warning("bad", f"no step for {span(sight.now - last)}",
                    "Look at the log of the worker or server that reported last.", "members")]  # fmt: skip


def silent(sight: Sight) -> list[Warning]:
    """A process that has sent no record for several intervals."""
    if not sight.running:
        return []
    quiet = [
        (sight.now - record["at"], f"{role} {index}")
        for (role, index), record in sorted(sight.records.telemetry.items())
        if sight.now - record["at"] > max(SILENT_S, SILENT_RECORDS * (number(record.get("every_s")) or 5.0))
    ]
    if not quiet:
        return []
    age = max(quiet)[0]
    names = several([name for _, name in quiet], "process", "processes")
    return [Warning("warn", f"{names} sent nothing for {span(age)}", "It hangs, or its machine is overloaded.",
                    "members")]  # fmt: skip


def old_checkpoint(sight: Sight) -> list[Warning]:
    """A newest checkpoint that is older than twice its period."""
    if not sight.running or not sight.checkpoints:
        return []
    times = sorted(row["at"] for row in sight.checkpoints)
    period = min((b - a for a, b in pairwise(times)), default=UNKNOWN_PERIOD_S / CHECKPOINT_PERIODS)
    age = sight.now - times[-1]
    if age <= max(CHECKPOINT_S, CHECKPOINT_PERIODS * period):
        return []
    where = "the calls of client.checkpoint" if sight.loop else "checkpoint.every_steps"
    return [Warning("warn", f"the newest checkpoint is {span(age)} old",
                    f"Work since then is lost if all processes die. Check the disk and {where}.",
                    "checkpoints")]  # fmt: skip


def restarts(sight: Sight) -> list[Warning]:
    """Processes that died and were replaced."""
    found = recoveries(sight.records)
    if not found:
        return []
    last = found[-1]
    at = number(last.get("at")) or sight.now
    told = f"{one(len(found), 'recovery', 'recoveries')}; the last: {last.get('text') or last.get('cause')}"
    of_hour = sum((number(record.get("at")) or 0) > sight.now - 3600 for record in found)
    if sight.running and of_hour > RECOVERIES_PER_HOUR:
        return [Warning("bad", f"{of_hour} recoveries within an hour; the last: {last.get('text')}",
                        "The logs of the processes that died say why.", "members")]  # fmt: skip
    level: Level = "warn" if sight.running and sight.now - at < RESTART_S else "note"
    died = last.get("died") or ()
    who = several([f"{d.get('role')} {d.get('index')}" for d in died], "process", "processes") if died else ""
    when = f" {span(sight.now - at)} ago" if sight.running else ""
    if who:
        were = "was" if len(died) == 1 else "were"
        told = (
            f"{who} died{_reason(died)} and {were} restarted{when}; {one(len(found), 'recovery', 'recoveries')} so far"
        )
    return [Warning(level, told, "Training resumed. If it happens again, look at the log.", "members")]


def _reason(died: Sequence[Record]) -> str:
    """` (killed by SIGKILL)`, where one process died and the coordinator knows how."""
    _, ended, reason = str(died[0].get("cause") or "").partition(" ended: ")
    return f" ({reason.partition(', the job was')[0]})" if ended and len(died) == 1 else ""


def memory(sight: Sight) -> list[Warning]:
    """Processes near the limit of their memory."""
    near = []
    for (role, index), record in sorted(sight.records.telemetry.items()):
        used, limit = number(record.get("rss_bytes")), number(record.get("limit_bytes"))
        if used and limit and used > MEMORY_SHARE * limit:
            near.append((used / limit, f"{role} {index}"))
    if not near or not sight.running:
        return []
    names = several([name for _, name in near], "process", "processes")
    use = "uses {} % of its memory limit" if len(near) == 1 else "use up to {} % of their memory limits"
    text = f"{names} {use.format(f'{100 * max(near)[0]:.0f}')}"
    return [Warning("bad", text, "Add servers, evict rows, or store rows in fewer bits.", "members")]

"""Warnings of a job's processes: how it ended, who died or hangs, memory, the age of checkpoints.

One function per warning; each returns a list, which may be empty."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile

from shardkeep.page.sections import recoveries
from shardkeep.page.warnings.warning import Level, Sight, Warning, one, several, span
from shardkeep.records.events import EventMember, RecoveryEvent
from shardkeep.records.telemetry import near_memory_limit

NO_STEP_S = 60.0
SILENT_S = 15.0
SILENT_RECORDS = 4
"""A process is silent after so many intervals without a record, and after `SILENT_S`."""
CHECKPOINT_S, CHECKPOINT_PERIODS = 600.0, 2.0
"""A checkpoint is old after so many seconds, and so many of its periods."""
UNKNOWN_PERIOD_S = 1800.0
RESTART_S = 600.0
RECOVERIES_PER_HOUR = 3


def failed(sight: Sight) -> list[Warning]:
    """The job ended without completing."""
    message = str((sight.records.summary or {}).get("message") or "")
    if sight.state in ("failed", "killed", "incomplete"):
        what = f"the job {'is ' if sight.state == 'incomplete' else ''}{sight.state}"
        return [Warning("bad", f"{what}: {message}" if message else what,
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
    since = takewhile(lambda event: not event.formed, reversed(sight.records.events))
    lost = [event for event in since if event.lost is not None]
    text = f"the job recovers: {lost[0].text}" if lost else "the job recovers from a lost process"
    names = ", ".join(dict.fromkeys(f"{event.lost} {event.lost_index}" for event in reversed(lost)))
    limit_s = (sight.config.get("recovery") or {}).get("replace_timeout_s")
    waits = f", {names} for {span(sight.now - (lost[0].at or 0.0))} of {limit_s:g} s" if lost and limit_s else ""
    return [Warning("warn", text, f"Training resumes when all members are back{waits}.", "members")]


def no_step(sight: Sight) -> list[Warning]:
    """No progress for a minute while the job trains."""
    last = max((row[0] or 0.0 for row in sight.records.training.rows[-1:]), default=0.0)
    for record in sight.records.counts.workers:
        if record.steps:
            last = max(last, record.at or 0.0)
    if not sight.running or not last or sight.now - last <= NO_STEP_S:
        return []
    return [Warning("bad", f"no step for {span(sight.now - last)}",
                    "Look at the log of the worker or server that reported last.", "members")]  # fmt: skip


def silent(sight: Sight) -> list[Warning]:
    """A process that has sent no record for several intervals."""
    if not sight.running:
        return []
    quiet = [
        (age, f"{role} {index}")
        for (role, index), record in sorted(sight.records.counts.newest.items())
        if (age := sight.now - (record.at or 0.0)) > max(SILENT_S, SILENT_RECORDS * (record.every_s or 5.0))
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
    at = last.at or sight.now
    told = f"{one(len(found), 'recovery', 'recoveries')}; the last: {last.text or last.cause}"
    of_hour = sum((record.at or 0) > sight.now - 3600 for record in found)
    if sight.running and of_hour > RECOVERIES_PER_HOUR:
        return [Warning("bad", f"{of_hour} recoveries within an hour; the last: {last.text}",
                        "The logs of the processes that died say why.", "members")]  # fmt: skip
    level: Level = "warn" if sight.running and sight.now - at < RESTART_S else "note"
    died = last.died
    who = several([f"{each.role} {each.index}" for each in died], "process", "processes") if died else ""
    when = f" {span(sight.now - at)} ago" if sight.running else ""
    if who:
        were = "was" if len(died) == 1 else "were"
        count = one(len(found), "recovery", "recoveries")
        told = f"{who} died{_reason(died)} and {were} restarted{when}; {count} so far{_lost(last)}"
    return [Warning(level, told, "Training resumed. If it happens again, look at the log.", "members")]


def _lost(last: RecoveryEvent) -> str:
    """What a recovery cost, and why; "" = nothing."""
    whys = "".join(f"; {each.why}" for each in last.died if each.why)
    return f"; {last.lost_steps:,} steps were lost{whys}" if last.lost_steps else ""


def _reason(died: Sequence[EventMember]) -> str:
    """` (killed by SIGKILL)`, where one process died and the coordinator knows how."""
    return f" ({died[0].reason})" if len(died) == 1 and died[0].reason else ""


def memory(sight: Sight) -> list[Warning]:
    """Processes near the limit of their memory."""
    near = near_memory_limit(record for _, record in sorted(sight.records.counts.newest.items()))
    if not near or not sight.running:
        return []
    names = several([name for name, _ in near], "process", "processes")
    use = "uses {} % of its memory limit" if len(near) == 1 else "use up to {} % of their memory limits"
    text = f"{names} {use.format(f'{100 * max(share for _, share in near):.0f}')}"
    return [Warning("bad", text, "Add servers, evict rows, or store rows in fewer bits.", "members")]

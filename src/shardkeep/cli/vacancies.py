"""Lines of `shardkeep status` for a job that lacks processes: which are missing or alive, and what to type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardkeep.base.net.addresses import is_loopback
from shardkeep.ps.control.membership import silent_s
from shardkeep.ps.control.records import NOT_REPLACED, JobStatus
from shardkeep.records.lines import newest
from shardkeep.records.training import Progress
from shardkeep.run.next_steps import member_command, resume_line, typed
from shardkeep.run.processes import lives_here, numbers_mean_the_same
from shardkeep.run.reader import RunReader
from shardkeep.view.run_view import step_text

NONE_LEFT = "no process of this job is left"


def awaited(status: JobStatus, *, where: str, launched: bool | None) -> Iterator[str]:
    """Yields lines about the missing members of a job that forms: their names, the time left, and how to start them.

    `where`: the value of the members' --coordinator. `launched`: by `shardkeep train` or around a loop; None =
    unknown."""
    if not status.missing:
        return
    yield f"waiting for: {', '.join(map(str, status.missing))}"
    replaced = any(member.why == NOT_REPLACED for member in status.missing)
    setting = "recovery.replace_timeout_s" if replaced else "liveness.form_timeout_s"
    yield f"the job fails in {status.left_s:.0f} s if they do not join ({setting})"
    if launched:
        yield "the process that started the job starts them"
        return
    hosts = {(member.role, member.index): member.host for member in status.members}
    vacant = [member for member in status.missing if not member.pid]
    for free in vacant:
        host = hosts.get((free.role, free.index), "")
        on = f" on {host}" if host and not is_loopback(host) else ""
        yield f"start {free.role} {free.index}{on}: {member_command(where, free.role, free.index, host)}"
    if vacant:
        yield "with the same --run-dir, --token-file, --tls, --advertise and --insecure-data-plane as before" + (
            "" if launched is False else "; `shardkeep train` and `shardkeep node` start it without you"
        )
    late_s = silent_s(len(status.members))
    awaited_ones = {(member.role, member.index) for member in status.missing}
    for member in status.members:
        late = member.condition == "registered" and member.age_s > late_s
        if late and (member.role, member.index) in awaited_ones:
            yield (
                f"{member.role} {member.index} (pid {member.pid} on {member.host}) sent no heartbeat for "
                f"{member.age_s:.0f} s: if it is dead, start it now with its command"
            )


def unled_lines(folder: RunReader, *, launched: bool) -> Iterator[str]:
    """Yields lines about a job without a coordinator that answers."""
    address = folder.address()
    if launched:
        what = "is not listening yet" if address is None else f"does not answer at {address}"
        yield f"the coordinator {what}; `shardkeep train` starts a new one if it is dead"
        yield from _last(folder)
        return
    if address is None:
        yield "no coordinator has listened in this folder yet"
        return
    yield f"the coordinator does not answer at {address}"
    yield from _last(folder)
    states, command = list(_states(folder)), folder.coordinator_command()
    for member, state in states:
        yield f"{member['role']} {member['index']} (pid {member['pid']} on {member['host']}) {state}"
    if not folder.by_hand:
        own = "`shardkeep node` on its first machine starts another coordinator"
        yield f"{own}; if it has ended, start it again{typed(command)}"
        return
    waiting = "members wait for another coordinator for recovery.replace_timeout_s"
    ended = "the members have ended: start them again too, with their commands"
    yield waiting if any(state != "is gone" for _, state in states) else ended
    yield f"to continue{typed(command)}"


def killed_lines(folder: RunReader) -> Iterator[str]:
    """Yields lines about a job of `shardkeep train` whose processes ended without a summary."""
    yield f"killed: {NONE_LEFT}"
    yield from _last(folder)
    yield resume_line(folder.path)
    yield f"logs: {folder.logs}"


def _last(folder: RunReader) -> Iterator[str]:
    """Yields a line with the last known step."""
    if (last := newest(folder.metrics_path, Progress)) is not None:
        yield f"last known step: {step_text(last)} at {last.time}"


def _states(folder: RunReader) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields each member of the last generation, and whether its process is alive, as far as this machine can see."""
    here = numbers_mean_the_same(folder)
    for member in folder.member_list():
        if member["role"] != "coordinator":
            gone = "is gone" if here and is_loopback(member["host"]) else "may be alive"
            yield member, "is alive" if lives_here(member, here=here) else gone

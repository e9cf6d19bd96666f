"""Lines of `shardkeep status` for a job that lacks processes: which are missing or alive, and what to type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shardkeep.ps.control.membership import SILENT_S
from shardkeep.ps.control.records import MemberStatus, Status
from shardkeep.run.next_steps import member_command, resume_line, take_over_command
from shardkeep.run.processes import LOOPBACK, lives_here, numbers_mean_the_same
from shardkeep.run.reader import MetricsTail, RunReader
from shardkeep.run.trend import step_text


def awaited(status: Status, *, where: str, launched: bool | None) -> Iterator[str]:
    """Yields lines about the missing members of a job that forms: their names, the time left, and how to start them.

    `where`: the value of the members' --coordinator. `launched`: by `shardkeep train` or around a loop; None =
    unknown."""
    if not status.missing:
        return
    yield f"waiting for: {', '.join(status.missing)}"
    yield f"the job fails in {status.left_s:.0f} s if they do not join (liveness.form_timeout_s)"
    if launched:
        yield "the process that started the job starts them"
        return
    hosts = {f"{member.role} {member.index}": member.host for member in status.members}
    vacant = [text.split(" (")[0] for text in status.missing if text.endswith(("(not started)", "(not replaced)"))]
    for name in vacant:
        role, host = name.split()[0], hosts.get(name, "")
        on = f" on {host}" if host not in ("", *LOOPBACK) else ""
        yield f"start {name}{on}: {member_command(where, role, int(name.split()[1]), host)}"
    if vacant:
        yield "with the same --run-dir, --token-file, --tls, --advertise and --insecure-data-plane as before" + (
            "" if launched is False else "; `shardkeep train` starts it without you"
        )
    for member in status.members:
        if member.condition == "registered" and member.age_s > SILENT_S and _is_awaited(member, status.missing):
            yield (
                f"{member.role} {member.index} (pid {member.pid} on {member.host}) sent no heartbeat for "
                f"{member.age_s:.0f} s: if it is dead, start it now with its command"
            )


def _is_awaited(member: MemberStatus, missing: Sequence[str]) -> bool:
    return any(text.startswith(f"{member.role} {member.index} ") for text in missing)


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
    yield from _whereabouts(folder)
    command = take_over_command(folder)
    if command is None:
        yield resume_line(folder.path)
        return
    waiting = "members wait for another coordinator for liveness.form_timeout_s"
    ended = "the members have ended: start them again too, with their commands"
    yield waiting if _any_lives(folder) else ended
    yield f"to take over: {command}"
    yield f"without it, {resume_line(folder.path)}"


def killed_lines(folder: RunReader) -> Iterator[str]:
    """Yields lines about a job of `shardkeep train` whose processes ended without a summary."""
    yield "killed: no process of this job is left"
    yield from _last(folder)
    yield resume_line(folder.path)
    yield f"logs: {folder.logs}"


def _last(folder: RunReader) -> Iterator[str]:
    """Yields a line with the last known step."""
    last: dict[str, Any] = {}
    for record in MetricsTail(folder.metrics_path):
        last = record if record.get("kind") == "progress" else last
    if last:
        yield f"last known step: {step_text(last)} at {last.get('time')}"


def _whereabouts(folder: RunReader) -> Iterator[str]:
    """Yields a line per member of the last generation: whether its process is alive, as far as this machine can see."""
    here = numbers_mean_the_same(folder)
    for member in folder.member_list():
        if member["role"] != "coordinator":
            state = _state(member, here=here)
            yield f"{member['role']} {member['index']} (pid {member['pid']} on {member['host']}) {state}"


def _state(member: dict[str, Any], *, here: bool) -> str:
    if lives_here(member, here=here):
        return "is alive"
    return "is gone" if here and member["host"] in LOOPBACK else "may be alive"


def _any_lives(folder: RunReader) -> bool:
    members = [member for member in folder.member_list() if member["role"] != "coordinator"]
    here = numbers_mean_the_same(folder)
    return any(_state(member, here=here) != "is gone" for member in members)

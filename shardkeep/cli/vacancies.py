"""What `shardkeep status` says of a job that lacks processes: who is awaited, who may still live, what to type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console

from shardkeep.config import load_config
from shardkeep.ps.control.records import Status
from shardkeep.run.next_steps import member_command, resume_line, take_over_command
from shardkeep.run.processes import LOOPBACK, lives_here, numbers_mean_the_same
from shardkeep.run.reader import MetricsTail, RunReader


def awaited(status: Status, *, where: str, launched: bool | None) -> Iterator[str]:
    """Lines of a job that forms: who is missing, for how long yet, and who starts them.

    `where`: what members get as --coordinator. `launched`: by `shardkeep train`; None = unknown."""
    if not status.missing:
        return
    yield f"waiting for: {', '.join(status.missing)}"
    yield f"the job fails in {status.left_s:.0f} s if they do not come (liveness.form_timeout_s)"
    if launched:
        yield "`shardkeep train` starts them by itself"
        return
    hosts = {f"{member.role} {member.index}": member.host for member in status.members}
    vacant = [text.split(" (")[0] for text in status.missing if text.endswith(("(not started)", "(not replaced)"))]
    for name in vacant:
        role, host = name.split()[0], hosts.get(name, "")
        on = f" on {host}" if host not in ("", *LOOPBACK) else ""
        yield f"start {name}{on}: {member_command(where, role, int(name.split()[1]), host)}"
    if vacant:
        yield "with the same --run-dir, --token-file and --tls as before" + (
            "" if launched is False else "; under `shardkeep train` it starts by itself"
        )


def show_unled(folder: RunReader, console: Console, *, launched: bool) -> int:
    """A job whose coordinator does not answer, or has not listened yet; returns 1."""
    address = folder.address()
    if launched:
        if address is None and not load_config(folder.config_path).servers:
            _print(console, "running in one process", *_last(folder))
            return 0
        what = "has not listened yet" if address is None else f"does not answer at {address}"
        _print(console, f"the coordinator {what}; `shardkeep train` starts another one if it is dead", *_last(folder))
        return 1
    if address is None:
        _print(console, "no coordinator has listened in this folder yet")
        return 1
    _print(console, f"the coordinator does not answer at {address}", *_last(folder), *_whereabouts(folder))
    command = take_over_command(folder)
    if command is None:
        _print(console, resume_line(folder.path))
        return 1
    waiting = "members wait for another coordinator for liveness.form_timeout_s"
    ended = "the members have ended: start them again, too, by their commands"
    _print(console, waiting if _any_lives(folder) else ended, f"to take over: {command}")
    _print(console, f"without it, {resume_line(folder.path)}")
    return 1


def show_killed(folder: RunReader, console: Console) -> int:
    """A job of `shardkeep train` whose processes are gone without a summary; returns 1."""
    _print(console, "killed: all processes of this job are gone", *_last(folder))
    _print(console, resume_line(folder.path), f"logs: {folder.logs}")
    return 1


def _print(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _last(folder: RunReader) -> Iterator[str]:
    """How far the job was."""
    last: dict[str, Any] = {}
    for record in MetricsTail(folder.metrics_path):
        last = record if record.get("kind") == "progress" else last
    if last:
        yield f"last known step: {last.get('step', 0):,}/{last.get('total_steps') or 0:,} at {last.get('time')}"


def _whereabouts(folder: RunReader) -> Iterator[str]:
    """Each member of the last generation: whether its process is there, as far as this machine can tell."""
    here = numbers_mean_the_same(folder)
    for member in folder.member_list():
        if member["role"] != "coordinator":
            state = _state(member, here=here)
            yield f"{member['role']} {member['index']} (pid {member['pid']} on {member['host']}) {state}"


def _state(member: dict[str, Any], *, here: bool) -> str:
    if lives_here(member, here=here):
        return "lives"
    return "is gone" if here and member["host"] in LOOPBACK else "may live"


def _any_lives(folder: RunReader) -> bool:
    members = [member for member in folder.member_list() if member["role"] != "coordinator"]
    here = numbers_mean_the_same(folder)
    return any(_state(member, here=here) != "is gone" for member in members)

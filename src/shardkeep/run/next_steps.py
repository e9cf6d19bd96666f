"""The commands that a person can paste to continue with a run.

Paths in them are absolute and quoted. Starts nothing."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from shardkeep.base.errors import ShardkeepError, UserError
from shardkeep.config import JobConfig, stored_config
from shardkeep.run.checkpoints import checkpoints_of
from shardkeep.run.origin.resume import await_leftovers, newest, other_owner
from shardkeep.run.processes import launcher_there
from shardkeep.run.reader import RunReader


def continue_arguments(run: Path, address: str, token_file: Path | None, tls: Path | None, insecure: bool) -> list[str]:
    """The command of a coordinator that continues after the one that listens at `address`."""
    command = ["shardkeep", "coordinator", str(run / "config.yaml"), "--continue", "--run-dir", str(run)]
    command += ["--listen", address]
    command += [] if token_file is None else ["--token-file", str(token_file.absolute())]
    command += [] if tls is None else ["--tls", str(tls.absolute())]
    return command + (["--insecure-data-plane"] if insecure else [])


def resume_line(path: Path) -> str:
    """How to continue with a run whose processes are gone, or why that cannot be: one line."""
    run = path.absolute()
    try:
        config = stored_config(run)
        if not (checkpoints := checkpoints_of(config, run)).complete():
            return f"nothing to resume from: no complete checkpoint in {checkpoints.folder}"
        found = newest(config, run)
        step = found.step
        summary = RunReader(run).summary() or {}
        if summary.get("status") == "incomplete" and step == summary["steps"]:
            return f"nothing to resume: {found.folder.name} has all steps"
        if found.facts.get("loop"):
            call = f"client.restore({str(checkpoints.folder)!r})"
            return f"to continue from step {step:,}: {call} before the loop's first step"
    except (ShardkeepError, OSError) as error:
        return f"nothing to resume from: {error}"
    return f"to resume at step {step:,}{typed(RunReader(run).coordinator_command() or _resume(run))}"


def typed(command: Sequence[str] | None) -> str:
    """The end of a line: what a person types, and where; None = a program types it."""
    if command is None:
        return " by the program that started it"
    return f"{' on each machine' if command[1] == 'node' else ''}: {shlex.join(command)}"


def longer_line(config: JobConfig, path: Path, steps: int) -> str:
    """How a completed job of `shardkeep train` trains twice its `steps`, or on later data after its one pass. A rate
    that would fall to 0 before falls over all steps."""
    train = config.train
    if train.order == "time":
        return f"to train on later samples: shardkeep train CONFIG --from {shlex.quote(str(path.absolute()))}"
    more = [f"train.epochs={2 * train.epochs}"] + (
        [f"train.max_steps={2 * train.max_steps}"] if train.max_steps else []
    )
    more += [
        f"{key}.decay_steps={2 * steps - each.warmup_steps}"
        for key, each in config.schedules.items()
        if each.end(2 * steps) < 2 * steps
    ]
    command = _resume(path.absolute()) + [part for change in more for part in ("--set", change)]
    return f"to train longer: {shlex.join(command)}"


def _resume(run: Path) -> list[str]:
    return ["shardkeep", "train", "--resume", str(run)]


def member_command(coordinator: str, role: str, index: int, host: str) -> str:
    """What starts a member; options that only its user knows are left out."""
    command = ["shardkeep", role, "--coordinator", coordinator, "--index", str(index)]
    return shlex.join(command + (["--advertise", host] if host not in ("", "127.0.0.1") else []))


def check_start(config: JobConfig, path: Path, step: int) -> int:
    """Whether a coordinator may start at a step's checkpoint in a folder that it would change; the samples trained by
    then, 0 where only members see the checkpoint. Raises UserError: the job runs, or there is no such checkpoint.
    CheckpointError: it is damaged."""
    if (path / "config.yaml").is_file():
        if launcher_there(path):
            raise UserError(f"--run-dir {path}: `shardkeep train` runs a job there")
        await_leftovers(RunReader(path), option="--run-dir")
    if not step:
        return 0
    checkpoints = checkpoints_of(config, path)
    if config.checkpoint.dir is not None and not checkpoints.folder.is_dir():
        return 0  # it is on the members' machines alone
    steps = [found for found, _ in checkpoints.complete()]
    if step not in steps:
        there = f"there are: {', '.join(map(str, steps))}" if steps else "there is none"
        raise UserError(f"--start-step {step}: no complete checkpoint of that step in {checkpoints.folder}; {there}")
    checkpoint = checkpoints.load(step)
    checkpoint.check_sizes()
    return int(checkpoint.facts.get("samples", 0))


def origin_line(config: JobConfig, path: Path) -> str | None:
    """What a job that starts at a checkpoint says when another run wrote last to its folder; None = no other did. If
    that run still writes, the worker that leads refuses the folder."""
    if (other := other_owner(config, path)) is None:
        return None
    return f"the checkpoints in {checkpoints_of(config, path).folder} are those of another run, {other}"

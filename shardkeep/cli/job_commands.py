"""Commands for whole jobs on this machine: train, status, scale."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shardkeep.base.errors import UserError
from shardkeep.base.log import LogFormat, configure, print_json
from shardkeep.cli.exits import run_command
from shardkeep.cli.options import (
    Ask,
    Code,
    Debug,
    Log,
    ParentPipe,
    Run,
    RunDir,
    Set,
    TlsFolder,
    TokenFile,
    complete_path,
    complete_run,
    load,
    path,
    which_checkpoint,
)
from shardkeep.run.screen_log import LAUNCHER

ORPHAN_STOP_S = 15.0
"""Seconds a job gets to stop after the sweep that started it has ended."""


def train(
    config: Annotated[
        Path | None,
        typer.Argument(
            parser=path,
            metavar="[CONFIG]",
            autocompletion=complete_path,
            help="YAML file of the job; `demo` is the built-in one.",
        ),
    ] = None,
    set_: Set = None,
    run_dir: RunDir = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            metavar="RUN",
            autocompletion=complete_run,
            help="Resume this run from its newest checkpoint; give no CONFIG.",
        ),
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option(
            "--from",
            parser=path,
            metavar="RUN",
            autocompletion=complete_run,
            help="Begin with the rows and the dense model of this run.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="last|best|STEP", help="Checkpoint of --from; left out = the newest one."),
    ] = None,
    code: Code = None,
    log_format: Log = LogFormat.TEXT,
    parent_pipe: ParentPipe = False,
    debug: Debug = False,
) -> None:
    """Run a whole job on this machine, or resume one."""

    def run() -> int:
        if parent_pipe:
            _end_with_sweep()
        if (config is None) == (resume is None):
            raise UserError("shardkeep train requires either a CONFIG or --resume RUN")
        if model is not None and from_run is None:
            raise UserError(f"--model {model}: has no effect without --from RUN")
        if resume is not None:
            if from_run is not None:
                raise UserError("--from: has no effect with --resume; the run has begun already")
            _resume(resume, set_ or [], run_dir, log_format)
        elif config is not None:
            start = None if from_run is None else (from_run, model or "last")
            _run_job(config, set_, run_dir, code, start=start, log_format=log_format)
        return 0

    if log_format is LogFormat.JSON:
        configure(*LAUNCHER, stream=sys.stdout, form=log_format)
        print_json(*LAUNCHER)
    run_command(run, debug)


def with_(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="What to run, such as torchrun.")],
    servers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Server processes; left out = the config's, or 2.")
    ] = None,
    trainers: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Processes that call connect(); left out = torchrun's --nproc-per-node, the config's, or 1.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            metavar="CONFIG",
            autocompletion=complete_path,
            help="YAML file with tables, consistency, compression.",
        ),
    ] = None,
    set_: Set = None,
    run_dir: RunDir = None,
    debug: Debug = False,
) -> None:
    """Run a command between the start and the end of servers, for a training loop of your own."""

    def run() -> int:
        from shardkeep.cli.exits import say
        from shardkeep.loop.around import run_around, trainers_of
        from shardkeep.loop.joining import config_around
        from shardkeep.run.new_folder import default_run_dir

        job = config_around(config, set_ or [], servers=servers, trainers=trainers or trainers_of(command))
        return run_around(command, job, run_dir or default_run_dir(job.name), say)

    run_command(run, debug)


def _resume(run: Path, overrides: list[str], run_dir: Path | None, log_format: LogFormat) -> None:
    from shardkeep.launch.job import resume
    from shardkeep.run.screen import console

    if run_dir is not None:
        raise UserError(f"--run-dir {run_dir}: has no effect with --resume, which continues in RUN")
    resume(run, overrides=overrides, console=console(), log_format=log_format)


def _run_job(
    config: Path,
    overrides: list[str] | None,
    run_dir: Path | None,
    code: Path | None,
    *,
    start: tuple[Path, str] | None,
    log_format: LogFormat,
) -> None:
    from shardkeep.launch.job import run_job
    from shardkeep.run.new_folder import default_run_dir
    from shardkeep.run.screen import console

    path, job = load(config, overrides)
    folder = run_dir or default_run_dir(job.name)
    code_folder = code or path.resolve().parent
    begins_with = None
    if start is not None:
        from shardkeep.run.warm_start import plan_warm_start

        begins_with = plan_warm_start(job, start[0], which_checkpoint(start[1]))
    run_job(
        job,
        run_dir=folder,
        console=console(),
        code_folder=code_folder,
        start=begins_with,
        log_format=log_format,
    )


def status(
    run: Run = None,
    coordinator: Ask = None,
    token_file: TokenFile = None,
    tls: TlsFolder = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; docs/reference/status.md explains its keys.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Show the progress and the processes of a job."""

    def show() -> int:
        from shardkeep.cli.status import show_job, show_run
        from shardkeep.cli.status_json import StatusJson
        from shardkeep.cli.status_text import StatusText
        from shardkeep.ps.control.grpc.addresses import is_address
        from shardkeep.ps.control.grpc.tls import read_tls
        from shardkeep.roles.access import endpoint_of
        from shardkeep.run.screen import console

        view = StatusJson(print) if json else StatusText(console())
        if coordinator is not None and is_address(coordinator):
            return show_job(endpoint_of(coordinator, token_file=token_file, tls=tls), view)
        path = run if coordinator is None else Path(coordinator)
        return show_run(path, view, token_file=token_file, tls=None if tls is None else read_tls(tls))

    run_command(show, debug)


def scale(
    run: Run = None,
    workers: Annotated[int | None, typer.Option(min=1, metavar="N", help="Number of worker processes.")] = None,
    servers: Annotated[int | None, typer.Option(min=1, metavar="N", help="Number of server processes.")] = None,
    debug: Debug = False,
) -> None:
    """Change the numbers of workers or servers of a running job."""

    def ask() -> int:
        from shardkeep.launch.scale import ask
        from shardkeep.run.reader import latest_run

        path = run or latest_run()
        if path is None:
            raise UserError("no run folder in runs/; name one")
        print(ask(path, workers=workers, servers=servers), flush=True)
        return 0

    run_command(ask, debug)


def _end_with_sweep() -> None:
    """Stops the job cleanly when the sweep that started it ends."""
    from shardkeep.launch.children import end_with_parent

    end_with_parent(patience_s=0.0, last_s=ORPHAN_STOP_S)

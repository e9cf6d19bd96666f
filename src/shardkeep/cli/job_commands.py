"""Commands for whole jobs on this machine, while they run and afterwards: train, status, view, stop, scale, with."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from shardkeep.base.errors import UserError
from shardkeep.base.logs.log import LogFormat, configure, print_json
from shardkeep.cli.exits import lose_output, say
from shardkeep.cli.options import (
    CONFIG_HELP,
    MODEL,
    Ask,
    Code,
    Label,
    Log,
    ParentPipe,
    Run,
    RunDir,
    Runs,
    Set,
    TlsFolder,
    TokenFile,
    code_folder,
    count_option,
    load,
    newest_run,
    path_argument,
    path_option,
    which_checkpoint,
)
from shardkeep.view.screen_log import LAUNCHER

ORPHAN_STOP_S = 15.0
"""Seconds a job gets to stop after the sweep that started it has ended."""


def train(
    config: Annotated[Path | None, path_argument(f"{CONFIG_HELP} Or a file of data.", "CONFIG")] = None,
    label: Label = None,
    set_: Set = None,
    run_dir: RunDir = None,
    resume: Annotated[
        Path | None, path_option("Resume this run from its newest checkpoint; give no CONFIG.", metavar="RUN")
    ] = None,
    from_run: Annotated[
        Path | None, path_option("Begin with the rows and the dense model of this run.", "--from", metavar="RUN")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar=MODEL, help="Checkpoint of --from; left out = auto.")
    ] = None,
    code: Code = None,
    log_format: Log = LogFormat.TEXT,
    parent_pipe: ParentPipe = False,
) -> None:
    """Run a whole job on this machine, or resume one."""
    lose_output()
    if log_format is LogFormat.JSON:
        configure(*LAUNCHER, stream=sys.stdout, form=log_format)
        print_json(*LAUNCHER)
    if parent_pipe:
        from shardkeep.launch.processes.children import end_with_parent

        end_with_parent(patience_s=0.0, last_s=ORPHAN_STOP_S)  # when the sweep that started it ends
    if (config is None) == (resume is None):
        raise UserError("shardkeep train requires either a CONFIG or --resume RUN")
    if model is not None and from_run is None:
        raise UserError(f"--model {model}: has no effect without --from RUN")
    if resume is not None:
        if from_run is not None or label is not None:
            option = "--label" if from_run is None else "--from"
            raise UserError(f"{option}: has no effect with --resume; the run has begun already")
        _resume(resume, set_ or [], run_dir, log_format)
    elif config is not None:
        start = None if from_run is None else (from_run, model or "auto")
        config, set_, run_dir = _job_of_file(config, label, set_, run_dir)
        _run_job(config, set_, run_dir, code, start=start, log_format=log_format)


def _job_of_file(
    config: Path, label: str | None, overrides: list[str] | None, run_dir: Path | None
) -> tuple[Path, list[str] | None, Path | None]:
    """The three as they are, or of data the job's file that `shardkeep init` writes, and the new run folder with it."""
    from shardkeep.workers.file_kinds import data_suffix

    if data_suffix(config.name) in ("", ".json"):  # a config may be JSON
        if label is not None:
            raise UserError(f"--label {label}: has no effect without a file of data in place of CONFIG")
        return config, overrides, run_dir
    from shardkeep.automl.init import plan_of
    from shardkeep.automl.view import show
    from shardkeep.run.new_folder import default_run_dir, refuse_taken

    plan = plan_of([str(config)], label=label, overrides=overrides or [])
    refuse_taken(folder := run_dir or default_run_dir(plan.name))
    show(plan)
    return plan.write(folder / "job.yaml"), None, folder


def _resume(run: Path, overrides: list[str], run_dir: Path | None, log_format: LogFormat) -> None:
    from shardkeep.launch.job import resume
    from shardkeep.view.screen import console

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
    from shardkeep.view.screen import console

    path, job = load(config, overrides)
    begins_with = None
    if start is not None:
        from shardkeep.run.origin.warm_start import plan_warm_start

        begins_with = plan_warm_start(job, start[0], which_checkpoint(start[1]))
    run_job(
        job,
        run_dir=run_dir or default_run_dir(job.name),
        console=console(),
        code_folder=code or code_folder(config, path),
        start=begins_with,
        log_format=log_format,
    )


def with_(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="What to run, such as torchrun.")],
    servers: Annotated[int | None, count_option("Server processes; left out = the config's, or 2.")] = None,
    trainers: Annotated[
        int | None,
        count_option("Processes that call connect(); left out = torchrun's --nproc-per-node, the config's, or 1."),
    ] = None,
    config: Annotated[
        Path | None, path_option("YAML file with tables, consistency, compression.", metavar="CONFIG")
    ] = None,
    set_: Set = None,
    run_dir: RunDir = None,
) -> int:
    """Run a command between the start and the end of servers, for a training loop of your own."""
    from shardkeep.config import load_config, parse_config
    from shardkeep.loop.joining import config_around
    from shardkeep.loop.with_command import run_around, trainers_of
    from shardkeep.run.new_folder import default_run_dir

    loaded = load_config(config, set_ or []) if config is not None else parse_config("", set_) if set_ else None
    job = config_around(loaded, servers=servers, trainers=trainers or trainers_of(command))
    return run_around(command, job, run_dir or default_run_dir(job.name), say)


def status(
    run: Run = None,
    coordinator: Ask = None,
    token_file: TokenFile = None,
    tls: TlsFolder = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; docs/reference/status.md explains its keys.")
    ] = False,
) -> int:
    """Show the progress and the processes of a job."""
    from shardkeep.base.net.addresses import is_address
    from shardkeep.cli.status import show_job, show_run
    from shardkeep.cli.status_text import show
    from shardkeep.member.access import endpoint_of
    from shardkeep.records.json_text import to_json
    from shardkeep.trust.tls import read_tls
    from shardkeep.view.screen import console

    view = (lambda facts, _: print(to_json(facts))) if json else partial(show, console=console())
    if coordinator is not None and is_address(coordinator):
        return show_job(endpoint_of(coordinator, token_file=token_file, tls=tls), view)
    path = run if coordinator is None else Path(coordinator)
    return show_run(path, view, token_file=token_file, tls=None if tls is None else read_tls(tls))


def view(
    runs: Runs = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of the page; port 0 = any free one.")
    ] = "127.0.0.1:0",
    token_file: Annotated[
        Path | None,
        path_option("File with a token that the page wants, readable by you alone [default: a new one, printed]."),
    ] = None,
) -> None:
    """Show runs in a browser: prints the address of a page and serves it until Ctrl-C."""
    import secrets

    from shardkeep.base.net.addresses import check_exposed, split_address
    from shardkeep.page.of_job import NICE, open_page, page_url
    from shardkeep.page.state import RunState
    from shardkeep.trust.endpoint import read_token
    from shardkeep.web.access import Access
    from shardkeep.web.server import WebServer

    host = split_address(listen, lowest_port=0)[0]
    check_exposed("--listen", host, accepted=token_file is not None, by="--token-file FILE")
    token = secrets.token_hex(32) if token_file is None else read_token(token_file)
    states = [RunState(run) for run in runs or [newest_run(None)]]
    with contextlib.closing(WebServer(nice=NICE)) as web, contextlib.suppress(KeyboardInterrupt):
        address = open_page(web, listen, Access(token), lambda: states)
        print(f"page  {page_url(address, token)}", flush=True)
        web.wait()


def stop(
    run: Run = None,
    timeout: Annotated[
        float, typer.Option(min=0.0, metavar="S", help="Seconds to wait for the end of the job.")
    ] = 600.0,
    coordinator: Ask = None,
    token_file: TokenFile = None,
    tls: TlsFolder = None,
) -> None:
    """Stop a running job with a checkpoint, and wait until it has ended."""
    from shardkeep.base.net.addresses import is_address
    from shardkeep.launch.stopping.stop import stop_at, stop_run
    from shardkeep.member.access import endpoint_of
    from shardkeep.trust.tls import read_tls

    if coordinator is not None and is_address(coordinator):
        lines = stop_at(endpoint_of(coordinator, token_file=token_file, tls=tls), timeout_s=timeout)
    else:
        named = run if run is not None or coordinator is None else Path(coordinator)
        known = None if tls is None else read_tls(tls)
        path = newest_run(named, ", or use --coordinator HOST:PORT")
        lines = stop_run(path, timeout_s=timeout, token_file=token_file, tls=known)
    print("\n".join(lines), flush=True)


def scale(
    run: Run = None,
    workers: Annotated[int | None, count_option("Number of worker processes.")] = None,
    servers: Annotated[int | None, count_option("Number of server processes.")] = None,
) -> None:
    """Change the numbers of workers or servers of a running job."""
    from shardkeep.launch.stopping.scale import ask

    print(ask(newest_run(run), workers=workers, servers=servers), flush=True)

"""Commands for single processes of a job: coordinator, server, worker, and the launcher's fork server."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardkeep.base.log import LogFormat, configure, print_json
from shardkeep.cli.exits import run_command, say
from shardkeep.cli.options import (
    Advertise,
    Code,
    Config,
    Coordinator,
    Debug,
    Index,
    Insecure,
    Keeps,
    Log,
    ParentPipe,
    RunDir,
    Set,
    TlsFolder,
    TokenFile,
    load,
)
from shardkeep.roles.departure import Departure


def coordinator(
    config: Config,
    set_: Set = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to listen on; port 0 takes any free one.")
    ] = "127.0.0.1:0",
    run_dir: RunDir = None,
    start_step: Annotated[
        int, typer.Option(min=0, metavar="N", help="Resume from the checkpoint of this step; 0 = from the beginning.")
    ] = 0,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Replace a coordinator that died, with its --run-dir and --listen.")
    ] = False,
    token_file: TokenFile = None,
    tls: TlsFolder = None,
    insecure_data_plane: Insecure = False,
    log_format: Log = LogFormat.TEXT,
    parent_pipe: ParentPipe = False,
    debug: Debug = False,
) -> None:
    """Run the coordinator of a job; it prints one line of JSON with its address."""

    def run() -> int:
        from shardkeep.roles.coordinator import CoordinatorOptions, run_coordinator

        _, job = load(config, set_)
        options = CoordinatorOptions(
            listen, run_dir, start_step, take_over, token_file, tls, insecure_data_plane, parent_pipe
        )
        return run_coordinator(job, options)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until it serves requests
    _begin("coordinator", 0, parent_pipe, log_format)
    run_command(run, debug)


def server(
    coordinator: Coordinator,
    index: Index,
    advertise: Advertise = "127.0.0.1",
    run_dir: Keeps = Path(),
    token_file: TokenFile = None,
    tls: TlsFolder = None,
    insecure_data_plane: Insecure = False,
    log_format: Log = LogFormat.TEXT,
    parent_pipe: ParentPipe = False,
    debug: Debug = False,
) -> None:
    """Run one embedding server of a job."""

    def run() -> int:
        from shardkeep.roles.access import endpoint_of
        from shardkeep.roles.membership import lasting_imports

        _check_member(coordinator, advertise, token_file, by_hand=not parent_pipe, exposed=insecure_data_plane)
        with lasting_imports("server") as kernels_s:
            from shardkeep.roles.server import run_server

        found = endpoint_of(coordinator, token_file=token_file, tls=tls, launched=parent_pipe)
        folder = run_dir.absolute()
        return run_server(
            found, index=index, advertise=advertise, folder=folder, kernels_s=kernels_s, departure=departure
        )

    departure = _begin_member("server", index, parent_pipe, log_format)
    run_command(run, debug)


def worker(
    coordinator: Coordinator,
    index: Index,
    advertise: Advertise = "127.0.0.1",
    run_dir: Keeps = Path(),
    token_file: TokenFile = None,
    tls: TlsFolder = None,
    insecure_data_plane: Insecure = False,
    code: Code = None,
    log_format: Log = LogFormat.TEXT,
    parent_pipe: ParentPipe = False,
    debug: Debug = False,
) -> None:
    """Run one worker of a job."""

    def run() -> int:
        from shardkeep.base.modules import search_last
        from shardkeep.roles.access import endpoint_of
        from shardkeep.roles.membership import lasting_imports

        _check_member(coordinator, advertise, token_file, by_hand=not parent_pipe, exposed=insecure_data_plane)
        with lasting_imports("worker") as kernels_s:
            from shardkeep.roles.worker import run_worker
        if code is not None:
            search_last(code)

        found = endpoint_of(coordinator, token_file=token_file, tls=tls, launched=parent_pipe)
        folder = run_dir.absolute()
        return run_worker(
            found, index=index, advertise=advertise, folder=folder, kernels_s=kernels_s, departure=departure
        )

    departure = _begin_member("worker", index, parent_pipe, log_format)
    run_command(run, debug)


def fork_server(control: Annotated[int, typer.Argument(help="Descriptor of a socket.")]) -> None:
    """Import the modules of all roles, and fork roles for a launcher."""
    import socket

    from shardkeep.launch.fork_server import serve

    _quiet_torch()
    serve(socket.socket(fileno=control))


def _begin(role: str, index: int, parent_pipe: bool, form: LogFormat) -> None:
    """Prepares the process of a role: file descriptors, log, and the thread that ends it with its launcher."""
    from shardkeep.base.machine.descriptors import keep_free, raise_limit

    raise_limit()
    keep_free()
    # A launcher makes objects of what libraries write to stderr. Its roles' own lines do not wait for it.
    stream = sys.stdout if parent_pipe and form is LogFormat.JSON else sys.stderr
    configure(role, index, stream=stream, form=form)
    if form is LogFormat.JSON:  # a script reads a coordinator's address on stdout
        print_json(role, index, errors=stream, stdout=parent_pipe or role != "coordinator")
    _quiet_torch()
    if parent_pipe:
        from shardkeep.launch.children import end_with_parent

        # The coordinator stops the job and ends last. Members learn of the stop from it, or get SIGTERM after 4 s.
        if role == "coordinator":
            end_with_parent(patience_s=0.0, last_s=12.0)
        else:
            end_with_parent(patience_s=4.0)


def _quiet_torch() -> None:
    """Silences torch's warnings about lost peers, which shardkeep reports itself. Call it before importing torch."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _check_member(coordinator: str, advertise: str, token_file: Path | None, *, by_hand: bool, exposed: bool) -> None:
    """Checks the arguments of a server or worker before its imports, which take seconds. Raises UserError.

    `exposed`: `--insecure-data-plane` was given."""
    from shardkeep.ps.control.grpc.addresses import check_exposed
    from shardkeep.roles.access import check_coordinator

    check_exposed("--advertise", advertise, accepted=exposed)
    if by_hand and (lacks := check_coordinator(coordinator, token_file=token_file)) is not None:
        say(lacks)


def _begin_member(role: str, index: int, parent_pipe: bool, form: LogFormat) -> Departure:
    """Prepares the process of a server or worker. Returns its handler of SIGTERM and SIGINT."""
    departure = Departure()
    departure.watch()
    _begin(role, index, parent_pipe, form)
    return departure

"""Commands for a job's processes on several machines: node, coordinator, server, worker; and the launcher's fork
server."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shardkeep.base.errors import ConfigError
from shardkeep.base.exit_codes import LEAVING, START_AGAIN
from shardkeep.base.logs.log import EventLog, LogFormat, configure, print_json
from shardkeep.cli.exits import say
from shardkeep.cli.options import (
    Advertise,
    Code,
    Config,
    Coordinator,
    Index,
    Insecure,
    Keeps,
    Log,
    ParentPipe,
    RunDir,
    Set,
    Sheltered,
    TlsFolder,
    TokenFile,
    load,
    path_option,
)
from shardkeep.member.departure import Departure

if TYPE_CHECKING:
    from shardkeep.config import JobConfig
    from shardkeep.launch.machine import Machine
    from shardkeep.launch.node import NodeOptions
    from shardkeep.launch.processes.starter import Starter
    from shardkeep.run.origin.continuing import Given

_log = EventLog("launch")

Listen = Annotated[str, typer.Option(metavar="HOST:PORT", help="Address to listen on; port 0 takes any free one.")]
StartStep = Annotated[
    int, typer.Option(min=0, metavar="N", help="Resume from the checkpoint of this step; 0 = from the beginning.")
]
TakeOver = Annotated[
    bool, typer.Option("--take-over", help="Replace a coordinator that died, with its --run-dir and --listen.")
]
Continues = Annotated[
    bool, typer.Option("--continue", help="Begin, take over, resume or end, by what is in --run-dir.")
]
Again = Annotated[str, typer.Option("--again", hidden=True)]  # what continues the job: the command of `shardkeep node`


RunFolder = Annotated[Path, path_option("Run folder, new or not; all machines see it.", metavar="DIR")]
Rank = Annotated[int | None, typer.Option(min=0, metavar="N", help="This machine's number [default: the launcher's].")]
Nodes = Annotated[int | None, typer.Option(min=1, metavar="N", help="How many machines [default: the launcher's].")]
Keep = Annotated[Path | None, path_option("Local folder for journals [default: the run folder].", metavar="DIR")]
Host = Annotated[str, typer.Option(metavar="HOST", help="This machine for the others [default: it prints it].")]


class Only(StrEnum):
    """The roles of machines of their own."""

    SERVERS = "servers"
    WORKERS = "workers"


Alone = Annotated[
    Only | None,
    typer.Option(
        metavar="servers|workers", help="The others have machines of their own; servers: also the coordinator."
    ),
]


def node(
    config: Config,
    run_dir: RunFolder,
    set_: Set = None,
    rank: Rank = None,
    nodes: Nodes = None,
    only: Alone = None,
    keep: Keep = None,
    advertise: Host = "",
    token_file: TokenFile = None,
    tls: TlsFolder = None,
    insecure_data_plane: Insecure = False,
    log_format: Log = LogFormat.TEXT,
    parent_pipe: ParentPipe = False,
) -> int:
    """Run one machine's share of a job; the same command on every machine, started again at any time."""

    def run() -> int:
        from shardkeep.launch.machine import machine_of
        from shardkeep.launch.node import NodeOptions

        machine = machine_of(rank, nodes)
        _begin_node(machine.rank, log_format)
        address = _address(machine, advertise, alone=only is None, exposed=insecure_data_plane)
        found, given = _given(config, set_)
        kept, secret, certificates = (folder and folder.absolute() for folder in (keep, token_file, tls))
        options = NodeOptions(found.absolute(), run_dir.absolute(), machine, address, only=only or "", keep=kept)
        options = replace(options, token_file=secret, tls=certificates, insecure=insecure_data_plane)
        return _run_node(given, replace(options, overrides=tuple(set_ or ()), by_program=parent_pipe), log_format)

    from shardkeep.launch.processes.process_one import in_process_one

    return in_process_one(run)


def coordinator(
    config: Config,
    set_: Set = None,
    listen: Listen = "127.0.0.1:0",
    run_dir: RunDir = None,
    start_step: StartStep = 0,
    take_over: TakeOver = False,
    continues: Continues = False,
    token_file: TokenFile = None,
    tls: TlsFolder = None,
    insecure_data_plane: Insecure = False,
    log_format: Log = LogFormat.TEXT,
    parent_pipe: ParentPipe = False,
    sheltered: Sheltered = False,
    again: Again = "",
) -> int:
    """Run the coordinator of a job; it prints one line of JSON with its address."""
    heeds = _begin_coordinator(parent_pipe, log_format, sheltered=sheltered, restarted=continues)
    from shardkeep.roles.coordinator import CoordinatorOptions, run_coordinator

    _, given = _given(config, set_)
    place, trust = (listen, run_dir, start_step, take_over), (token_file, tls, insecure_data_plane)
    by_train = parent_pipe and not continues
    options = CoordinatorOptions(
        *place,
        *trust,
        continues,
        folder_made=by_train,
        pinned=by_train,
        one_machine=by_train,
        quiet=parent_pipe,
        again=shlex.split(again),
        heeds=heeds if sheltered else None,
    )
    return run_coordinator(given, options)


def member(role: Literal["server", "worker"], summary: str) -> Callable[..., int]:
    """The command of a server or a worker."""

    def command(
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
        sheltered: Sheltered = False,
    ) -> int:
        departure = _begin_member(role, index, parent_pipe, log_format, sheltered=sheltered)
        from shardkeep.base.plugging.modules import search_last
        from shardkeep.member.access import endpoint_of
        from shardkeep.member.membership import lasting_imports

        by_hand, exposed = not parent_pipe, insecure_data_plane
        host = _check_member(coordinator, advertise, token_file, by_hand=by_hand, exposed=exposed)
        with lasting_imports(role) as kernels_s:
            if role == "server":
                from shardkeep.roles.server import run_server as life
            else:
                from shardkeep.roles.worker import run_worker as life
        if code is not None:
            search_last(code)
        found = endpoint_of(coordinator, token_file=token_file, tls=tls, launched=parent_pipe)
        folder = run_dir.absolute()
        return life(found, index=index, advertise=host, folder=folder, kernels_s=kernels_s, departure=departure)

    command.__name__, command.__doc__ = role, summary
    return command


server = member("server", "Run one embedding server of a job.")
worker = member("worker", "Run one worker of a job.")


def fork_server(control: Annotated[int, typer.Argument(help="Descriptor of a socket.")]) -> None:
    """Import the modules of all roles, and fork roles for a launcher."""
    import socket

    from shardkeep.launch.processes.fork_server import serve

    _quiet_torch()
    serve(socket.socket(fileno=control))


def _begin(role: str, index: int, parent_pipe: bool, form: LogFormat) -> None:
    """Prepares the process of a role: file descriptors and log."""
    from shardkeep.base.net.descriptors import keep_free, raise_limit

    raise_limit()
    keep_free()
    # A launcher makes objects of what libraries write to stderr. Its roles' own lines do not wait for it.
    stream = sys.stdout if parent_pipe and form is LogFormat.JSON else sys.stderr
    configure(role, index, stream=stream, form=form)
    if form is LogFormat.JSON:  # a script reads a coordinator's address on stdout
        print_json(role, index, errors=stream, stdout=parent_pipe or role != "coordinator")
    _quiet_torch()


def _begin_coordinator(parent_pipe: bool, form: LogFormat, *, sheltered: bool, restarted: bool) -> threading.Event:
    """Prepares the process of a coordinator. Returns what is set while it heeds signals."""
    heeds = threading.Event()
    if sheltered:
        for number in LEAVING:
            signal.signal(number, lambda *_: os._exit(START_AGAIN) if heeds.is_set() else None)
    elif not restarted:  # an engine starts it again if SIGTERM killed it
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # until it serves requests
    _begin("coordinator", 0, parent_pipe, form)
    if parent_pipe:
        from shardkeep.launch.processes.children import end_with_parent

        # It stops the job and ends last. Under `shardkeep node` another one continues the job instead.
        end_with_parent(patience_s=0.0, last_s=12.0, admit=heeds.set, stops=not sheltered)
    return heeds


def _quiet_torch() -> None:
    """Silences torch's warnings about lost peers, which shardkeep reports itself. Call it before importing torch."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _check_member(coordinator: str, advertise: str, token_file: Path | None, *, by_hand: bool, exposed: bool) -> str:
    """Checks the arguments of a server or worker before its imports, which take seconds; what it is to announce.

    `exposed`: `--insecure-data-plane` was given. Raises UserError."""
    from shardkeep.base.net.interfaces import check_advertised
    from shardkeep.member.access import check_coordinator

    announce = check_advertised("--advertise", advertise, accepted=exposed)
    if by_hand and (lacks := check_coordinator(coordinator, token_file=token_file)) is not None:
        say(lacks)
    return announce


def _begin_member(role: str, index: int, parent_pipe: bool, form: LogFormat, *, sheltered: bool) -> Departure:
    """Prepares the process of a server or worker. Returns its handler of SIGTERM and SIGINT."""
    departure = Departure(sheltered=sheltered)
    departure.watch()
    _begin(role, index, parent_pipe, form)
    if parent_pipe:
        from shardkeep.launch.processes.children import end_with_parent

        # It learns of the stop from the coordinator, or gets SIGTERM after 4 s. Under `shardkeep node` the job
        # continues, and a replacement on this machine waits until this process has left.
        end_with_parent(patience_s=0.0 if sheltered else 4.0, admit=departure.admit)
    return departure


def _begin_node(rank: int, form: LogFormat) -> None:
    as_json = form is LogFormat.JSON
    configure("node", rank, stream=sys.stdout if as_json else sys.stderr, form=form)
    if as_json:
        print_json("node", rank)


def _address(machine: Machine, advertise: str, *, alone: bool, exposed: bool) -> str:
    """This machine's address for the others, which the log shows. Raises UserError."""
    from shardkeep.base.net.interfaces import check_advertised
    from shardkeep.launch.machine import port_range

    address, by = (advertise, "--advertise") if advertise else machine.own_address(alone=alone)
    check_advertised("--advertise", address, accepted=exposed)
    _log.info(f"machine {machine.rank} of {machine.nodes}", address=address, by=by, ports=port_range())
    return address


def _given(config: Path, overrides: list[str] | None) -> tuple[Path, Given]:
    """The path of the config file, and the config with the overrides or why they cannot be read."""
    try:
        return load(config, overrides)
    except ConfigError as error:
        return config, error


def _run_node(given: Given, options: NodeOptions, form: LogFormat) -> int:
    from shardkeep.assembly.kernel_needs import compile_of_job
    from shardkeep.launch.node import run_node
    from shardkeep.launch.processes.children import end_with_parent
    from shardkeep.launch.processes.starter import starting

    @contextlib.contextmanager
    def compiled(config: JobConfig) -> Iterator[Starter]:
        if options.by_program:
            end_with_parent(patience_s=0.0, last_s=config.liveness.grace_s)
        with starting(config, _log.info, form) as starter:
            starter.load(compile_of_job(config, _log.info))
            yield starter

    return run_node(given, options, compiled)

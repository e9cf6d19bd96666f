"""The command line: one command per role and per question. Reads arguments, prints errors; does nothing itself.

Exit codes: 0 done, 1 the job failed or was stopped, 2 the user's input is wrong; 128 + N a server or worker left on
signal N.
Imports that take time stand inside the commands, so that `--help` is instant.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from shardkeep import __version__
from shardkeep.base.errors import ConfigError, JobError, JobStopped, ShardkeepError, UserError
from shardkeep.cli.output import OutputError, drop_output, guard_output
from shardkeep.roles.departure import Departure, Leaving

if TYPE_CHECKING:
    from shardkeep.config import JobConfig
    from shardkeep.run.folder import RunFolder

app = typer.Typer(
    help="Trains recommendation models whose embedding tables live in parameter servers.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def path(text: str | Path) -> Path:
    """A path, with `~` as a home folder: shells leave it in `--option=~/folder`."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise typer.BadParameter(f"{text}: {error}") from error


def _place(text: str) -> str:
    """An address, or a path."""
    return str(path(text)) if text.startswith("~") else text


Config = Annotated[
    Path, typer.Argument(parser=path, metavar="CONFIG", help="YAML file of the job; `demo` is the built-in one.")
]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="Override a setting; repeatable.")]
Run = Annotated[Path | None, typer.Argument(parser=path, help="Run folder [default: the newest in runs/].")]
RunDir = Annotated[Path | None, typer.Option(parser=path, help="New folder of the run [default: runs/NAME-DATE].")]
Coordinator = Annotated[
    str,
    typer.Option(
        parser=_place,
        metavar="HOST:PORT",
        help="Where the coordinator listens, or its run folder; waits 120 s for it.",
    ),
]
Index = Annotated[int, typer.Option(min=0, help="Number of this process among its role, from 0.")]
Advertise = Annotated[str, typer.Option(metavar="HOST", help="This machine's address, as the others reach it.")]
Keeps = Annotated[
    Path,
    typer.Option(
        "--run-dir",
        parser=path,
        help="Folder of what this process keeps: recovery/ (a server's journal or a worker's tower states, for its "
        "replacement, which looks there first) and profile/.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        parser=path,
        metavar="FILE",
        help="The job's token, for your eyes only [default: yours for the run folder, made by its coordinator].",
    ),
]
TlsFolder = Annotated[
    Path | None,
    typer.Option(
        "--tls", parser=path, metavar="DIR", help="Mutual TLS: ca.pem, cert.pem, key.pem, as of `shardkeep certs`."
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure-data-plane", help="Accept an address that other machines reach: docs/security.md.")
]
ParentPipe = Annotated[bool, typer.Option("--parent-pipe", hidden=True)]  # end when stdin ends
Code = Annotated[Path | None, typer.Option("--code", parser=path, hidden=True)]  # where the user's own modules are
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")]


ORPHAN_STOP_S = 15.0
"""Seconds a job gets to stop when the sweep that started it is gone."""


@app.command()
def train(
    config: Annotated[
        Path | None,
        typer.Argument(parser=path, metavar="[CONFIG]", help="YAML file of the job; `demo` is the built-in one."),
    ] = None,
    set_: Set = None,
    run_dir: RunDir = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            parser=path, metavar="RUN", help="Go on with this run from its newest checkpoint, without CONFIG."
        ),
    ] = None,
    code: Code = None,
    parent_pipe: ParentPipe = False,
    debug: Debug = False,
) -> None:
    """Run a whole job on this machine, or go on with one."""

    def run() -> int:
        from shardkeep.run.screen import console

        if parent_pipe:  # a sweep's: stops in order when the sweep is gone
            from shardkeep.launch.children import end_with_parent

            end_with_parent(patience_s=0.0, last_s=ORPHAN_STOP_S)
        if (config is None) == (resume is None):
            raise UserError("shardkeep train takes a CONFIG or --resume RUN, one of the two")
        screen = console()
        if config is None:
            from shardkeep.launch.job import resume as go_on

            if run_dir is not None:
                raise UserError(f"--run-dir {run_dir}: has no effect with --resume, which goes on in RUN")
            go_on(resume or Path(), overrides=set_ or [], console=screen)
            return 0
        from shardkeep.launch.job import run_job
        from shardkeep.run.folder import default_run_dir

        path, job = _load(config, set_)
        folder = run_dir or default_run_dir(job.name)
        run_job(job, run_dir=folder, console=screen, code_folder=code or path.resolve().parent)
        return 0

    _end(run, debug)


@app.command()
def coordinator(
    config: Config,
    set_: Set = None,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Port 0 = any free one.")] = "127.0.0.1:0",
    run_dir: RunDir = None,
    start_step: Annotated[
        int, typer.Option(min=0, help="Go on from the checkpoint of this step; 0 = from the start.")
    ] = 0,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Go on in --run-dir for a coordinator that died; at the same --listen.")
    ] = False,
    token_file: TokenFile = None,
    tls: TlsFolder = None,
    insecure_data_plane: Insecure = False,
    parent_pipe: ParentPipe = False,
    debug: Debug = False,
) -> None:
    """Run a job's coordinator; prints one line of JSON with its address."""

    def run() -> int:
        from shardkeep.ps.control.grpc.addresses import check_exposed, split_address
        from shardkeep.ps.control.grpc.endpoint import read_token
        from shardkeep.ps.control.grpc.tls import read_tls
        from shardkeep.run.folder import RunFolder, check_ours, default_run_dir
        from shardkeep.run.leftovers import clean, note_run
        from shardkeep.run.next_steps import check_start, origin_line, resume_line, take_over_arguments
        from shardkeep.trust.tokens import keep_token, put_token, token_of

        _, job = _load(config, set_)
        check_exposed("--listen", split_address(listen, lowest_port=0)[0], accepted=insecure_data_plane)
        token = None if token_file is None else read_token(token_file)
        files = None if tls is None else read_tls(tls)
        if job.affinity.wanted and not parent_pipe:
            raise ConfigError(
                "affinity: only `shardkeep train` pins processes; allowed here: none (roles by hand: taskset)"
            )
        path = run_dir or default_run_dir(job.name)
        check_ours(path, what="--run-dir")
        if parent_pipe:  # a launcher has made it already
            folder = RunFolder(path)
        elif take_over:
            if run_dir is None or not (run_dir / "coordinator.json").is_file() or (run_dir / "summary.json").is_file():
                raise UserError(f"--take-over: no job was running in --run-dir {run_dir or '(left out)'}")
            folder = RunFolder(path)
        elif start_step:
            samples = check_start(job, path, start_step)
            if (another := origin_line(job, path)) is not None:
                _say(another)
            folder = RunFolder.reopen(path, job, step=start_step, samples=samples)
        else:
            folder = RunFolder.create(path, job)
        standing = _standing(folder, by_hand=not parent_pipe) if take_over else None
        stop, terminate = _stop_events()
        if token is not None:
            with contextlib.suppress(UserError):  # who has the file needs no other
                put_token(folder.path, token)
        elif take_over and not parent_pipe:
            token = token_of(folder.path)  # with another one its members would be strangers
        else:
            token = keep_token(folder.path)
        note_run(folder.path)
        clean(folder.token_path.parent)

        def ready(address: str) -> None:
            again = take_over_arguments(
                folder.path, address, token_file=token_file, tls=tls, insecure=insecure_data_plane
            )
            _ready(address, folder, token_file, [] if parent_pipe else again)

        from shardkeep.ps.control.grpc.server import serve_job  # loads no torch: members can register at once
        from shardkeep.run.storage import losses_of, shared_folder

        try:
            shared = None if parent_pipe else shared_folder(job, folder.path, start_step=start_step, standing=standing)
            serve_job(
                config_yaml=job.to_yaml(),
                num_servers=job.servers,
                num_workers=job.workers,
                liveness=job.liveness,
                listen=listen,
                token=token,
                tls=files,
                sink=folder,
                ready=ready,
                stop=stop,
                terminate=terminate,
                start_step=start_step,
                standing=standing,
                losses=losses_of(job),
                shared=shared,
                run_dir=str(folder.path),
            )
        except ShardkeepError:
            if not parent_pipe:
                _say(f"run folder: {folder.path}")
                _say(resume_line(folder.path))
            raise
        finally:
            # A launcher does so itself, once no role is left that might come late.
            if not parent_pipe and (folder.summary() is not None or not folder.has_standing):
                folder.forget_token()
        return 0

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until it serves
    _begin("coordinator", 0, parent_pipe)
    _end(run, debug)


@app.command()
def server(
    coordinator: Coordinator,
    index: Index,
    advertise: Advertise = "127.0.0.1",
    run_dir: Keeps = Path(),
    token_file: TokenFile = None,
    tls: TlsFolder = None,
    insecure_data_plane: Insecure = False,
    parent_pipe: ParentPipe = False,
    debug: Debug = False,
) -> None:
    """Run one embedding server of a job."""

    def run() -> int:
        from shardkeep.ps.control.grpc.addresses import check_exposed
        from shardkeep.roles.access import check_coordinator, endpoint_of
        from shardkeep.roles.membership import lasting_imports

        check_exposed("--advertise", advertise, accepted=insecure_data_plane)
        if not parent_pipe and (lacks := check_coordinator(coordinator, token_file=token_file)) is not None:
            _say(lacks)
        with lasting_imports("server") as kernels_s:
            from shardkeep.roles.server import run_server

        found = endpoint_of(coordinator, token_file=token_file, tls=tls, launched=parent_pipe)
        folder = run_dir.absolute()
        return run_server(
            found, index=index, advertise=advertise, folder=folder, kernels_s=kernels_s, departure=departure
        )

    departure = _begin_member("server", index, parent_pipe)
    _end(run, debug)


@app.command()
def worker(
    coordinator: Coordinator,
    index: Index,
    advertise: Advertise = "127.0.0.1",
    run_dir: Keeps = Path(),
    token_file: TokenFile = None,
    tls: TlsFolder = None,
    insecure_data_plane: Insecure = False,
    code: Code = None,
    parent_pipe: ParentPipe = False,
    debug: Debug = False,
) -> None:
    """Run one worker of a job."""

    def run() -> int:
        from shardkeep.base.modules import search_last
        from shardkeep.ps.control.grpc.addresses import check_exposed
        from shardkeep.roles.access import check_coordinator, endpoint_of
        from shardkeep.roles.membership import lasting_imports

        check_exposed("--advertise", advertise, accepted=insecure_data_plane)
        if not parent_pipe and (lacks := check_coordinator(coordinator, token_file=token_file)) is not None:
            _say(lacks)
        with lasting_imports("worker") as kernels_s:
            from shardkeep.roles.worker import run_worker
        if code is not None:
            search_last(code)

        found = endpoint_of(coordinator, token_file=token_file, tls=tls, launched=parent_pipe)
        folder = run_dir.absolute()
        return run_worker(
            found, index=index, advertise=advertise, folder=folder, kernels_s=kernels_s, departure=departure
        )

    departure = _begin_member("worker", index, parent_pipe)
    _end(run, debug)


@app.command()
def status(
    run: Run = None,
    coordinator: Annotated[
        str | None, typer.Option(parser=_place, metavar="HOST:PORT", help="Ask this coordinator.")
    ] = None,
    token_file: TokenFile = None,
    tls: TlsFolder = None,
    debug: Debug = False,
) -> None:
    """Show how far a job is."""

    def show() -> int:
        from shardkeep.cli.status import show_job, show_run
        from shardkeep.ps.control.grpc.addresses import is_address
        from shardkeep.ps.control.grpc.tls import read_tls
        from shardkeep.roles.access import endpoint_of
        from shardkeep.run.screen import console

        screen = console()
        if coordinator is not None and is_address(coordinator):
            return show_job(endpoint_of(coordinator, token_file=token_file, tls=tls), screen)
        path = run if coordinator is None else Path(coordinator)
        return show_run(path, screen, token_file=token_file, tls=None if tls is None else read_tls(tls))

    _end(show, debug)


@app.command()
def certs(
    folder: Annotated[
        Path, typer.Argument(parser=path, metavar="DIR", help="Where the authority and the hosts' folders go.")
    ],
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[,NAME]...", help="Names of one host; repeatable [default: localhost]."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long the certificates are valid.")] = 365,
    debug: Debug = False,
) -> None:
    """Make a certificate authority, and for each host a folder for --tls; again to add hosts."""

    def run() -> int:
        from shardkeep.trust.certificates import LOCAL, make_certs

        for made in make_certs(folder, host or [LOCAL], days=days):
            print(f"--tls {made}")
        return 0

    _end(run, debug)


@app.command()
def scale(
    run: Run = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Worker processes from now on.")] = None,
    servers: Annotated[int | None, typer.Option(min=1, help="Server processes from now on.")] = None,
    debug: Debug = False,
) -> None:
    """Go on with other numbers of workers or servers while a job of `shardkeep train` runs."""

    def ask() -> int:
        from shardkeep.launch.scale import ask
        from shardkeep.run.folder import latest_run

        path = run or latest_run()
        if path is None:
            raise UserError("no run folder in runs/; name one")
        print(ask(path, workers=workers, servers=servers), flush=True)
        return 0

    _end(ask, debug)


@app.command()
def estimate(
    config: Config,
    set_: Set = None,
    gbit_per_s: Annotated[float, typer.Option(help="Bandwidth of each process's link, each way.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Tell a job's memory, traffic and shortest step without running it."""

    def run() -> int:
        from shardkeep.base.modules import search_last
        from shardkeep.estimate.view import show_estimate, waiting
        from shardkeep.roles.kernel_needs import compile_of_job
        from shardkeep.run.screen import console

        path, job = _load(config, set_)
        if job.own_modules:
            search_last(path.resolve().parent)
        with waiting() as screen:
            compile_of_job(job, lambda text: screen.phase("kernels", text))
            from shardkeep.estimate.estimate import estimate as estimated  # here: importing it loads kernels

            found = estimated(job, gbit_per_s=gbit_per_s, progress=partial(screen.working, "data"))
        if as_json:
            print(json.dumps(found, indent=2))
        else:
            show_estimate(found, console())
        return 0

    _end(run, debug)


@app.command()
def bench(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Which; left out = all.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Only tell their names and questions.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Does it run at all: one round of one second.")] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Alternating rounds.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="Of each contestant and round.")] = None,
    device: Annotated[str | None, typer.Option(metavar="cpu|cuda", help="Where towers train.")] = None,
    out: Annotated[
        Path | None, typer.Option(parser=path, help="Folder of the JSON files [default: runs/bench-DATE].")
    ] = None,
    debug: Debug = False,
) -> None:
    """Run the benchmarks; without a name all of them."""

    def run() -> int:
        from shardkeep.cli.bench import bench_all, chosen

        benchmarks = chosen(names or ())
        if list_:
            width = max(len(benchmark.name) for benchmark in benchmarks)
            for benchmark in benchmarks:
                print(f"{benchmark.name:<{width}}  {benchmark.question}")
            return 0
        options = {"--rounds": rounds, "--seconds": seconds, "--device": device}
        given = {name: str(value) for name, value in options.items() if value is not None}
        return bench_all(benchmarks, options=given, smoke=smoke, out=out)

    _end(run, debug)


@app.command()
def sweep(
    plan: Annotated[
        Path, typer.Argument(parser=path, metavar="SWEEP", help="YAML file: base, grid or recipes, seeds.")
    ],
    out: Annotated[
        Path, typer.Option(parser=path, metavar="DIR", help="Folder of runs and results; again = go on there.")
    ],
    debug: Debug = False,
) -> None:
    """Measure bytes against AUC: run a job with several compressions and seeds, and compare them."""

    def run() -> int:
        from shardkeep.run.screen import console
        from shardkeep.sweep.plan import load_sweep
        from shardkeep.sweep.sweep import sweep as sweep_all

        sweep_all(load_sweep(plan), out=out, console=console())
        return 0

    _end(run, debug)


@app.command()
def cache(
    where: Annotated[
        Path | None,
        typer.Argument(
            parser=path,
            metavar="[FOLDER|CONFIG]",
            help="A cache, a folder of data or a config [default: here, and yours].",
        ),
    ] = None,
    clean: Annotated[bool, typer.Option("--clean", help="Remove what no job will read.")] = False,
    unused: Annotated[
        float | None, typer.Option(metavar="DAYS", min=0.0, help="With --clean: also what no job has read for so long.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Show converted data, where it lies and how large it is, and clean it."""

    def run() -> int:
        from shardkeep.cli.cache import cache_lines

        for line in cache_lines(where, clean=clean, unused_days=unused):
            print(line, flush=True)
        return 0

    _end(run, debug)


@app.command("fork-server", hidden=True)
def fork_server(control: Annotated[int, typer.Argument(help="Descriptor of a socket.")]) -> None:
    """Import what roles need, and fork them for a launcher."""
    import socket

    from shardkeep.launch.fork_server import serve

    _quiet_torch()
    serve(socket.socket(fileno=control))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> NoReturn:
    """The `shardkeep` command."""
    guard_output()
    try:
        app(prog_name="shardkeep")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except OutputError as error:  # of the help
        code = _told(error)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OutputError as error:
        drop_output()
        code = code or _told(error)
    if "torch" in sys.modules:  # its teardown takes a second of CPU, and all that matters is closed by now
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _load(path: Path, overrides: list[str] | None) -> tuple[Path, JobConfig]:
    """The config and the file it came from."""
    from shardkeep.config import load_config

    built_in = Path(__file__).parents[1] / "examples" / "demo.yaml"
    found = built_in if str(path) == "demo" and not path.exists() else path
    return found, load_config(found, overrides or [])


def _begin(role: str, index: int, parent_pipe: bool) -> None:
    """What every role does first: its log, its end with the launcher."""
    from shardkeep.base.log import configure
    from shardkeep.base.machine.descriptors import keep_free, raise_limit

    raise_limit()
    keep_free()
    configure(role, index)
    _quiet_torch()
    if parent_pipe:
        from shardkeep.launch.children import end_with_parent

        # The coordinator stops the job in order and outlives the others, who see it or, if not, follow.
        if role == "coordinator":
            end_with_parent(patience_s=0.0, last_s=12.0)
        else:
            end_with_parent(patience_s=4.0)


def _quiet_torch() -> None:
    """To be called before torch is imported. A peer that leaves is no warning: losses are told by us."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _begin_member(role: str, index: int, parent_pipe: bool) -> Departure:
    """The same of a server or worker, and how it leaves on SIGTERM and SIGINT."""
    departure = Departure()
    departure.watch()
    _begin(role, index, parent_pipe)
    return departure


def _stop_events() -> tuple[threading.Event, threading.Event]:
    """Set by the first SIGINT and by the first SIGTERM; the second of one kind interrupts."""
    events = {signal.SIGINT: threading.Event(), signal.SIGTERM: threading.Event()}

    def caught(number: int, _frame: object) -> None:
        signal.signal(number, signal.default_int_handler)
        events[signal.Signals(number)].set()

    for number in events:
        signal.signal(number, caught)
    return events[signal.SIGINT], events[signal.SIGTERM]


def _standing(folder: RunFolder, *, by_hand: bool) -> dict[str, Any]:
    """What a coordinator takes over with. Raises UserError, which says what to do."""
    try:
        return folder.take_over()
    except UserError as error:
        if not by_hand:  # its launcher says what to do
            raise
        raise UserError(
            f"--take-over: {error}; end the job's roles, and start all of them again, the coordinator with "
            "--start-step N, N being the step of the newest checkpoint"
        ) from None


def _ready(address: str, folder: RunFolder, token_file: Path | None, command: list[str]) -> None:
    folder.coordinator(address, pid=os.getpid(), command=command)
    told = {"coordinator": address, "run_dir": str(folder.path), "token_file": str(token_file or folder.token_path)}
    print(json.dumps(told), flush=True)


def _end(run: Callable[[], int], debug: bool) -> NoReturn:
    """Runs a command's body and exits with its code; an error of ours is one line on stderr."""
    try:
        code = run()
    except ShardkeepError as error:
        if debug:
            traceback.print_exc()
        code = _told(error)
    except OSError as error:  # of a file or folder that is gone, full or forbidden
        if debug:
            traceback.print_exc()
        what = f"{error.filename}: " if error.filename is not None else ""
        code = _told(JobError(f"{what}{error.strerror or error}"))
    except Leaving as leaving:
        _say(str(leaving))
        code = leaving.code
    except KeyboardInterrupt:
        _say("interrupted")
        code = 1
    raise typer.Exit(code)


def _told(error: ShardkeepError) -> int:
    """The exit code of an error, which is told on stderr."""
    head = "" if isinstance(error, JobStopped) else "error: "
    for line in str(error).splitlines():  # a config may have several problems
        _say(f"{head}{line}")
    return error.exit_code


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a full device: the exit code still tells
        print(text, file=sys.stderr, flush=True)

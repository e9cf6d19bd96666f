"""The main of a coordinator: prepares the run folder, the token and the checkpoints, then serves the job.

Loads no torch: members register while they still import it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardkeep.base.errors import ConfigError, JobStopped, ShardkeepError, Superseded, UserError
from shardkeep.base.exit_codes import code_of_leaving
from shardkeep.base.logs.log import EventLog
from shardkeep.base.net.addresses import check_exposed, check_listen, join_address, split_address
from shardkeep.config import JobConfig
from shardkeep.member.listeners import check_listeners
from shardkeep.member.metrics import JobMetrics
from shardkeep.page.of_job import NICE, page_text, serve_page
from shardkeep.ps.control.grpc.server import Entrance, Stopping, serve_job
from shardkeep.ps.control.job import JobDeadlines, JobSpec
from shardkeep.ps.control.records import TERMINATED, Shared
from shardkeep.run.folder import RunFolder
from shardkeep.run.leftovers import clean, note_run
from shardkeep.run.new_folder import default_run_dir
from shardkeep.run.next_steps import check_start, continue_arguments, origin_line, resume_line
from shardkeep.run.origin.continuing import Given, Start, Way, led, start_in
from shardkeep.run.processes import launcher_there
from shardkeep.run.reader import RunReader, check_ours
from shardkeep.run.storage import losses_of, shared_folder
from shardkeep.trust.endpoint import read_token
from shardkeep.trust.tls import read_tls
from shardkeep.trust.tokens import keep_token, put_token, token_of
from shardkeep.trust.view import view_token_path
from shardkeep.web.server import WebServer

_log = EventLog("roles")


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """The options of `shardkeep coordinator`."""

    listen: str = "127.0.0.1:0"
    run_dir: Path | None = None
    start_step: int = 0
    """The step of the checkpoint to resume from; 0 = from the start."""
    take_over: bool = False
    """Replace a coordinator that died in `run_dir`."""
    token_file: Path | None = None
    tls: Path | None = None
    insecure_data_plane: bool = False
    continues: bool = False
    """Begin, take over or resume, by what is in `run_dir`."""
    number: int = 0
    """The number that this process has claimed in `run_dir`; 0 = none yet."""
    folder_made: bool = False
    """A launcher made the run folder, and deletes its token."""
    pinned: bool = False
    """A launcher pins the processes of the job."""
    one_machine: bool = False
    """All processes of the job run on this machine, so they all see the run folder."""
    quiet: bool = False
    """A launcher tells people what happens, and starts what is to take over."""
    again: Sequence[str] = ()
    """What a person types to continue, if a launcher starts it: the launcher's own command."""
    heeds: threading.Event | None = None
    """Set while it heeds signals, and then one; None = it always does."""


def run_coordinator(given: Given, options: CoordinatorOptions) -> int:
    """Serves a job until it ends; returns 0 if it was completed. Prints one line of JSON with the address.

    `run/origin/continuing.py` says when the given config leads, and when that of the run folder does.

    Raises UserError, ConfigError, or the error that ended the job; Superseded with exit code 0. With `continues`,
    JobStopped has exit code 0 if a person stopped the job, and 143 if SIGTERM did."""
    host, port = split_address(options.listen, lowest_port=0)
    check_exposed("--listen", host, accepted=options.insecure_data_plane)
    check_listen(host, port)
    token = None if options.token_file is None else read_token(options.token_file)
    tls = None if options.tls is None else read_tls(options.tls)
    if isinstance(given, JobConfig) and given.launch.affinity.wanted and not options.pinned:
        raise ConfigError(
            "launch.affinity: only `shardkeep train` pins processes; allowed here: none (roles by hand: taskset)"
        )
    start, options = _start(given, options)
    if start.remark:
        _say(start.remark)
    if start.way == "completed":
        _say(f"{options.run_dir}: the job is completed")
        return 0
    job = start.config
    if not (options.folder_made or options.take_over or options.start_step):
        check_listeners(job)  # before there is a run folder
    folder = _run_folder(job, options)
    folder.claim()
    standing = _standing(folder) if options.take_over else None
    stopping = _stop_on_signals(job.liveness.grace_s, folder.check_leads, options)
    token = _job_token(folder, token, options)
    note_run(folder.path)
    clean(folder.token_path.parent)
    with _closing_lines(folder, options), contextlib.closing(WebServer(nice=NICE)) as web:
        page = serve_page(web, job.web, folder.path, token, tls=options.tls)
        start_step, shared = options.start_step, None
        if not options.one_machine:
            shared = shared_folder(job, folder.path, start_step=start_step, standing=standing)
        metrics = None
        if job.web.has_metrics:
            metrics = JobMetrics(job, folder, folder.path, token, start_step=start_step, tls=tls)
        metrics_url = None if metrics is None else metrics.serve(web)
        serve_job(
            _spec(job, start_step, shared, folder, metrics_url),
            Entrance(options.listen, token, tls),
            sink=folder if metrics is None else metrics.sink,
            ready=lambda address: _ready(address, folder, options, page, metrics_url),
            stopping=stopping,
            before=standing,
            watch=None if metrics is None else metrics.sink.watch,
        )
    return 0


def _spec(job: JobConfig, start_step: int, shared: Shared | None, folder: RunFolder, metrics: str | None) -> JobSpec:
    liveness, recovery = job.liveness, job.recovery
    return JobSpec(
        config_yaml=job.to_yaml(),
        num_servers=job.servers,
        num_workers=job.workers,
        deadlines=JobDeadlines(liveness.lease_s, form_s=liveness.form_timeout_s, replace_s=recovery.replace_timeout_s),
        restarts=recovery.restarts,
        start_step=start_step,
        losses=losses_of(job),
        shared=shared,
        run_dir=str(folder.path),
        telemetry_s=job.telemetry_s,
        metrics=metrics,
        settings=job.agreed(),
    )


def _start(given: Given, options: CoordinatorOptions) -> tuple[Start, CoordinatorOptions]:
    """How the job starts in the run folder, once any other coordinator there ends; the options for it. Raises as
    `start_in`."""
    run = options.run_dir
    if run is not None:
        check_ours(run, what="--run-dir")
    if not options.continues:
        way: Way = "take over" if options.take_over else "resume" if options.start_step else "begin"
        return led("begin" if run is None else way, options.start_step, given, RunReader(run or "")), options
    if options.take_over or options.start_step:
        raise UserError("--continue: excludes --take-over and --start-step")
    if run is None or launcher_there(run):
        raise UserError(f"--continue: {'needs --run-dir' if run is None else f'`shardkeep train` runs a job in {run}'}")
    if (start := start_in(given, RunReader(run))).way == "completed":
        return start, options  # as where it raises, the folder stays as it is
    folder = RunFolder(run)
    number = folder.claim()
    if (start := start_in(given, folder)).way == "completed":  # by a coordinator that ended meanwhile
        folder.amend({})
    if start.way == "begin" and start.config.row_files:
        folder.config_path.unlink(missing_ok=True)  # its rows were never whole
    return start, replace(options, take_over=start.way == "take over", start_step=start.step, number=number)


def _run_folder(job: JobConfig, options: CoordinatorOptions) -> RunFolder:
    """Makes the run folder, or opens the one of the launcher, of the coordinator that died, or of the checkpoint."""
    path, number = options.run_dir or default_run_dir(job.name), options.number
    before = RunReader(path)
    ran = (before.number() or before.coordinator_pids()) and before.last_summary() is None
    if options.take_over and not (ran or options.folder_made):
        raise UserError(f"--take-over: no job was running in --run-dir {options.run_dir or '(left out)'}")
    if options.folder_made or options.take_over:
        return RunFolder(path, telemetry_bytes=job.telemetry.max_bytes, number=number)
    if options.start_step or (number and before.config_path.is_file()):
        samples = check_start(job, path, options.start_step)
        if (another := origin_line(job, path)) is not None:
            _say(another)
        return RunFolder.reopen(path, job, step=options.start_step, samples=samples, number=number)
    return _new_folder(job, path, number)


def _new_folder(job: JobConfig, path: Path, number: int) -> RunFolder:
    """A new run folder, with the rows of files with which tables begin."""
    if not job.row_files:
        return RunFolder.create(path, job, number=number)
    from shardkeep.run.origin.pretrained import pretrained_of
    from shardkeep.run.origin.warm_start import refuse_start_of_another, write_start

    files = pretrained_of(job)
    refuse_start_of_another(job, path)
    folder = RunFolder.create(path, job, number=number)
    try:
        write_start(None, job, folder, files)
    except BaseException:  # without its rows it is no run; what the user had there stays
        folder.config_path.unlink(missing_ok=True)
        raise
    return folder


def _standing(folder: RunFolder) -> dict[str, Any]:
    """Returns the persisted state of the coordinator that died. Raises UserError, which says what to do."""
    try:
        return folder.take_over()
    except UserError as error:
        raise UserError(f"--take-over: {error}; --continue in its place resumes from the newest checkpoint") from None


def _job_token(folder: RunFolder, given: str | None, options: CoordinatorOptions) -> str:
    """Returns the given token, that of the coordinator that died, or a new one."""
    if given is not None:
        with contextlib.suppress(UserError):  # members that have the token's file need no copy of it
            put_token(folder.path, given)
        return given
    if options.take_over and not options.folder_made:
        return token_of(folder.path)  # the members of the job know no other token
    return keep_token(folder.path)


@contextlib.contextmanager
def _closing_lines(folder: RunFolder, options: CoordinatorOptions) -> Iterator[None]:
    """Says after an error how to resume, and deletes the token once nobody needs it, unless a launcher does so."""
    try:
        yield
    except ShardkeepError as error:
        if folder.leads and not options.quiet:
            _say(f"run folder: {folder.path}")
            _say(resume_line(folder.path))
        if isinstance(error, Superseded):
            error.exit_code = 0  # the job continues
        if options.continues and isinstance(error, JobStopped):
            by = (folder.summary() or {"stopped_by": TERMINATED}).get("stopped_by")
            error.exit_code = code_of_leaving(signal.SIGTERM) if by == TERMINATED else 0
        raise
    finally:
        over = folder.summary() is not None or not folder.has_standing
        if over and folder.leads and not options.folder_made:
            folder.forget_token()


def _ready(address: str, folder: RunFolder, options: CoordinatorOptions, page: str | None, metrics: str | None) -> None:
    """Writes the address to the run folder, with the command that continues after this process. Prints it unless a
    launcher reads the folder."""
    listen = join_address(split_address(options.listen, lowest_port=0)[0], split_address(address)[1])
    trust = options.token_file, options.tls, options.insecure_data_plane
    command = options.again if options.quiet else continue_arguments(folder.path, listen, *trust)
    folder.coordinator(address, pid=os.getpid(), command=command)
    if options.quiet:
        _log.info("listening", address=address)
        return
    if page is not None:
        _say(f"page: {page_text(folder.path, page, sys.stderr)}")
    token_file = str(options.token_file or folder.token_path)
    line = {"coordinator": address, "run_dir": str(folder.path), "token_file": token_file}
    if metrics is not None:
        line |= {"metrics": metrics, "view_token_file": str(view_token_path(folder.path))}
    print(json.dumps(line), flush=True)


def _stop_on_signals(grace_s: float, check: Callable[[], None], options: CoordinatorOptions) -> Stopping:
    """Lets the first SIGINT and the first SIGTERM stop the job; a second signal of one kind ends the process. With
    `heeds`, a signal has no effect before it is set, and no second one has."""
    stopping, heeds = Stopping(grace_s=grace_s, check=check, continued=options.continues), options.heeds
    events = {signal.SIGINT: stopping.stop, signal.SIGTERM: stopping.terminate}

    def caught(number: int, _frame: object) -> None:
        if heeds is not None and not heeds.is_set():
            return
        again = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, again if heeds is None else signal.SIG_IGN)
        events[signal.Signals(number)].set()

    for number in events:
        signal.signal(number, caught)
    return stopping


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # stderr is full: the exit code still tells
        print(text, file=sys.stderr, flush=True)

"""The main of a coordinator: prepares the run folder, the token and the checkpoints, then serves the job.

Loads no torch: members register while they still import it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkeep.base.errors import ConfigError, ShardkeepError, UserError
from shardkeep.base.log import EventLog
from shardkeep.config import JobConfig
from shardkeep.page.of_job import serving_page
from shardkeep.ps.control.grpc.addresses import check_exposed, split_address
from shardkeep.ps.control.grpc.endpoint import read_token
from shardkeep.ps.control.grpc.server import Stopping, serve_job
from shardkeep.ps.control.grpc.tls import read_tls
from shardkeep.ps.control.job import JobSpec
from shardkeep.ps.control.records import Shared
from shardkeep.roles.metrics import JobMetrics
from shardkeep.run.folder import RunFolder
from shardkeep.run.leftovers import clean, note_run
from shardkeep.run.new_folder import default_run_dir
from shardkeep.run.next_steps import check_start, origin_line, resume_line, take_over_arguments
from shardkeep.run.reader import check_ours
from shardkeep.run.storage import losses_of, shared_folder
from shardkeep.trust.tokens import keep_token, put_token, token_of
from shardkeep.trust.view import view_token_path

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
    launched: bool = False
    """A launcher started this process and made the run folder."""


def run_coordinator(job: JobConfig, options: CoordinatorOptions) -> int:
    """Serves a job until it ends; returns 0 if it was completed. Prints one line of JSON with the address.

    Raises UserError, ConfigError, or the error that ended the job."""
    check_exposed("--listen", split_address(options.listen, lowest_port=0)[0], accepted=options.insecure_data_plane)
    token = None if options.token_file is None else read_token(options.token_file)
    tls = None if options.tls is None else read_tls(options.tls)
    if job.affinity.wanted and not options.launched:
        raise ConfigError(
            "affinity: only `shardkeep train` pins processes; allowed here: none (roles by hand: taskset)"
        )
    folder = _run_folder(job, options)
    standing = _standing(folder, by_hand=not options.launched) if options.take_over else None
    stopping = _stop_on_signals(job.liveness.grace_s)
    token = _job_token(folder, token, options)
    note_run(folder.path)
    clean(folder.token_path.parent)
    with _closing_lines(folder, options), serving_page(job.page, folder.path, token, tls=options.tls) as page:
        by_hand = not options.launched
        start_step = options.start_step
        shared = shared_folder(job, folder.path, start_step=start_step, standing=standing) if by_hand else None
        metrics = None
        if job.metrics.on:
            metrics = JobMetrics(job, folder, folder.path, token, start_step=start_step, tls=tls)
        with contextlib.nullcontext() if metrics is None else metrics.served() as metrics_url:
            serve_job(
                _spec(job, start_step, shared, folder, metrics_url),
                listen=options.listen,
                token=token,
                tls=tls,
                sink=folder if metrics is None else metrics.sink,
                ready=lambda address: _ready(address, folder, options, page, metrics_url),
                stopping=stopping,
                before=standing,
                watch=None if metrics is None else metrics.sink.watch,
            )
    return 0


def _spec(job: JobConfig, start_step: int, shared: Shared | None, folder: RunFolder, metrics: str | None) -> JobSpec:
    liveness = job.liveness
    return JobSpec(
        config_yaml=job.to_yaml(),
        num_servers=job.servers,
        num_workers=job.workers,
        lease_s=liveness.lease_s,
        form_timeout_s=liveness.form_timeout_s,
        restarts=liveness.restarts,
        start_step=start_step,
        losses=losses_of(job),
        shared=shared,
        run_dir=str(folder.path),
        telemetry_s=job.telemetry_s,
        metrics=metrics,
    )


def _run_folder(job: JobConfig, options: CoordinatorOptions) -> RunFolder:
    """Makes the run folder, or opens the one of the launcher, of the coordinator that died, or of the checkpoint."""
    path = options.run_dir or default_run_dir(job.name)
    check_ours(path, what="--run-dir")
    if options.launched:
        return RunFolder(path, telemetry_bytes=job.telemetry.max_bytes)
    if options.take_over:
        given = options.run_dir
        if given is None or not (given / "coordinator.json").is_file() or (given / "summary.json").is_file():
            raise UserError(f"--take-over: no job was running in --run-dir {given or '(left out)'}")
        return RunFolder(path, telemetry_bytes=job.telemetry.max_bytes)
    if options.start_step:
        samples = check_start(job, path, options.start_step)
        if (another := origin_line(job, path)) is not None:
            _say(another)
        return RunFolder.reopen(path, job, step=options.start_step, samples=samples)
    return _new_folder(job, path)


def _new_folder(job: JobConfig, path: Path) -> RunFolder:
    """A new run folder, with the rows of files with which tables begin."""
    if not job.row_files:
        return RunFolder.create(path, job)
    from shardkeep.run.pretrained import pretrained_of
    from shardkeep.run.warm_start import refuse_start_of_another, write_start

    files = pretrained_of(job)
    refuse_start_of_another(job, path)
    folder = RunFolder.create(path, job)
    try:
        write_start(None, job, folder.path, files)
    except BaseException:  # without its rows it is no run
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    for each in files:
        folder.event({"text": f"began with {each.text()}"})
    return folder


def _standing(folder: RunFolder, *, by_hand: bool) -> dict[str, Any]:
    """Returns the persisted state of the coordinator that died. Raises UserError, which says what to do."""
    try:
        return folder.take_over()
    except UserError as error:
        if not by_hand:  # its launcher says what to do
            raise
        raise UserError(
            f"--take-over: {error}; end the job's roles, and start all of them again, the coordinator with "
            "--start-step N, N being the step of the newest checkpoint"
        ) from None


def _job_token(folder: RunFolder, given: str | None, options: CoordinatorOptions) -> str:
    """Returns the given token, that of the coordinator that died, or a new one."""
    if given is not None:
        with contextlib.suppress(UserError):  # members that have the token's file need no copy of it
            put_token(folder.path, given)
        return given
    if options.take_over and not options.launched:
        return token_of(folder.path)  # the members of the job know no other token
    return keep_token(folder.path)


@contextlib.contextmanager
def _closing_lines(folder: RunFolder, options: CoordinatorOptions) -> Iterator[None]:
    """Says after an error how to resume, and deletes the token once nobody needs it. A launcher does both itself."""
    if options.launched:
        yield
        return
    try:
        yield
    except ShardkeepError:
        _say(f"run folder: {folder.path}")
        _say(resume_line(folder.path))
        raise
    finally:
        if folder.summary() is not None or not folder.has_standing:
            folder.forget_token()


def _ready(address: str, folder: RunFolder, options: CoordinatorOptions, page: str | None, metrics: str | None) -> None:
    """Writes the address to the run folder, with the command that takes over from this process. Prints it unless a
    launcher reads the folder.

    The page's address has a token: it is printed for a person, never to a log of the run folder."""
    command = take_over_arguments(
        folder.path,
        address,
        token_file=options.token_file,
        tls=options.tls,
        insecure=options.insecure_data_plane,
    )
    folder.coordinator(address, pid=os.getpid(), command=[] if options.launched else command)
    if options.launched:
        _log.info("listening", address=address)
        return
    if page is not None:
        _say(f"page: {page}")
    token_file = str(options.token_file or folder.token_path)
    line = {"coordinator": address, "run_dir": str(folder.path), "token_file": token_file}
    if metrics is not None:
        line |= {"metrics": metrics, "view_token_file": str(view_token_path(folder.path))}
    print(json.dumps(line), flush=True)


def _stop_on_signals(grace_s: float) -> Stopping:
    """Lets the first SIGINT and the first SIGTERM stop the job; a second signal of one kind interrupts."""
    stopping = Stopping(grace_s=grace_s)
    events = {signal.SIGINT: stopping.stop, signal.SIGTERM: stopping.terminate}

    def caught(number: int, _frame: object) -> None:
        signal.signal(number, signal.default_int_handler)
        events[signal.Signals(number)].set()

    for number in events:
        signal.signal(number, caught)
    return stopping


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # stderr is full: the exit code still tells
        print(text, file=sys.stderr, flush=True)

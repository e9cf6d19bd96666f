"""Runs a whole job on this machine, from a config to a summary, in processes of its own or in this one.

`shardkeep/launch/from_python.py` has the public calls.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkeep.affinity import Pins, choose, describe, pinned
from shardkeep.base.errors import JobError, JobStopped, UserError
from shardkeep.base.log import LogFormat
from shardkeep.base.modules import search_last
from shardkeep.config import JobConfig
from shardkeep.launch.absolute_paths import absolute
from shardkeep.launch.callback_calls import CallbackCalls
from shardkeep.launch.children import Spawn, Starter, child_environment
from shardkeep.launch.interrupts import Interrupts
from shardkeep.launch.test_data import score_test_data
from shardkeep.page.of_job import serving_page
from shardkeep.process_starts import forks
from shardkeep.ps.control.grpc.endpoint import make_token
from shardkeep.roles.listeners import check_listeners
from shardkeep.run.callback import Callback, StartEvent
from shardkeep.run.folder import Record, RunFolder
from shardkeep.run.new_folder import refuse_taken
from shardkeep.trust.tokens import keep_token

if TYPE_CHECKING:
    from rich.console import Console

    from shardkeep.run.job_view import JobView
    from shardkeep.run.pretrained import Pretrained
    from shardkeep.run.resume import Resumed
    from shardkeep.run.warm_start import WarmStart
    from shardkeep.workers.data.samples import Data


def run_job(
    config: JobConfig,
    *,
    run_dir: Path,
    console: Console,
    code_folder: Path | None = None,
    resumed: Resumed | None = None,
    start: WarmStart | None = None,
    callbacks: Sequence[Callback] = (),
    log_format: LogFormat = LogFormat.TEXT,
) -> dict[str, Any]:
    """Runs a whole job. Returns the content of summary.json and `run_dir`. Blocks and raises like `train`.

    Args:
        config: The job.
        run_dir: The new run folder, or the folder of the run to resume.
        console: Shows phases, progress and the closing table.
        code_folder: Folder of the user's own modules, if the config names any.
        resumed: The checkpoint to resume from; None = a new job.
        start: The model with which a new job begins; None = a new one.
        callbacks: Called in this thread.
        log_format: Of the roles' logs. If it is JSON, the job is logged instead of shown on the console.
    """
    from shardkeep.run.screen import Screen
    from shardkeep.run.screen_log import ScreenLog

    interrupts = Interrupts()
    calls = CallbackCalls(callbacks, interrupts, lambda text: screen.phase("callback", text))
    listener = calls.record if callbacks else None
    as_json = log_format is LogFormat.JSON
    screen: JobView = ScreenLog(listener=listener) if as_json else Screen(console, listener=listener)
    with _starting(config, screen, log_format) as starter:  # first, because its imports take longest
        return _run_phases(config, run_dir, _Session(screen, interrupts, calls, starter), code_folder, resumed, start)


@dataclass(frozen=True)
class _Session:
    """What one call of `run_job` has from its beginning to its end."""

    screen: JobView
    interrupts: Interrupts
    calls: CallbackCalls
    starter: Starter


def _run_phases(
    config: JobConfig,
    run_dir: Path,
    session: _Session,
    code_folder: Path | None,
    resumed: Resumed | None,
    start: WarmStart | None,
) -> dict[str, Any]:
    from shardkeep.run.resume import await_leftovers
    from shardkeep.run.warm_start import continuing
    from shardkeep.workers.data.sources.registry import check_present

    screen = session.screen
    check_present(config.data)  # before anything is compiled
    if resumed is not None:
        await_leftovers(RunFolder(run_dir))  # they may still listen there
    check_listeners(config)
    config = absolute(config)
    if (before := start or resumed) is not None:
        config = continuing(config, before.checkpoint)
    code_folder = code_folder if config.own_modules else None
    if resumed is None:
        refuse_taken(run_dir)
    pins = _pins(config)
    with session.interrupts, _importable(code_folder):
        files = _row_files(config, start) if resumed is None and config.row_files else []
        _prepare(config, screen, resumed, start, files, session.starter)
        if config.affinity.wanted:
            screen.phase("affinity", describe(pins))
        if resumed is None:
            folder = _new_folder(run_dir, config, code_folder, start, files)
        else:
            folder = RunFolder(run_dir, telemetry_bytes=config.telemetry.max_bytes)
        screen.phase("run", str(run_dir))
        with session.calls.ending(folder):
            with _says_how_to_resume(folder, screen), folder.held():
                config, summary = _Launch(folder, session, code_folder).run(config, resumed)
                problem = score_test_data(config, folder)
            summary = folder.summary() or summary
            _show_end(config, run_dir, folder, summary, screen)
            if problem is not None:
                raise problem
    return {**summary, "run_dir": str(folder.path)}


def _show_end(config: JobConfig, run_dir: Path, folder: RunFolder, summary: dict[str, Any], screen: JobView) -> None:
    """Shows the result of a completed job."""
    best = summary.get("best")
    if config.train.early_stopping is not None and best:
        text = f"step {best['step']:,} of {summary['steps']:,}; its checkpoint is kept, --model best reads it"
        screen.phase("best", text)
    elif config.checkpoint.every_steps:
        from shardkeep.run.next_steps import longer_line

        screen.phase("resume", longer_line(config, folder.path))
    screen.closing(summary, run_dir)


def _row_files(config: JobConfig, start: WarmStart | None) -> list[Pretrained]:
    """The row files with which tables begin, opened. Raises UserError, DataError and ConfigError."""
    from shardkeep.run.pretrained import pretrained_of
    from shardkeep.run.warm_start import tables_of

    return pretrained_of(config, besides=tables_of(start))


def _new_folder(
    path: Path, config: JobConfig, code_folder: Path | None, start: WarmStart | None, files: Sequence[Pretrained]
) -> RunFolder:
    from shardkeep.run.warm_start import refuse_start_of_another, write_start

    refuse_start_of_another(config, path)
    folder = RunFolder.create(path, config, code_folder=code_folder)
    if start is not None or files:
        try:
            write_start(start, config, folder.path, files)
            origins = [each.text() for each in files] if start is None else [start.text(), *(e.text() for e in files)]
            for origin in origins:
                folder.event({"text": f"began with {origin}"})
        except BaseException:  # without its model it is no run
            shutil.rmtree(folder.path, ignore_errors=True)
            raise
    return folder


@dataclass(frozen=True)
class _Launch:
    """A job in its run folder. `shardkeep scale` makes it start more than once."""

    folder: RunFolder
    session: _Session
    code_folder: Path | None

    def run(self, config: JobConfig, resumed: Resumed | None) -> tuple[JobConfig, dict[str, Any]]:
        """Runs the job to its end. Returns the config of its last start and the summary."""
        from shardkeep.launch import scale
        from shardkeep.run.resume import plan_resume

        while True:
            if resumed is not None:
                resumed = _reopen(self.folder, config, resumed, self.session.screen)
            try:
                return config, self._start(config, *_position(resumed))
            except JobStopped:
                scaled = scale.taken(self.folder.path)
                if scaled is None or self.session.interrupts.count:
                    raise
                resumed = plan_resume(self.folder.path, scaled)
                config = resumed.config
            finally:
                self.session.screen.end_bar()

    def _start(self, config: JobConfig, start_step: int, samples: int) -> dict[str, Any]:
        folder, pins = self.folder, _pins(config)
        screen, interrupts, starter = self.session.screen, self.session.interrupts, self.session.starter
        started = StartEvent(config, folder.path, start_step, samples)
        if not config.servers:
            self._call_start(started)
            with pinned(pins.get(("worker", 0))), _page(config, folder, screen):
                return _in_process(config, folder, screen, interrupts, start_step)
        from shardkeep.launch.supervisor import Supervisor

        job = Supervisor(config, folder, screen, interrupts, self.code_folder, pins, start_step, starter)
        self._call_start(started)  # afterwards: what a callback adds to the environment is not for the roles
        return job.run()

    def _call_start(self, started: StartEvent) -> None:
        try:
            self.session.calls.start(started)
        except JobStopped as error:
            self.folder.finished("stopped", str(error), None)
            raise


def _position(resumed: Resumed | None) -> tuple[int, int]:
    """Steps and samples at which a job starts."""
    if resumed is None:
        return 0, 0
    return resumed.checkpoint.step, int(resumed.checkpoint.facts.get("samples", 0))


@contextlib.contextmanager
def _says_how_to_resume(folder: RunFolder, screen: JobView) -> Iterator[None]:
    """Shows the folder of a job that ends early, and the command that resumes it."""
    try:
        yield
    except BaseException:
        from shardkeep.run.next_steps import resume_line

        screen.end_bar()
        screen.phase("run", str(folder.path))
        screen.phase("resume", resume_line(folder.path))
        raise


def _pins(config: JobConfig) -> Pins:
    return choose(config.affinity, servers=config.servers, workers=config.workers, threads=config.threads)


def _reopen(folder: RunFolder, config: JobConfig, resumed: Resumed, screen: JobView) -> Resumed:
    """Reopens the folder of an earlier run once its processes have ended. Returns the newest checkpoint there."""
    from shardkeep.run.resume import await_leftovers, newest

    await_leftovers(folder)
    resumed = replace(resumed, checkpoint=newest(config, folder.path))
    step, samples = _position(resumed)
    RunFolder.reopen(folder.path, config, step=step, samples=samples)
    screen.phase("resume", resumed.text())
    folder.event({"text": f"resumed {resumed.text()}", "step": step})
    return resumed


class ShownFolder:
    """The record sink of a job in this process: it writes records to the run folder and shows them."""

    def __init__(self, folder: RunFolder, screen: JobView) -> None:
        self._folder, self._screen = folder, screen
        self.step = 0
        self.figures: Record | None = None
        """The figures for the summary of a stopped job."""

    def members(self, generation: int, members: Any) -> None:
        self._folder.members(generation, members)

    def standing(self, record: Record) -> None:
        pass  # a job in one process has no coordinator

    def progress(self, record: Record) -> None:
        with self._writing():
            self._folder.progress(record)
        self.step = int(record.get("step", self.step))
        self._screen.record(record)

    def event(self, record: Record) -> None:
        with self._writing():
            self._folder.event(record)
        self.figures = record.get("figures", self.figures)
        self._screen.record(record)

    def telemetry(self, record: Record) -> None:
        self._folder.telemetry(record)

    def finished(self, status: str, message: str, summary: Record | None) -> None:
        with self._writing():
            self._folder.finished(status, message, summary)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise JobError(f"{self._folder.path}: cannot be written ({error.strerror or error})") from error


@contextlib.contextmanager
def _page(config: JobConfig, folder: RunFolder, screen: JobView) -> Iterator[None]:
    """Serves the page of a job in this process, until its summary is written."""
    with contextlib.ExitStack() as leaving:
        try:
            token = make_token()
            if config.metrics.on:  # they have the same view token
                leaving.callback(folder.forget_token)
                token = keep_token(folder.path)
            page = leaving.enter_context(serving_page(config.page, folder.path, token))
        except UserError as error:
            folder.finished("failed", str(error), None)
            raise
        if page is not None:
            screen.phase("page", page)
        yield


def _in_process(
    config: JobConfig, folder: RunFolder, screen: JobView, interrupts: Interrupts, start_step: int
) -> dict[str, Any]:
    """Runs a job with `servers: 0` in this process. Ctrl-C ends it after the running step, a second Ctrl-C at once."""
    from shardkeep.launch.stop import heard
    from shardkeep.roles.in_process import run_in_process
    from shardkeep.run.checkpoints import out_of_grace

    sink = ShownFolder(folder, screen)
    sink.step = start_step
    interrupts.tolerated = 1
    interrupts.notice = screen.notice("stopping after the running step; press Ctrl-C again to end it at once")
    interrupts.grace_s = config.liveness.grace_s
    screen.phase("start", "one process")
    try:
        with heard(folder.path, interrupts):
            summary = run_in_process(
                config, sink, lambda: interrupts.count > 0, folder=folder.path, start_step=start_step
            )
    except KeyboardInterrupt:
        late = f"; {out_of_grace(config, folder.path)}" if interrupts.late else ""
        sink.finished("stopped", f"stopped at step {sink.step}{late}", None)
        raise JobStopped(f"stopped at step {sink.step}{late}") from None
    except Exception as error:
        with contextlib.suppress(OSError):
            status, why = ("stopped", interrupts.reason) if isinstance(error, JobStopped) else ("failed", "")
            folder.finished(status, f"{error}{why and f': {why}'}", sink.figures)
        if isinstance(error, JobStopped) and interrupts.reason:
            raise JobStopped(f"{error}: {interrupts.reason}") from None
        raise
    sink.finished("completed", "", summary)
    return folder.summary() or {}


@contextlib.contextmanager
def _starting(config: JobConfig, screen: JobView, log_format: LogFormat) -> Iterator[Starter]:
    """Yields the starter of the roles, with logs of this form. A fork server starts its imports at once."""
    if not forks(config.processes, servers=config.servers, device=config.tower.device):
        yield Spawn(log_format)
        return
    from shardkeep.launch.fork_server import LIBRARIES, ForkOrSpawn, ForkServer

    server = ForkServer(child_environment(os.environ, threads=config.threads))
    say = functools.partial(screen.phase, "start")
    with contextlib.closing(ForkOrSpawn(server, say, log_format)) as starter:
        server.load(LIBRARIES)
        yield starter


def _prepare(
    config: JobConfig,
    screen: JobView,
    resumed: Resumed | None,
    start: WarmStart | None,
    files: Sequence[Pretrained],
    starter: Starter,
) -> None:
    """Compiles kernels and converts data, once for all roles. Raises UserError, and JobStopped on Ctrl-C."""
    try:
        data = _compile_and_convert(config, screen, resumed, starter)
        if start is not None:
            _check_columns(start, data, screen)
        for each in files:
            screen.phase("rows", each.matched(data.train))
    except KeyboardInterrupt:
        raise JobStopped("stopped before the first step") from None
    finally:
        screen.end_bar()


def _compile_and_convert(config: JobConfig, screen: JobView, resumed: Resumed | None, starter: Starter) -> Data:
    from shardkeep.roles.checkpoint_facts import check_facts
    from shardkeep.roles.kernel_needs import compile_of_job
    from shardkeep.workers.data.sources.registry import open_data, tables_of_files

    if tables := tables_of_files(config.data):  # a wrong name ends the job before its data are converted
        config.check_tables(tables)
    starter.load(compile_of_job(config, lambda text: screen.phase("kernels", text)))
    began = time.monotonic()
    data = open_data(config.data, seed=config.seed, progress=lambda text, done: screen.working("data", text, done))
    screen.end_bar()
    config.check_tables(data.train.schema.tables())
    screen.phase("data", f"{data.describe()}; ready in {time.monotonic() - began:.1f} s")
    if resumed is not None and (remark := check_facts(resumed.checkpoint, config, data)):
        screen.phase("data", remark)
    return data


def _check_columns(start: WarmStart, data: Data, screen: JobView) -> None:
    """Raises ConfigError if the data are not read as in the run with which the job begins."""
    from shardkeep.run.warm_start import new_columns

    new = new_columns(start.facts["inputs"], data.inputs)
    screen.phase("from", start.text() + (f"; new columns: {', '.join(new)}" if new else ""))


def resume(
    run: Path,
    *,
    overrides: Sequence[str],
    console: Console,
    callbacks: Sequence[Callback] = (),
    log_format: LogFormat = LogFormat.TEXT,
) -> dict[str, Any]:
    """Resumes a run from its newest complete checkpoint; see `run_job`."""
    from shardkeep.run.resume import plan_resume

    resumed = plan_resume(run, overrides)
    code_folder = RunFolder(run).code_folder
    return run_job(
        resumed.config,
        run_dir=run,
        console=console,
        code_folder=code_folder,
        resumed=resumed,
        callbacks=callbacks,
        log_format=log_format,
    )


@contextlib.contextmanager
def _importable(folder: Path | None) -> Iterator[None]:
    before = list(sys.path)
    if folder is not None:
        search_last(folder)
    try:
        yield
    finally:
        sys.path[:] = before

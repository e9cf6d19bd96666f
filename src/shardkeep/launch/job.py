"""Runs a whole job on this machine, from a config to a summary, in processes of its own or in this one.

`src/shardkeep/launch/from_python.py` has the public calls.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkeep.base.errors import CheckpointError, JobError, JobStopped
from shardkeep.base.logs.log import LogFormat
from shardkeep.base.machine.limits import limit_bytes
from shardkeep.base.plugging.modules import check_found, search_last
from shardkeep.base.sizes import size_text
from shardkeep.config import JobConfig
from shardkeep.config.affinity import pinned
from shardkeep.config.paths import anchored
from shardkeep.core_plan import choose, start_lines
from shardkeep.launch.callback_calls import CallbackCalls
from shardkeep.launch.in_process_job import page_of, run_here
from shardkeep.launch.processes.role_starts import RoleStarts, of_launcher
from shardkeep.launch.processes.starter import Starter, starting
from shardkeep.launch.stopping.interrupts import Interrupts
from shardkeep.launch.test_data import score_test_data
from shardkeep.member.listeners import check_listeners
from shardkeep.ps.checkpoints.probe import check_keeps_checkpoints, unable
from shardkeep.run.checkpoints import checkpoints_of
from shardkeep.run.folder import RunFolder
from shardkeep.run.new_folder import refuse_taken
from shardkeep.trust.tokens import check_token_folder
from shardkeep.view.callback import Callback, StartEvent

if TYPE_CHECKING:
    from rich.console import Console

    from shardkeep.run.origin.pretrained import Pretrained
    from shardkeep.run.origin.resume import Resumed
    from shardkeep.run.origin.warm_start import WarmStart
    from shardkeep.view.job_view import JobView
    from shardkeep.workers.data.samples import Data
    from shardkeep.workers.data.schema import Schema


SHARE_OF_SAMPLES = 0.5
"""Samples that take more of the memory than this are shuffled in blocks: the rest is for tables and processes."""


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
    from shardkeep.view.screen import Screen
    from shardkeep.view.screen_log import ScreenLog

    interrupts = Interrupts()
    calls = CallbackCalls(callbacks, interrupts, lambda text: screen.phase("callback", text))
    listener = calls.record if callbacks else None
    as_json = log_format is LogFormat.JSON
    screen: JobView = ScreenLog(listener=listener) if as_json else Screen(console, listener=listener)
    say = functools.partial(screen.phase, "start")
    with starting(config, say, log_format) as starter:  # first, because its imports take longest
        code_folder = code_folder if config.own_modules else None
        return _Job(run_dir, code_folder, resumed, start, screen, interrupts, calls, starter).run(config)


@dataclass(frozen=True)
class _Job:
    """One call of `run_job`. Its config is an argument of each phase: resuming may change it."""

    run_dir: Path
    code_folder: Path | None
    resumed: Resumed | None
    start: WarmStart | None
    screen: JobView
    interrupts: Interrupts
    calls: CallbackCalls
    starter: Starter

    def run(self, config: JobConfig) -> dict[str, Any]:
        """All phases of the job."""
        config = self._checked(config)
        with self.interrupts, _importable(self.code_folder):
            files = self._row_files(config)
            config = self._prepare(config, files)
            for phase, text in start_lines(config):
                self.screen.phase(phase, text)
            folder = self._folder(config, files)
            self.screen.phase("run", str(self.run_dir))
            with self.calls.ending(folder):
                with _says_how_to_resume(folder, self.screen), folder.held():
                    config, summary = self._train(config, folder)
                    summary = score_test_data(config, folder, summary)
                _show_end(config, self.run_dir, folder, summary, self.screen)
                if summary["status"] != "completed":
                    raise JobError(summary["message"])
        return {**summary, "run_dir": str(folder.path)}

    def _checked(self, config: JobConfig) -> JobConfig:
        """Checks what is known before the data are read. Returns the config with absolute paths."""
        from shardkeep.run.origin.resume import await_leftovers
        from shardkeep.run.origin.warm_start import continuing
        from shardkeep.workers.data.sources.registry import check_present

        check_present(config.data)  # before anything is compiled
        if self.resumed is not None:
            await_leftovers(RunFolder(self.run_dir))  # they may still listen there
        check_listeners(config)
        if config.servers:
            check_token_folder()
        config = anchored(config, Path.cwd(), JobConfig)  # roles and later readers may run in other folders
        check_found(config.own_modules, (self.code_folder, config.data.root))
        if (before := self.start or self.resumed) is not None:
            config = continuing(config, before.checkpoint)
        if self.resumed is None:
            refuse_taken(self.run_dir, config)
        choose(config)  # raises
        return config

    def _row_files(self, config: JobConfig) -> list[Pretrained]:
        """The row files with which tables begin, opened. Raises UserError, DataError and ConfigError."""
        if self.resumed is not None or not config.row_files:
            return []
        from shardkeep.run.origin.pretrained import pretrained_of
        from shardkeep.run.origin.warm_start import tables_of

        return pretrained_of(config, besides=tables_of(self.start))

    def _prepare(self, config: JobConfig, files: Sequence[Pretrained]) -> JobConfig:
        """Compiles kernels and converts data, once for all roles. Returns the config, with what follows from the data.
        Raises UserError, and JobStopped on Ctrl-C."""
        try:
            data = self._compile_and_convert(config)
            if self.resumed is None:  # what it found as it began is in the run folder
                config = with_shuffle(config, data.stored_bytes, limit_bytes())
                if config.data.shuffle == "blocks":
                    self.screen.phase("data", f"{size_text(data.stored_bytes)} of samples, shuffled in blocks of rows")
            if self.start is not None:
                from shardkeep.run.origin.warm_start import begun

                config, text = begun(config, self.start, data)
                self.screen.phase("from", text)
            for each in files:
                self.screen.phase("rows", each.matched(data.train))
            return config
        except KeyboardInterrupt:
            raise JobStopped("stopped before the first step") from None
        finally:
            self.screen.end_bar()

    def _compile_and_convert(self, config: JobConfig) -> Data:
        from shardkeep.assembly.checkpoint_facts import check_facts
        from shardkeep.assembly.kernel_needs import compile_of_job
        from shardkeep.workers.data.sources.registry import columns_of_files, open_data

        screen = self.screen
        if columns := columns_of_files(config.data):  # a wrong name ends the job before its data are converted
            _check_uses(config, columns)
        self.starter.load(compile_of_job(config, lambda text: screen.phase("kernels", text)))
        began = time.monotonic()
        working = functools.partial(screen.working, "data")
        data = open_data(config.data, seed=config.seed, progress=working, items=config.items)
        screen.end_bar()
        _check_uses(config, data.train.schema)
        screen.phase("data", f"{data.describe()}; ready in {time.monotonic() - began:.1f} s")
        for remark in data.remarks(config.data):
            screen.phase("data", remark)
        if self.resumed is not None and (remark := check_facts(self.resumed.checkpoint, config, data)):
            screen.phase("data", remark)
        return data

    def _folder(self, config: JobConfig, files: Sequence[Pretrained]) -> RunFolder:
        """The run folder: a new one, with the model with which the job begins, or that of the run to resume."""
        if self.resumed is not None:
            folder = RunFolder(self.run_dir, telemetry_bytes=config.telemetry.max_bytes)
            _probe(config, folder, self.screen)
            return folder
        from shardkeep.run.origin.warm_start import refuse_start_of_another, write_start

        path = self.run_dir
        refuse_start_of_another(config, path)
        before = set(path.iterdir()) if path.is_dir() else None
        folder = RunFolder.create(path, config, code_folder=self.code_folder)
        try:
            _probe(config, folder, self.screen)
            if self.start is not None or files:
                write_start(self.start, config, folder, files)
        except BaseException:  # without its model it is no run; what the user had there stays
            with contextlib.suppress(OSError):
                for entry in set(path.iterdir()) - (before or set()):
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
                if before is None:
                    path.rmdir()
            raise
        return folder

    def _train(self, config: JobConfig, folder: RunFolder) -> tuple[JobConfig, dict[str, Any]]:
        """Runs the processes, and resumes a job that `shardkeep scale` has stopped. Returns the config of the last
        start and the summary."""
        from shardkeep.launch.stopping import scale
        from shardkeep.run.origin.resume import plan_resume

        resumed = self.resumed
        while True:
            if resumed is not None:
                resumed = _reopen(folder, config, resumed, self.screen)
            scale.taken(folder.path)  # drops a request to an earlier start
            try:
                summary = self._start(config, folder, *_position(resumed))
            except JobStopped:
                overrides = scale.taken(folder.path)
                if overrides is None or self.interrupts.count:
                    raise
                resumed = plan_resume(folder.path, overrides)
                config = resumed.config
            else:
                if (overrides := scale.taken(folder.path)) is not None:
                    self.screen.phase("scale", f"not with {', '.join(overrides)}: all steps were trained by then")
                return config, summary
            finally:
                self.screen.end_bar()

    def _start(self, config: JobConfig, folder: RunFolder, start_step: int, samples: int) -> dict[str, Any]:
        pins, started = choose(config), StartEvent(config, folder.path, start_step, samples)
        if not config.servers:
            self._call_start(started, folder)
            with pinned(pins.get(("worker", 0))), page_of(config, folder, self.screen):
                return run_here(config, folder, self.screen, self.interrupts, start_step)
        from shardkeep.launch.train_job import TrainJob

        coordinator = of_launcher(folder, start_step)
        roles = RoleStarts(config, folder, self.starter, coordinator, code_folder=self.code_folder, pins=pins)
        job = TrainJob(roles, folder, self.screen, self.interrupts, start_step)
        self._call_start(started, folder)  # afterwards: what a callback adds to the environment is not for the roles
        return job.run()

    def _call_start(self, started: StartEvent, folder: RunFolder) -> None:
        try:
            self.calls.start(started)
        except JobStopped as error:
            folder.finished("stopped", str(error), None)
            raise


def with_shuffle(config: JobConfig, stored_bytes: int, memory_bytes: int) -> JobConfig:
    """The config of a new job, with the shuffle that `data.shuffle: auto` means for so many bytes of samples."""
    if config.data.shuffle != "auto" or config.train.order != "shuffled":
        return config
    shuffle = "blocks" if stored_bytes > SHARE_OF_SAMPLES * memory_bytes else "rows"
    return config.model_copy(update={"data": config.data.model_copy(update={"shuffle": shuffle})})


def _check_uses(config: JobConfig, schema: Schema) -> None:
    """Raises ConfigError for tables, targets of attention and columns of items that are not those of the data."""
    from shardkeep.workers.data.sides import sides_of_model
    from shardkeep.workers.encoder_config import targets_of

    config.check_tables(schema)
    targets_of(config.model, schema if config.items is None else sides_of_model(config.items, schema).users)


def _probe(config: JobConfig, folder: RunFolder, screen: JobView) -> None:
    """Says what the folder cannot keep. Raises CheckpointError if that is the model."""
    try:
        if config.checkpoint.on:
            check_keeps_checkpoints(checkpoints_of(config, folder.path).folder)
    except CheckpointError as error:
        allowed = "allowed: checkpoint.dir on another file system, or checkpoint.every_steps: off"
        raise CheckpointError(f"{error}; {allowed}") from error
    if lost := unable(folder.path):
        screen.phase("warning", f"{folder.path} has {'; '.join(lost)}; allowed: a run folder elsewhere")


def _show_end(config: JobConfig, run_dir: Path, folder: RunFolder, summary: dict[str, Any], screen: JobView) -> None:
    """Shows the result of a job whose steps are all trained."""
    from shardkeep.page.state import RunState
    from shardkeep.run.next_steps import longer_line, resume_line

    best = summary.get("best")
    if summary["status"] != "completed":
        screen.phase("resume", resume_line(folder.path))
    elif config.train.early_stopping is not None and best:
        text = f"step {best['step']:,} of {summary['steps']:,}; its checkpoint is kept, --model best reads it"
        screen.phase("best", text)
    elif config.checkpoint.on:
        screen.phase("resume", longer_line(config, folder.path, summary["steps"]))
    warnings: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):  # the job is complete, whatever became of its records
        warnings = RunState(folder.path).sections()["warnings"]
    screen.closing(summary, run_dir, warnings)


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


def _reopen(folder: RunFolder, config: JobConfig, resumed: Resumed, screen: JobView) -> Resumed:
    """Reopens the folder of an earlier run once its processes have ended. Returns the newest checkpoint there."""
    from shardkeep.run.origin.resume import await_leftovers, newest

    await_leftovers(folder)
    resumed = replace(resumed, checkpoint=newest(config, folder.path))
    step, samples = _position(resumed)
    RunFolder.reopen(folder.path, config, step=step, samples=samples)
    screen.phase("resume", resumed.text())
    folder.event({"text": f"resumed {resumed.text()}", "phase": "resumed", "step": step})
    return resumed


def resume(
    run: Path,
    *,
    overrides: Sequence[str],
    console: Console,
    callbacks: Sequence[Callback] = (),
    log_format: LogFormat = LogFormat.TEXT,
) -> dict[str, Any]:
    """Resumes a run from its newest complete checkpoint; see `run_job`."""
    from shardkeep.run.origin.resume import plan_resume
    from shardkeep.workers.data.input_files import advising

    resumed = plan_resume(run, overrides)
    with advising("--set data.train=PATH or --set data.root=FOLDER names their place now"):
        return run_job(
            resumed.config,
            run_dir=run,
            console=console,
            code_folder=RunFolder(run).code_folder,
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

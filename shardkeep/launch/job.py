"""A whole job on this machine, from a config to a summary: its phases, in processes or in this one."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkeep.affinity import Pins, choose, describe, pinned
from shardkeep.base.errors import JobError, JobStopped
from shardkeep.base.modules import search_last
from shardkeep.config import JobConfig, load_config
from shardkeep.launch.children import Spawn, Starter, child_environment
from shardkeep.launch.interrupts import Interrupts
from shardkeep.process_starts import forks
from shardkeep.run.folder import Record, RunFolder
from shardkeep.run.new_folder import default_run_dir, refuse_taken

if TYPE_CHECKING:
    from rich.console import Console

    from shardkeep.run.resume import Resumed
    from shardkeep.run.screen import Screen


def train(config: JobConfig | str | Path, *, run_dir: str | Path | None = None, quiet: bool = False) -> dict[str, Any]:
    """Runs a whole job on this machine; blocks until it is over.

    Args:
        config: The job, or the path of its YAML file. A module:Class or module:function is found in data.root, beside
            the file, or (JobConfig) beside the running script.
        run_dir: The run folder, which must not exist yet; left out = runs/NAME-DATE under the current folder.
        quiet: Show nothing.

    Returns:
        What summary.json holds, and the run folder's path as `run_dir`.

    Raises:
        UserError: The input is wrong.
        JobError: The job failed or was stopped; the text names who and why.
    """
    from shardkeep.run.screen import console

    code_folder = _script_folder() if isinstance(config, JobConfig) else Path(config).resolve().parent
    job = config if isinstance(config, JobConfig) else load_config(config)
    path = Path(run_dir) if run_dir is not None else default_run_dir(job.name)
    return run_job(job, run_dir=path, console=console(quiet=quiet), code_folder=code_folder)


def run_job(
    config: JobConfig,
    *,
    run_dir: Path,
    console: Console,
    code_folder: Path | None = None,
    resumed: Resumed | None = None,
) -> dict[str, Any]:
    """Runs a whole job; returns what `train` does. Blocks; raises as `train`.

    Args:
        config: The job.
        run_dir: The run folder, made here, or that of the run that goes on.
        console: Where phases, progress and the closing table are shown.
        code_folder: Where the user's own modules are found, if the config names any.
        resumed: Where the job goes on; None = a new one.
    """
    from shardkeep.run.screen import Screen

    screen = Screen(console)
    with _starting(config, screen) as starter:  # first, because its imports take longest
        return _run_phases(config, run_dir, screen, code_folder, resumed, starter)


def _run_phases(
    config: JobConfig,
    run_dir: Path,
    screen: Screen,
    code_folder: Path | None,
    resumed: Resumed | None,
    starter: Starter,
) -> dict[str, Any]:
    from shardkeep.workers.data.sources.registry import check_present

    check_present(config.data)  # before anything is compiled
    config = _anchored(config)
    code_folder = code_folder if config.own_modules else None
    if resumed is None:
        refuse_taken(run_dir)
    pins = _pins(config)
    with Interrupts() as interrupts, _importable(code_folder):
        _prepare(config, screen, resumed, starter)
        if config.affinity.wanted:
            screen.phase("affinity", describe(pins))
        folder = RunFolder.create(run_dir, config, code_folder=code_folder) if resumed is None else RunFolder(run_dir)
        screen.phase("run", str(run_dir))
        with _says_how_to_resume(folder, screen), folder.held():
            config, summary = _Launch(folder, screen, interrupts, code_folder, starter).run(config, resumed)
    if config.checkpoint.every_steps:
        from shardkeep.run.next_steps import longer_line

        screen.phase("resume", longer_line(config, folder.path))
    screen.closing(summary, run_dir)
    return {**summary, "run_dir": str(folder.path)}


@dataclass(frozen=True)
class _Launch:
    """A job in its run folder, over the starts that scaling makes."""

    folder: RunFolder
    screen: Screen
    interrupts: Interrupts
    code_folder: Path | None
    starter: Starter

    def run(self, config: JobConfig, resumed: Resumed | None) -> tuple[JobConfig, dict[str, Any]]:
        """Runs the job to its end. Returns the config of its last start, and the summary."""
        from shardkeep.launch import scale
        from shardkeep.run.resume import plan_resume

        while True:
            if resumed is not None:
                resumed = _reopen(self.folder, config, resumed, self.screen)
            try:
                return config, self._start(config, 0 if resumed is None else resumed.checkpoint.step)
            except JobStopped:
                scaled = scale.taken(self.folder.path)
                if scaled is None or self.interrupts.count:
                    raise
                resumed = plan_resume(self.folder.path, scaled)
                config = resumed.config
            finally:
                self.screen.end_bar()

    def _start(self, config: JobConfig, start_step: int) -> dict[str, Any]:
        folder, screen, interrupts, pins = self.folder, self.screen, self.interrupts, _pins(config)
        if not config.servers:
            with pinned(pins.get(("worker", 0))):
                return _in_process(config, folder, screen, interrupts, start_step)
        from shardkeep.launch.supervisor import Supervisor

        return Supervisor(config, folder, screen, interrupts, self.code_folder, pins, start_step, self.starter).run()


@contextlib.contextmanager
def _says_how_to_resume(folder: RunFolder, screen: Screen) -> Iterator[None]:
    """Where a job that ends early lies, and how to resume it."""
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


def _reopen(folder: RunFolder, config: JobConfig, resumed: Resumed, screen: Screen) -> Resumed:
    """Makes the folder of an earlier run this one's; where the job goes on, now that nobody else writes there."""
    from shardkeep.run.resume import await_leftovers, newest

    await_leftovers(folder)
    resumed = replace(resumed, checkpoint=newest(config, folder.path))
    checkpoint = resumed.checkpoint
    RunFolder.reopen(folder.path, config, step=checkpoint.step, samples=int(checkpoint.facts.get("samples", 0)))
    screen.phase("resume", resumed.text())
    folder.event({"text": f"resumed {resumed.text()}", "step": resumed.checkpoint.step})
    return resumed


class ShownFolder:
    """A run folder whose records are shown too: the sink of a job in this process."""

    def __init__(self, folder: RunFolder, screen: Screen) -> None:
        self._folder, self._screen = folder, screen
        self.step = 0
        self.figures: Record | None = None
        """Of the summary of a job that is stopped."""

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

    def finished(self, status: str, message: str, summary: Record | None) -> None:
        with self._writing():
            self._folder.finished(status, message, summary)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise JobError(f"{self._folder.path}: cannot be written ({error.strerror or error})") from error


def _in_process(
    config: JobConfig, folder: RunFolder, screen: Screen, interrupts: Interrupts, start_step: int
) -> dict[str, Any]:
    """`servers: 0`: the job in this process. Ctrl-C ends it after the running step, a second one at once."""
    from shardkeep.roles.in_process import run_in_process
    from shardkeep.run.checkpoints import out_of_grace

    sink = ShownFolder(folder, screen)
    sink.step = start_step
    interrupts.tolerated = 1
    interrupts.notice = "stopping after the running step; once more Ctrl-C ends it at once"
    interrupts.grace_s = config.liveness.grace_s
    screen.phase("start", "one process")
    try:
        summary = run_in_process(config, sink, lambda: interrupts.count > 0, folder=folder.path, start_step=start_step)
    except KeyboardInterrupt:
        late = f"; {out_of_grace(config, folder.path)}" if interrupts.late else ""
        sink.finished("stopped", f"stopped at step {sink.step}{late}", None)
        raise JobStopped(f"stopped at step {sink.step}{late}") from None
    except Exception as error:
        with contextlib.suppress(OSError):
            folder.finished("stopped" if isinstance(error, JobStopped) else "failed", str(error), sink.figures)
        raise
    sink.finished("completed", "", summary)
    return folder.summary() or {}


@contextlib.contextmanager
def _starting(config: JobConfig, screen: Screen) -> Iterator[Starter]:
    """What starts the roles; the fork server begins its imports at once."""
    if not forks(config.processes, servers=config.servers, device=config.tower.device):
        yield Spawn()
        return
    from shardkeep.launch.fork_server import LIBRARIES, ForkOrSpawn, ForkServer

    server = ForkServer(child_environment(os.environ, threads=config.threads))
    with contextlib.closing(ForkOrSpawn(server, lambda text: screen.phase("start", text))) as starter:
        server.load(LIBRARIES)
        yield starter


def _prepare(config: JobConfig, screen: Screen, resumed: Resumed | None, starter: Starter) -> None:
    """Compiles kernels and converts data, once for all roles. User errors show here. Raises JobStopped on Ctrl-C."""
    try:
        _compile_and_convert(config, screen, resumed, starter)
    except KeyboardInterrupt:
        raise JobStopped("stopped before the first step") from None
    finally:
        screen.end_bar()


def _compile_and_convert(config: JobConfig, screen: Screen, resumed: Resumed | None, starter: Starter) -> None:
    from shardkeep.roles.checkpoint_facts import check_facts
    from shardkeep.roles.kernel_needs import compile_of_job
    from shardkeep.workers.data.sources.registry import open_data

    starter.load(compile_of_job(config, lambda text: screen.phase("kernels", text)))
    began = time.monotonic()
    data = open_data(config.data, seed=config.seed, progress=lambda text, done: screen.working("data", text, done))
    screen.end_bar()
    config.check_tables(data.train.schema.tables())
    screen.phase("data", f"{data.describe()}; ready in {time.monotonic() - began:.1f} s")
    if resumed is not None and (remark := check_facts(resumed.checkpoint, config, data)):
        screen.phase("data", remark)


def _anchored(config: JobConfig) -> JobConfig:
    """The config with absolute paths: roles and later readers may stand elsewhere."""
    data = config.data.model_copy(update={"root": _absolute(config.data.root)})
    checkpoint = config.checkpoint
    if checkpoint.dir is not None:
        checkpoint = checkpoint.model_copy(update={"dir": _absolute(checkpoint.dir)})
    return config.model_copy(update={"data": data, "checkpoint": checkpoint})


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def resume(run: Path, *, overrides: Sequence[str], console: Console) -> dict[str, Any]:
    """Goes on with a run from its newest complete checkpoint; as `run_job`."""
    from shardkeep.run.resume import plan_resume

    resumed = plan_resume(run, overrides)
    code_folder = RunFolder(run).code_folder
    return run_job(resumed.config, run_dir=run, console=console, code_folder=code_folder, resumed=resumed)


def _script_folder() -> Path:
    """Where the modules beside the running script are; in a notebook or `python -c` the current folder."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(script).resolve().parent if script else Path.cwd()


@contextlib.contextmanager
def _importable(folder: Path | None) -> Iterator[None]:
    before = list(sys.path)
    if folder is not None:
        search_last(folder)
    try:
        yield
    finally:
        sys.path[:] = before

"""A job with `servers: 0`: it runs in the launcher's process. Ctrl-C ends it after the running step."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from shardkeep.base.errors import JobError, JobStopped, UserError
from shardkeep.base.logs.local_time import time_of_day
from shardkeep.base.system_errors import in_words
from shardkeep.config import JobConfig
from shardkeep.launch.stopping.interrupts import Interrupts
from shardkeep.page.of_job import NICE, page_text, serve_page
from shardkeep.records.lines import record_of
from shardkeep.run.folder import Record, RunFolder
from shardkeep.trust.endpoint import make_token
from shardkeep.trust.tokens import keep_token
from shardkeep.web.server import WebServer

if TYPE_CHECKING:
    from shardkeep.view.job_view import JobView


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
        self.step = int(record.get("step", self.step))
        self._shown(self._folder.progress, record)

    def event(self, record: Record) -> None:
        self.figures = record.get("figures", self.figures)
        self._shown(self._folder.event, record)

    def _shown(self, keep: Callable[[Record], None], record: Record) -> None:
        timed = {"time": time_of_day(), **record}
        keep(timed)
        self._screen.record(record_of(timed))

    def telemetry(self, record: Record) -> None:
        self._folder.telemetry(record)

    def finished(self, status: str, message: str, summary: Record | None) -> None:
        try:
            self._folder.finished(status, message, summary)
        except OSError as error:
            raise JobError(f"{self._folder.path}: cannot be written ({error.strerror or error})") from error


@contextlib.contextmanager
def page_of(config: JobConfig, folder: RunFolder, screen: JobView) -> Iterator[None]:
    """Serves the page of a job in this process, until its summary is written."""
    with contextlib.ExitStack() as leaving:
        try:
            token = make_token()
            if config.web.has_metrics:  # they have the same view token
                leaving.callback(folder.forget_token)
                token = keep_token(folder.path)
            web = leaving.enter_context(contextlib.closing(WebServer(nice=NICE)))
            page = serve_page(web, config.web, folder.path, token)
        except UserError as error:
            folder.finished("failed", str(error), None)
            raise
        if page is not None:
            screen.phase("page", page_text(folder.path, page, sys.stdout, sys.stderr))
        yield


def run_here(
    config: JobConfig, folder: RunFolder, screen: JobView, interrupts: Interrupts, start_step: int
) -> dict[str, Any]:
    """Runs a job with `servers: 0` in this process. Ctrl-C ends it after the running step, a second Ctrl-C at once."""
    from shardkeep.launch.stopping.stop import heard
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
            folder.finished(status, f"{in_words(error)}{why and f': {why}'}", sink.figures)
        if isinstance(error, JobStopped) and interrupts.reason:
            raise JobStopped(f"{error}: {interrupts.reason}") from None
        raise
    lacks = summary.pop("lacks", "")
    sink.finished("incomplete" if lacks else "completed", lacks, summary)
    return folder.summary() or {}

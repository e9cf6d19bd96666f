"""Profiles: a torch.profiler trace of some steps of one process, for Perfetto and TensorBoard."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import ConfigError, ShardkeepError
from shardkeep.base.logs.log import EventLog
from shardkeep.ps.wire.message import Kind, kind_of, read
from shardkeep.workers.config import ProfileConfig
from shardkeep.workers.timing.clock import Part

_log = EventLog("profile")
Handle = Callable[..., Future[Bytes]]
"""Answers a message, or two that came together."""
PREFIX = "shardkeep:"
"""Of our ranges' names, so that a search in the viewer finds them among torch's own."""


class Profile:
    """The trace of steps [start, start + steps) of this process, of all its threads; recorded once.

    A worker's Stopwatch tells its steps and their parts (it is an `Observer`); a server's steps are those of the
    messages that it handles (`led`).

    Args:
        config: Which steps.
        path: Of the file to write.
        cuda: Whether the trace has the device's kernels, too.
    """

    def __init__(self, config: ProfileConfig, path: Path, *, cuda: bool = False) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        # Servers answer in torch RPC's threads, which are not the one that starts the profiler.
        every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._profiler = profile(activities=activities, experimental_config=every_thread)
        self._first, self._end = config.start, config.end
        self._path = path
        self._prepared = self._recording = self._over = False
        self._lock = threading.Lock()
        self._step: record_function | None = None
        self._part: record_function | None = None

    # What a Stopwatch reports; the training thread's, except `nested`.

    def step(self, step: int) -> None:
        """Step `step` begins, and the one before it is over."""
        if self._over:
            return
        self._close_ranges()
        self._reach(step)
        if self._recording:
            self._step = _opened(f"ProfilerStep#{step}")  # the name by which TensorBoard knows a step

    def follow(self, part: Part | None) -> None:
        """Ends the range that is open and opens one for `part`."""
        if self._recording:
            _close(self._part)
            self._part = None if part is None else _opened(PREFIX + part)

    def nested(self, name: str) -> contextlib.AbstractContextManager[object]:
        """A range of its own. Any thread."""
        return record_function(PREFIX + name) if self._recording else contextlib.nullcontext()

    def close(self) -> None:
        """Writes the trace of a job that ended before its last profiled step did."""
        self._close_ranges()
        with self._lock:
            self._write()

    # The messages of a service. Any thread.

    def drawn(self, handle: Handle) -> Handle:
        """The handler of a service whose messages are drawn."""

        def draw(*messages: Bytes) -> Future[Bytes]:
            with self.nested(_kinds(messages)) if self._recording else contextlib.nullcontext():
                return handle(*messages)

        return draw

    def led(self, handle: Handle) -> Handle:
        """Likewise, where the messages begin and end the trace: it begins with the first message of the first step and
        ends when a push of a later step than the last one comes: the pulls of later steps come sooner."""
        if not self._prepared:
            self._prepare()
        draw = self.drawn(handle)

        def lead(*messages: Bytes) -> Future[Bytes]:
            readable = not self._over and all(list(map(self._look, messages)))
            return draw(*messages) if readable else handle(*messages)

        return lead

    def _look(self, buffer: Bytes) -> bool:
        """Whether it is a message; begins and ends the trace as its step says."""
        try:
            message = read(buffer)
        except ShardkeepError:
            return False  # the service's answer says what is wrong
        if message.kind is Kind.PUSH or (message.kind is Kind.PULL and message.step < self._end):
            self._reach(message.step)
        return True

    # The trace.

    def _prepare(self) -> None:
        """Loads the profiler: a second or two. In the main thread: libkineto complains about any other."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes a line to stderr at each start and stop
        self._profiler.prepare_trace()
        self._prepared = True

    def _reach(self, step: int) -> None:
        """Begins the trace at a step that is to be profiled, and writes it at one after them."""
        with self._lock:
            if self._recording and step >= self._end:
                self._write()
            elif not self._over and not self._recording and self._first <= step < self._end:
                if not self._prepared:
                    self._prepare()
                self._profiler.start_trace()
                self._recording = True

    def _write(self) -> None:
        """Writes what was recorded; says where it is. A trace that cannot be written does not end the job."""
        if self._over:
            return
        self._over, recorded, self._recording = True, self._recording, False
        if not recorded:
            _log.warning("no profile: none of its steps was trained", first=self._first)
            return
        profiler = self._profiler
        del self._profiler  # it holds all events
        try:
            profiler.stop_trace()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            _log.warning("the profile is lost", path=str(self._path), reason=_line(error))
            return
        _log.info("profile", first=self._first, steps=self._end - self._first, path=str(self._path))

    def _close_ranges(self) -> None:
        _close(self._part)
        _close(self._step)
        self._part = self._step = None


def open_profile(config: ProfileConfig, folder: Path, role: str, index: int, *, cuda: bool = False) -> Profile | None:
    """The profile of a process of the job, in the run folder; None where the job is not profiled."""
    return Profile(config, trace_path(folder, role, index), cuda=cuda) if config.steps != "off" else None


def _kinds(messages: Sequence[Bytes]) -> str:
    """`push`, or `push and pull` of two that came together."""
    return " and ".join(Kind(kind_of(message)).name.lower() for message in messages)


def check_profile(config: ProfileConfig, *, total_steps: int) -> None:
    """Raises ConfigError where the job ends before the first step to profile."""
    if config.steps != "off" and config.start >= total_steps:
        raise ConfigError(
            f"profile.start: {config.start} is not allowed: the job has {total_steps} steps, counted from 0"
        )


def trace_path(folder: Path, role: str, index: int) -> Path:
    """Where a process of the job writes its trace; TensorBoard looks for names that end so."""
    return folder / "profile" / f"{role}-{index}.pt.trace.json"


def _opened(name: str) -> record_function:
    opened = record_function(name)
    opened.__enter__()  # type: ignore[no-untyped-call]
    return opened


def _close(opened: record_function | None) -> None:
    if opened is not None:
        opened.__exit__(None, None, None)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__

"""Profiles: a torch.profiler trace of some steps of one process, for Perfetto and TensorBoard.

A worker is told its steps and the parts of them; a server sees them in the messages it handles. Decides nothing else.
"""

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

from shardkeep.base.errors import ConfigError, ShardkeepError
from shardkeep.base.log import EventLog
from shardkeep.ps.message import KIND_AT, Bytes, Kind, read
from shardkeep.workers.config import ProfileConfig
from shardkeep.workers.stopwatch import Part

_log = EventLog("profile")
PREFIX = "shardkeep:"
"""Of our ranges' names, so that a search in the viewer finds them among torch's own."""


class Trace:
    """One trace of this process, of all its threads; recorded once.

    Not thread safe, but `prepare`, `start` and `stop` may be called by different threads.
    """

    def __init__(self, path: Path, *, cuda: bool = False) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        # Servers answer in torch RPC's threads, which are not the one that starts the profiler.
        every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._profiler = profile(activities=activities, experimental_config=every_thread)
        self._path = path
        self._prepared = False

    def prepare(self) -> None:
        """Loads the profiler: a second or two. In the main thread: libkineto complains about any other."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes a line to stderr at each start and stop
        self._profiler.prepare_trace()
        self._prepared = True

    def start(self) -> None:
        if not self._prepared:
            self.prepare()
        self._profiler.start_trace()

    def stop(self) -> None:
        """Ends the recording and writes the file. Raises OSError or RuntimeError where it cannot be written."""
        profiler = self._profiler
        del self._profiler  # it holds all events
        profiler.stop_trace()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._path))


class Profile:
    """The trace of steps [start, start + steps) of one process, begun and ended by the steps it is told."""

    def __init__(self, config: ProfileConfig, trace: Trace, path: Path) -> None:
        self._first, self._end = config.start, config.start + config.steps
        self._trace = trace
        self._path = path
        self.recording = False
        self.over = False

    def due(self, step: int) -> bool:
        return not self.over and (self.recording or self._first <= step < self._end)

    def past(self, step: int) -> bool:
        return self.recording and step >= self._end

    def begin(self) -> None:
        self._trace.start()
        self.recording = True

    def end(self) -> None:
        """Writes what was recorded; says where it is. A trace that cannot be written does not end the job."""
        if self.over:
            return
        self.over = True
        if not self.recording:
            _log.warning("no profile: none of its steps was trained", first=self._first)
            return
        self.recording = False
        try:
            self._trace.stop()
        except (OSError, RuntimeError) as error:
            _log.warning("the profile is lost", path=str(self._path), reason=_line(error))
            return
        _log.info("profile", first=self._first, steps=self._end - self._first, path=str(self._path))


class WorkerProfile:
    """Draws a worker's steps and their parts. What a Stopwatch tells; the training thread's, but for `nested`."""

    def __init__(self, config: ProfileConfig, path: Path, *, cuda: bool) -> None:
        self._profile = Profile(config, Trace(path, cuda=cuda), path)
        self._step: record_function | None = None
        self._part: record_function | None = None

    def step(self, step: int) -> None:
        """Step `step` begins, and the one before it is over."""
        if self._profile.over:
            return
        self._close_step()
        if self._profile.past(step):
            self._profile.end()
        elif self._profile.due(step):
            if not self._profile.recording:
                self._profile.begin()
            self._step = _opened(f"ProfilerStep#{step}")  # the name by which TensorBoard knows a step

    def follow(self, part: Part | None) -> None:
        """Ends the range that is open and opens one for `part`."""
        if self._profile.recording:
            _close(self._part)
            self._part = None if part is None else _opened(PREFIX + part)

    def nested(self, name: str) -> contextlib.AbstractContextManager[object]:
        """A range of its own. Any thread."""
        return record_function(PREFIX + name) if self._profile.recording else contextlib.nullcontext()

    def drawn(self, handle: Callable[..., Future[Bytes]]) -> Callable[..., Future[Bytes]]:
        """The handler of a service in this same process, whose messages are drawn too."""

        def draw(*messages: Bytes) -> Future[Bytes]:
            if not self._profile.recording:
                return handle(*messages)
            with record_function(PREFIX + _kinds(messages)):
                return handle(*messages)

        return draw

    def close(self) -> None:
        """Writes the trace of a job that ended before its last profiled step did."""
        self._close_step()
        self._profile.end()

    def _close_step(self) -> None:
        _close(self._part)
        _close(self._step)
        self._part = self._step = None


class ServerProfile:
    """Draws the messages that a server handles. The trace begins with the first message of the first step and ends
    when a push of a later step than the last one comes: the pulls of later steps come sooner.

    Args:
        config: Which steps.
        path: Of the file to write.
        handle: The service's.
    """

    def __init__(self, config: ProfileConfig, path: Path, handle: Callable[..., Future[Bytes]]) -> None:
        trace = Trace(path)
        trace.prepare()
        self._profile = Profile(config, trace, path)
        self._handle = handle
        self._lock = threading.Lock()

    def handle(self, *messages: Bytes) -> Future[Bytes]:
        """What the service answers to a message, or to two that came together. Any thread."""
        if self._profile.over:
            return self._handle(*messages)
        readable = all(list(map(self._look, messages)))
        if not readable or not self._profile.recording:
            return self._handle(*messages)
        with record_function(PREFIX + _kinds(messages)):
            return self._handle(*messages)

    def close(self) -> None:
        """Writes the trace of a job that ended before its last profiled step did."""
        with self._lock:
            self._profile.end()

    def _look(self, buffer: Bytes) -> bool:
        """Whether it is a message; begins and ends the trace as its step says."""
        try:
            message = read(buffer)
        except ShardkeepError:
            return False  # the service's answer says what is wrong
        profile = self._profile
        if message.kind in (Kind.PULL, Kind.PUSH):
            with self._lock:
                if message.kind is Kind.PUSH and profile.past(message.step):
                    profile.end()
                elif not profile.recording and profile.due(message.step):
                    profile.begin()
        return True


def _kinds(messages: Sequence[Bytes]) -> str:
    """`push`, or `push and pull` of two that came together."""
    return " and ".join(Kind(int(message[KIND_AT])).name.lower() for message in messages)


def check_profile(config: ProfileConfig, *, total_steps: int) -> None:
    """Raises ConfigError where the job ends before the first step to profile."""
    if config.steps and config.start >= total_steps:
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

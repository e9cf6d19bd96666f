"""The thread that keeps a member's lease and learns of changes of the job. Knows no steps and no trainer."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from shardkeep.base.errors import ProtocolError, ShardkeepError
from shardkeep.proto import control_pb2 as pb
from shardkeep.ps.control.grpc import wire
from shardkeep.ps.control.grpc.channel import RETRY_S, ControlChannel
from shardkeep.ps.control.records import JobState

LONGEST_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class _Told:
    """What a heartbeat says about its member."""

    step: int = -1
    phase: str = ""
    unsent_rows: int = 0


class Heartbeat:
    """Long polls: each heartbeat waits at the coordinator for a change of the job, a second at most."""

    def __init__(self, channel: ControlChannel, token: str) -> None:
        self.state = JobState()
        self.stop_requested = threading.Event()
        self.failed = threading.Event()
        self.over = threading.Event()
        self.heard = threading.Condition()  # notified with every change of the state
        self.silent = False  # the coordinator was given up; nobody listens
        self._channel = channel
        self._token = token
        self._told = _Told()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, *, lease_s: float, patience_s: float) -> None:
        """`patience_s`: how long the coordinator may be silent. A second call does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(lease_s, patience_s), name="heartbeat", daemon=True)
            self._thread.start()

    def update(self, *, step: int | None, phase: str | None, unsent_rows: int | None) -> None:
        told = self._told
        self._told = _Told(
            told.step if step is None else step,
            told.phase if phase is None else phase,
            told.unsent_rows if unsent_rows is None else unsent_rows,
        )

    def stop(self) -> None:
        """No further heartbeat begins."""
        self._ended.set()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run(self, lease_s: float, patience_s: float) -> None:
        heard = time.monotonic()
        while not self._ended.is_set():
            began = time.monotonic()
            try:
                self.hear(self._beat(lease_s))
                heard = time.monotonic()
            except ProtocolError as error:  # it does not know this member: a retry cannot help
                self._give_up(str(error))
            except ShardkeepError as error:
                # a first failure after this process hung is no silence
                if began - heard > patience_s:
                    self._give_up(f"{error}; silent for more than {patience_s:g} s")
            self._ended.wait(max(0.0, RETRY_S - (time.monotonic() - began)))

    def _beat(self, lease_s: float) -> JobState:
        wait_s = min(LONGEST_POLL_S, lease_s / 4)
        told = self._told
        request = pb.HeartbeatRequest(
            token=self._token, step=told.step, phase=told.phase, seen=self.state.version, wait_s=wait_s,
            unsent_rows=told.unsent_rows,
        )  # fmt: skip
        timeout_s = wait_s + max(lease_s / 4, 0.5)
        return wire.job_from_pb(self._channel.call("Heartbeat", request, pb.JobState, timeout_s=timeout_s))

    def hear(self, job: JobState) -> None:
        """Takes in the job's state, from a heartbeat or any other reply."""
        with self.heard:
            self.state = job
            self.heard.notify_all()
        if job.state in ("stopping", "stopped"):
            self.stop_requested.set()
        if job.state == "failed":
            self.failed.set()
        if job.over:
            self.over.set()

    def _give_up(self, message: str) -> None:
        self.silent = True
        if not self._ended.is_set() and not self.state.over:
            generation = self.state.generation
            self.hear(JobState("failed", message, 1, True, generation, self.state.version))
        self._ended.set()

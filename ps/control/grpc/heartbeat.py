"""The thread that keeps a member's lease and learns of changes of the job. Knows no steps and no trainer."""

from __future__ import annotations

import threading
import time
from typing import Any

from shardkeep.base.errors import PlaceLost, ProtocolError, ShardkeepError
from shardkeep.proto import control_pb2 as pb
from shardkeep.ps.control.grpc.channel import RETRY_S, ControlChannel
from shardkeep.ps.control.grpc.messages import from_message
from shardkeep.ps.control.membership import heartbeat_s
from shardkeep.ps.control.records import JobState


class Heartbeat:
    """Long polls: each heartbeat waits at the coordinator for a change of the job, `heartbeat_s` at most."""

    def __init__(self, channel: ControlChannel, token: str) -> None:
        self.state = JobState()
        self.stop_requested = threading.Event()
        self.failed = threading.Event()
        self.over = threading.Event()
        self.state_changed = threading.Condition()  # notified with every change of the state
        self.silent = False  # the coordinator was given up; nobody listens
        self._channel = channel
        self._token = token
        self._content: dict[str, Any] = {"step": -1}
        """What a heartbeat says about its member."""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, *, lease_s: float, patience_s: float, members: int) -> None:
        """`patience_s`: how long the coordinator may be silent. `members`: of the job. A second call does nothing."""
        if self._thread is None:
            arguments = (lease_s, patience_s, min(heartbeat_s(members), lease_s / 3))
            self._thread = threading.Thread(target=self._run, args=arguments, name="heartbeat", daemon=True)
            self._thread.start()

    def update(self, *, step: int | None, phase: str | None, unsent_rows: int | None) -> None:
        contents = {"step": step, "phase": phase, "unsent_rows": unsent_rows}
        self._content |= {name: value for name, value in contents.items() if value is not None}

    def stop(self) -> None:
        """No further heartbeat begins."""
        self._ended.set()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run(self, lease_s: float, patience_s: float, wait_s: float) -> None:
        answered_s = time.monotonic()
        while not self._ended.is_set():
            began = time.monotonic()
            try:
                self.hear(self._beat(lease_s, wait_s))
                answered_s = time.monotonic()
            except (PlaceLost, ProtocolError) as error:  # a retry cannot help
                self._give_up(str(error), error.exit_code)
            except ShardkeepError as error:
                # a first failure after this process hung is no silence
                if began - answered_s > patience_s:
                    self._give_up(f"{error}; silent for more than {patience_s:g} s")
            self._ended.wait(max(0.0, RETRY_S - (time.monotonic() - began)))

    def _beat(self, lease_s: float, wait_s: float) -> JobState:
        request = pb.HeartbeatRequest(token=self._token, seen=self.state.version, wait_s=wait_s, **self._content)
        timeout_s = wait_s + max(lease_s / 4, 0.5)
        return from_message(self._channel.call("Heartbeat", request, pb.JobState, timeout_s=timeout_s), JobState)

    def hear(self, job: JobState) -> None:
        """Takes in the job's state, from a heartbeat or any other reply."""
        with self.state_changed:
            self.state = job
            self.state_changed.notify_all()
        if job.state in ("stopping", "stopped"):
            self.stop_requested.set()
        if job.state == "failed":
            self.failed.set()
        if job.over:
            self.over.set()

    def _give_up(self, message: str, exit_code: int = 1) -> None:
        self.silent = True
        if not self._ended.is_set() and not self.state.over:
            generation = self.state.generation
            self.hear(JobState("failed", message, exit_code, True, generation, self.state.version))
        self._ended.set()

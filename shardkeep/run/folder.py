"""The run folder: what a job leaves behind for people and programs to read. Written by the coordinator's process.

config.yaml       the resolved config
code.json         digests of the code that the run began with (code.py); where the user's own modules are
page.json         the address of the job's page, without its token
coordinator.json  the coordinator's address, pid and what that is a number in
standing.json     what another coordinator process needs to take over; for this user only (standing-copy.json: a copy)
starts.json       when the job was started and resumed, at which steps (starts.py)
members.json      every member of the current generation
metrics.jsonl     one JSON object per record: progress, eval, phase, event
telemetry.jsonl   one JSON object per telemetry record of a process, where `telemetry` is on (telemetry_file.py)
summary.json      how the job ended; summary-STEPS.json of starts before it was resumed
checkpoints/      step-N/, where `checkpoint` is on (ps/checkpoints.py); written by worker 0 and the servers
recovery/         JOB/ROLE-INDEX/, what replaces a process that died, while the job runs; written by servers and workers
logs/             ROLE-INDEX.log
profile/          ROLE-INDEX.pt.trace.json, where `profile` is on; each written by its process
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardkeep.base.errors import ConfigError, UserError
from shardkeep.base.files import atomic_write, make_folder
from shardkeep.base.local_time import time_of_day
from shardkeep.base.machine.descriptors import when_free
from shardkeep.base.machine.pids import pid_space, start_of
from shardkeep.base.machine.versions import commit, machine, peak_rss_bytes, versions
from shardkeep.config import JobConfig
from shardkeep.run.code import code_of
from shardkeep.run.json_files import read_json, to_json
from shardkeep.run.new_folder import refuse_taken
from shardkeep.run.reader import RunReader
from shardkeep.run.starts import Starts
from shardkeep.run.state_files import NAMES as STANDING_NAMES
from shardkeep.run.state_files import StandingFiles
from shardkeep.run.telemetry_file import MOST_BYTES, TelemetryFile
from shardkeep.trust.view import view_token_path

Record = Mapping[str, Any]

NO_SUMMARY: Record = {
    "steps": 0,
    "samples": 0,
    "wall_s": 0.0,
    "samples_per_s": 0.0,
    "step_ms": {},
    "cpu_ms": {},
    "eval": None,
    "bytes": {
        "push": {},
        "pull": {},
        "tower": {},
        "read": {},
        "control": 0,
        "to_servers": 0,
        "from_servers": 0,
        "between_workers": 0,
        "total": 0,
        "per_sample": 0.0,
        "fp32": {},
    },
    "sockets": {},
    "staleness": {},
    "recoveries": [],
    "warnings": [],
    "tables": [],
    "processes": [],
    "state_digest": None,
}
"""The keys of every summary.json, for a job that ended before it could fill them."""


class RunFolder(RunReader):
    """Writes the files of one run: the coordinator's sink of records. Thread safe."""

    def __init__(self, path: str | Path, *, telemetry_bytes: int = MOST_BYTES) -> None:
        """`telemetry_bytes`: the most that telemetry.jsonl takes."""
        super().__init__(path)
        make_folder(self.logs)
        self._standing = StandingFiles(self.path)
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._starts = Starts(self.path)
        self._coordinates = False
        self._telemetry = TelemetryFile(self.telemetry_path, most_bytes=telemetry_bytes)

    @classmethod
    def create(cls, path: str | Path, config: JobConfig, *, code_folder: Path | None = None) -> RunFolder:
        """A new run folder with its config.yaml. Raises UserError where another run lives already.

        `code_folder`: where the user's own modules are; a run that continues needs to know."""
        refuse_taken(path)
        try:
            folder = cls(path, telemetry_bytes=config.telemetry.max_bytes)
            atomic_write(folder.config_path, config.to_yaml())
            folder.forget_token()  # of a job that was killed, if its folder's place and inode are this one's now
            folder._starts.begin()
            place = {} if code_folder is None else {"folder": str(code_folder)}
            facts = {**place, "digests": code_of(config, code_folder)}
            atomic_write(folder.path / "code.json", to_json(facts, indent=2) + "\n")
        except OSError as error:
            raise UserError(f"--run-dir {path}: cannot be written ({error.strerror or error})") from error
        return folder

    @classmethod
    def reopen(cls, path: str | Path, config: JobConfig, *, step: int = 0, samples: int = 0) -> RunFolder:
        """The folder of a run that continues, with its config as it is now. What told of its last start is gone, for
        members look there for the coordinator; its summary is summary-STEPS.json now. Raises UserError.

        `step`, `samples`: where the job continues."""
        try:
            folder = cls(path, telemetry_bytes=config.telemetry.max_bytes)
            folder._settle_killed()
            folder._starts.begin(step=step, samples=samples, summary=folder.summary())
            if (summary := folder.summary()) is not None:
                (folder.path / "summary.json").replace(folder.path / f"summary-{summary['steps']}.json")
            for name in ("coordinator.json", "members.json", *STANDING_NAMES):
                (folder.path / name).unlink(missing_ok=True)
            folder.forget_token()
            folder.forget_recovery()  # of a start whose launcher was killed
            atomic_write(folder.config_path, config.to_yaml())
        except OSError as error:
            raise UserError(f"--resume {path}: cannot be written ({error.strerror or error})") from error
        return folder

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keeps other launchers out of the folder. Raises UserError when one is in it."""
        try:
            lock = (self.path / ".lock").open("ab")
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror or error})") from error
        with lock as file:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{self.path}: a job is running in this folder") from None
            yield

    def forget_token(self) -> None:
        """For a job that is over."""
        with contextlib.suppress(OSError, ConfigError):
            self.token_path.unlink(missing_ok=True)
            self.token_path.with_suffix(".run").unlink(missing_ok=True)
            view_token_path(self.path).unlink(missing_ok=True)

    def forget_recovery(self) -> None:
        """Deletes what members kept for their replacements, once there is nobody left to replace."""
        shutil.rmtree(self.path / "recovery", ignore_errors=True)

    def coordinator(self, address: str, *, pid: int, command: Sequence[str] = ()) -> None:
        """Keeps where the coordinator listens; the launcher and `shardkeep status` wait for this file.

        `command`: what a person types to take over, once it has died; empty = a launcher does it."""
        facts = {
            "address": address,
            "pid": pid,
            "started": start_of(pid),
            "pid_space": pid_space(),
            **({"take_over": list(command)} if command else {}),
        }
        atomic_write(self.path / "coordinator.json", to_json(facts) + "\n")
        self._coordinates = True
        if before := self.member_list():  # another coordinator takes over
            rows = [{**m, "pid": pid} if m["role"] == "coordinator" else m for m in before]
            generation = before[0]["generation"]
            atomic_write(
                self.path / "members.json", to_json({"generation": generation, "members": rows}, indent=2) + "\n"
            )

    def members(self, generation: int, members: Sequence[Any]) -> None:
        """Rewrites members.json: the coordinator and all members (dataclasses with role, index, host, pid).

        `port` is where a member listens for others to dial, null where the transport chooses one itself.
        """
        rows = [{**dataclasses.asdict(m), "generation": generation} for m in members]
        first = read_json(self.path / "coordinator.json")
        if first is not None:
            host, _, port = str(first["address"]).rpartition(":")
            place = {"host": host, "pid": first["pid"], "port": int(port)}
            rows.insert(0, {"role": "coordinator", "index": 0, **place, "generation": generation})
        rows = [row if "port" in row else {**row, "port": None} for row in rows]
        text = to_json({"generation": generation, "members": rows}, indent=2)
        with self._lock:
            atomic_write(self.path / "members.json", text + "\n")

    def standing(self, record: Record) -> None:
        """Keeps what another coordinator process needs to continue with the job."""
        with self._lock:
            self._standing.write(to_json(record))

    def progress(self, record: Record) -> None:
        """Appends a record of kind progress (step, total_steps, epoch, samples, loss, samples_per_s) or eval."""
        self._append({"kind": "progress", **record})

    def event(self, record: Record) -> None:
        """Appends a record of kind phase or event."""
        self._append({"kind": "event", **record})

    def telemetry(self, record: Record) -> None:
        """Appends a record to telemetry.jsonl. If that fails, the record is lost; the first failure is logged."""
        self._telemetry.append(record)

    def finished(self, status: str, message: str, summary: Record | None) -> None:
        """Writes summary.json; keys the job could not fill are there, empty. A later call replaces it."""
        wall_s = self._starts.wall_s()
        elapsed = {"wall_s": time.monotonic() - self._start if wall_s is None else wall_s}
        known = {**NO_SUMMARY, **self._starts.reached(), **elapsed, **(summary or {}), "status": status}
        if self._coordinates:
            own = {"role": "coordinator", "index": 0, "peak_rss_bytes": peak_rss_bytes()}
            known |= {"processes": [own, *known["processes"]]}
        known |= {"recoveries": [*self._earlier_recoveries(), *known["recoveries"]]}
        known |= self._starts.totals(known)
        known |= {"versions": {**versions(), **known.get("versions", {})}}
        known |= {"machine": {**machine(), **known.get("machine", {})}, "commit": commit()}
        head = {"status": status, **({"message": message} if message else {})}
        text = to_json({**head, **{k: v for k, v in known.items() if k not in ("status", "message")}}, indent=2)
        with self._lock:
            atomic_write(self.path / "summary.json", text + "\n")
            self._standing.delete()

    def tested(self, metrics: Record) -> dict[str, Any]:
        """Adds the metrics on the test data to summary.json. Returns the summary."""
        summary = {**(self.summary() or {}), "test": dict(metrics)}
        atomic_write(self.path / "summary.json", to_json(summary, indent=2) + "\n")
        return summary

    def _settle_killed(self) -> None:
        """Writes the summary of a start that was killed before it could write one, from what it left."""
        facts = None if self.summary() is not None else self._starts.killed()
        if facts is not None:
            standing: Record = {}
            with contextlib.suppress(UserError):  # it is damaged
                standing = self._standing.read() or {}
            recoveries = (standing.get("recoveries") or {}).get("done", [])
            self.finished("killed", "its processes were killed", {**facts, "recoveries": list(recoveries)})

    def _earlier_recoveries(self) -> list[Any]:
        """Those of the starts before the job was resumed, which the last one's summary lists."""
        ended = sorted(self.path.glob("summary-*.json"), key=lambda path: path.stat().st_mtime_ns)
        before = read_json(ended[-1]) if ended else None
        return list((before or {}).get("recoveries", ()))

    def _append(self, record: Record) -> None:
        line = to_json({"time": time_of_day(), **record}) + "\n"
        with self._lock, when_free(lambda: self.metrics_path.open("a", encoding="utf-8")) as file:
            file.write(line)

"""The run folder: what a job leaves behind for people and programs to read. Written by the coordinator's process.

config.yaml       the resolved config
code.json         digests of the code that the run began with (code.py); where the user's own modules are
page.json         the address of the job's page, without its token
coordinator.N.json  the claim of coordinator N, empty until it listens: its address, pid and what that is a number in
standing.N.json   what another coordinator process needs to take over; for this user only (standing-copy.N.json: a copy)
starts.json       when the job was started and resumed, at which steps (starts.py)
members.json      every member of the current generation
metrics.jsonl     one JSON object per record: progress, eval, phase, event
catalogue.arrow   the items of a retrieval job; written by worker 0
telemetry.jsonl   one JSON object per telemetry record of a process, with `telemetry`; telemetry.1.jsonl: before it
summary.N.json    how the job ended, by coordinator N; summary-STEPS.json of starts before it was resumed
coordinator.json, summary.json  copies of those of the highest N, which leads, for people
checkpoints/      step-N/, where `checkpoint` is on (ps/checkpoints/folder.py); written by worker 0 and the servers
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

from shardkeep.base.errors import ConfigError, Superseded, UserError
from shardkeep.base.files import atomic_write, make_folder
from shardkeep.base.logs.local_time import time_of_day
from shardkeep.base.logs.log import EventLog
from shardkeep.base.machine.pids import pid_space, start_of
from shardkeep.base.machine.versions import commit, machine, peak_rss_bytes, versions
from shardkeep.base.net.addresses import split_address
from shardkeep.base.net.descriptors import when_free
from shardkeep.config import JobConfig
from shardkeep.records.json_text import to_json
from shardkeep.records.telemetry_file import MOST_BYTES, TelemetryFile
from shardkeep.run.json_files import CLAIM, number_of, numbered, read_json
from shardkeep.run.new_folder import refuse_taken
from shardkeep.run.origin.code import code_of
from shardkeep.run.reader import RunReader
from shardkeep.run.starts import Starts
from shardkeep.run.state_files import StandingFiles, forget_standing
from shardkeep.trust.view import view_token_path

Record = Mapping[str, Any]
_log = EventLog("run")

NO_BYTES: Record = {
    "push": {}, "pull": {}, "tower": {}, "read": {}, "control": 0, "to_servers": 0, "from_servers": 0,
    "between_workers": 0, "total": 0, "per_sample": 0.0, "fp32": {},
}  # fmt: skip
NO_SUMMARY: Record = {
    "steps": 0, "samples": 0, "wall_s": 0.0, "samples_per_s": 0.0, "step_ms": {}, "cpu_ms": {}, "eval": None,
    "bytes": NO_BYTES, "sockets": {}, "staleness": {}, "recoveries": [], "warnings": [], "tables": [],
    "processes": [], "state_digest": None,
}  # fmt: skip
"""The keys of every summary.json, for a job that ended before it could fill them."""


class RunFolder(RunReader):
    """Writes the files of one run: the coordinator's sink of records. Thread safe.

    One that has claimed a number writes no more, and raises Superseded, once another coordinator has claimed one."""

    def __init__(self, path: str | Path, *, telemetry_bytes: int = MOST_BYTES, number: int = 0) -> None:
        """`telemetry_bytes`: the most that telemetry takes. `number`: what this process has claimed already."""
        super().__init__(path)
        make_folder(self.logs)
        self._number = number
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._starts = Starts(self.path)
        self._coordinates = False
        self._torn = False  # metrics.jsonl may end in the middle of a line
        self._unkept: dict[str, tuple[int, str]] = {}  # what was not kept, how often, and the last warning
        self._telemetry = TelemetryFile(self.telemetry_path, most_bytes=telemetry_bytes)

    @classmethod
    def create(
        cls, path: str | Path, config: JobConfig, *, code_folder: Path | None = None, number: int = 0
    ) -> RunFolder:
        """A new run folder with its config.yaml. Raises UserError where another run lives already.

        `code_folder`: where the user's own modules are; a run that continues needs to know."""
        refuse_taken(path)
        try:
            folder = cls(path, telemetry_bytes=config.telemetry.max_bytes, number=number)
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
    def reopen(
        cls, path: str | Path, config: JobConfig, *, step: int = 0, samples: int = 0, number: int = 0
    ) -> RunFolder:
        """The folder of a run that continues, with its config as it is now. What told of its last start is gone, for
        members look there for the coordinator; its summary is summary-STEPS.json now. Raises UserError.

        `step`, `samples`: where the job continues."""
        try:
            folder = cls(path, telemetry_bytes=config.telemetry.max_bytes, number=number)
            if folder.number():
                folder.claim()  # so that nobody looks for the last coordinator
            summary = folder.last_summary() or folder._summary_of_killed()
            if summary is not None:
                atomic_write(folder.path / f"summary-{summary['steps']}.json", to_json(summary, indent=2) + "\n")
            folder._starts.begin(step=step, samples=samples, summary=summary)
            old = [name for name in folder.names() if number_of(name, "summary.json")]
            for name in (CLAIM, "members.json", "summary.json", *old):
                (folder.path / name).unlink(missing_ok=True)
            forget_standing(folder.path, folder._number + 1)
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
            except OSError:  # a file system without locks
                pass
            yield

    def forget_token(self) -> None:
        """For a job that is over."""
        with contextlib.suppress(OSError, ConfigError):
            self.token_path.unlink(missing_ok=True)
            self.token_path.with_suffix(".run").unlink(missing_ok=True)
            view_token_path(self.path).unlink(missing_ok=True)

    def forget_recovery(self) -> None:
        """Deletes what members kept for their replacements, once there is nobody left to replace."""
        if self.leads:
            shutil.rmtree(self.path / "recovery", ignore_errors=True)

    def claim(self) -> int:
        """Claims the next number for the coordinator that this process is, once; returns it. Raises OSError."""
        number = self.number()
        while not self._number:
            number += 1
            with contextlib.suppress(FileExistsError):  # another process has it, unseen by this one
                numbered(self.path, CLAIM, number).open("x").close()
                self._number = number
        return self._number

    @property
    def leads(self) -> bool:
        """Whether no coordinator has claimed a number after this process did, or of a launcher, leads elsewhere."""
        newest = self.number()
        if self._number or not newest:
            return newest <= self._number
        return self.coordinator_fact("pid_space") in ("", pid_space())

    def check_leads(self) -> None:
        """Raises Superseded if this process does not lead any more."""
        if not self.leads:
            raise Superseded(f"{self.path}: another coordinator leads the job; this one, {self._number}, ends")

    def coordinator(self, address: str, *, pid: int, command: Sequence[str] = ()) -> None:
        """Keeps where the coordinator listens; the launcher and `shardkeep status` wait for this file.

        `command`: what a person types to continue, once it has died; empty = a launcher does it."""
        facts = {
            "address": address,
            "pid": pid,
            "started": start_of(pid),
            "pid_space": pid_space(),
            **({"continue": list(command)} if command else {}),
        }
        self._publish(CLAIM, facts)
        forget_standing(self.path, self._number)  # its own is there by now
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
        self.check_leads()
        if first := self._coordinator():
            host, port = split_address(str(first["address"]))
            place = {"host": host, "pid": first["pid"], "port": port}
            rows.insert(0, {"role": "coordinator", "index": 0, **place, "generation": generation})
        rows = [row if "port" in row else {**row, "port": None} for row in rows]
        text = to_json({"generation": generation, "members": rows}, indent=2)
        path = self.path / "members.json"
        with self._outliving(path) if path.exists() else contextlib.nullcontext(), self._lock:
            atomic_write(path, text + "\n")

    def standing(self, record: Record) -> None:
        """Keeps what another coordinator process needs to continue with the job. One call at a time."""
        self.check_leads()
        files = StandingFiles(self.path, self._number)
        with self._outliving(files.path):
            try:
                files.write(to_json(record, compact=True))
            except OSError:
                forget_standing(self.path, self._number + 1)  # what is older would mislead
                raise
        self.check_leads()  # before a member learns of it: a successor may have read the state before

    def progress(self, record: Record) -> None:
        """Appends a record of kind progress (step, total_steps, epoch, samples, loss, samples_per_s) or eval."""
        self._append({"kind": "progress", **record})

    def event(self, record: Record) -> None:
        """Appends a record of kind phase or event. `unkept` of a record says what its warning is about."""
        self._append({"kind": "event", **record})
        if what := record.get("unkept"):
            who = f"{record.get('role')} {record.get('index')}"
            self._count(f"{who} {what}", str(record["text"]))

    def telemetry(self, record: Record) -> None:
        """Appends a record to telemetry.jsonl. If that fails, the record is lost; the first failure is logged."""
        self._telemetry.append(record)

    def finished(self, status: str, message: str, summary: Record | None) -> None:
        """Writes summary.json; keys the job could not fill are there, empty. A later call replaces it."""
        with self._lock:
            self._publish("summary.json", self._summary_of(status, message, summary))
            forget_standing(self.path, self.number() + 1)

    def amend(self, found: Record) -> dict[str, Any]:
        """Adds to the last summary, or changes what is there. Returns the summary, which is this coordinator's then."""
        summary = {**(self.last_summary() or {}), **found}
        self._publish("summary.json", summary)
        return summary

    def _publish(self, name: str, record: Record) -> None:
        """Writes the copy for people, then the file that counts: a launcher's is that of its coordinator."""
        self.check_leads()
        for path in dict.fromkeys((self.path / name, numbered(self.path, name, self._number or self.number()))):
            atomic_write(path, to_json(record, indent=2) + "\n")

    def _summary_of(self, status: str, message: str, summary: Record | None) -> dict[str, Any]:
        """A whole summary, with what this process and the folder know."""
        wall_s = self._starts.wall_s()
        elapsed = {"wall_s": time.monotonic() - self._start if wall_s is None else wall_s}
        known = {**NO_SUMMARY, **self._starts.reached(), **elapsed, **(summary or {}), "status": status}
        if self._coordinates:
            own = {"role": "coordinator", "index": 0, "peak_rss_bytes": peak_rss_bytes()}
            known |= {"processes": [own, *known["processes"]]}
        unkept = [text + (f" ({n} times; this is the last)" if n > 1 else "") for n, text in self._unkept.values()]
        known |= {"warnings": [*known["warnings"], *unkept]}
        known |= {"recoveries": [*self._earlier_recoveries(), *known["recoveries"]]}
        known |= self._starts.totals(known)
        known |= {"versions": {**versions(), **known.get("versions", {})}}
        known |= {"machine": {**machine(), **known.get("machine", {})}, "commit": commit()}
        head = {"status": status, **({"message": message} if message else {})}
        return {**head, **{k: v for k, v in known.items() if k not in ("status", "message")}}

    def _summary_of_killed(self) -> dict[str, Any] | None:
        """That of a start that was killed before it could write one, from what it left; None = there was no start."""
        if (facts := self._starts.killed()) is None:
            return None
        standing: Record = {}
        with contextlib.suppress(UserError):  # it is damaged
            standing = self._standing().read() or {}
        recoveries = (standing.get("recoveries") or {}).get("done", [])
        return self._summary_of("killed", "its processes were killed", {**facts, "recoveries": list(recoveries)})

    def _earlier_recoveries(self) -> list[Any]:
        """Those of the starts before the job was resumed, which the last one's summary lists."""
        ended = sorted(self.path.glob("summary-*.json"), key=lambda path: path.stat().st_mtime_ns)
        before = read_json(ended[-1]) if ended else None
        return list((before or {}).get("recoveries", ()))

    def _append(self, record: Record) -> None:
        """If that fails, the record is lost."""
        self.check_leads()
        line = to_json({"time": time_of_day(), **record}) + "\n"
        with self._outliving(self.metrics_path), self._lock:
            torn, self._torn = self._torn, True
            with when_free(lambda: self.metrics_path.open("a", encoding="utf-8")) as file:
                file.write("\n" + line if torn else line)
            self._torn = False

    @contextlib.contextmanager
    def _outliving(self, path: Path) -> Iterator[None]:
        """Loses what is written inside rather than the job, which does not need it. The first failure is logged."""
        try:
            yield
        except OSError as error:
            text = f"{path}: not written ({error.strerror or error}); the job continues without"
            _log.warning(text, once=str(path))
            self._count(path.name, text)

    def _count(self, what: str, text: str) -> None:
        self._unkept[what] = self._unkept.get(what, (0, ""))[0] + 1, text

"""OUT/journal.jsonl of an experiment: the facts that decide its results, each trial that began, and each that ended.

It outlives kill -9: a line is on disk before the runner goes on, and half a line at the end counts as none.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardkeep.base.config.differences import differences
from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import UserError
from shardkeep.base.machine.pids import start_of
from shardkeep.config import JobConfig
from shardkeep.run.origin.code import files_of

ORPHAN_S = 60.0
"""Seconds that trials get to end whose runner was killed: they notice on their own."""


@dataclass(frozen=True)
class Ended:
    """What became of a trial. `stopped`: early, because others beat it; `settings`: the values of the keys of `--over`;
    `value`: the metric of its model; `values`: the metric at each evaluation; `cause`: why it failed."""

    trial: str
    state: Literal["completed", "stopped", "failed"]
    settings: Mapping[str, Any] = field(default_factory=dict)
    value: float | None = None
    values: Sequence[float] = ()
    cause: str = ""
    seconds: float = 0.0


class Journal:
    """Opens the journal of a folder that `holding` keeps to this process. `begun`: trials that did not end, with their
    `settings`; `ended`: in order of their ends. Raises UserError where it is damaged."""

    def __init__(self, out: Path) -> None:
        self._out, self._path = out, out / "journal.jsonl"
        self.facts: dict[str, Any] = {}
        self.begun: dict[str, dict[str, Any]] = {}
        self.ended: dict[str, Ended] = {}
        text = self._path.read_bytes() if self._path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]
        try:
            for line in whole.splitlines():
                self._hear(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{self._path}: damaged ({error}); give --out a new folder") from error
        if whole != text:
            os.truncate(self._path, len(whole))

    def hold_to(self, facts: Mapping[str, Any]) -> None:
        """Keeps what decides the results of trials, by kind. Raises UserError if the trials here have other facts of a
        kind. Kinds may be added or left out, such as variants."""
        now, before = json.loads(json.dumps(facts)), self.facts
        known, again = ({kind: each[kind] for kind in now if kind in before} for each in (before, now))
        if (found := next(differences(known, again), None)) is not None:
            what = f"{'.'.join(found.keys[1:])}={found.before!r}, now it is {found.now!r}"
            what = f"another {found.keys[-1]} than there is now" if found.keys[0] == "code" else what
            raise UserError(f"--out {self._out}: has trials with {what}; give --out a new folder")
        if before | now != before:
            self._add({"facts": before | now})

    def await_orphans(self) -> None:
        """Waits for trials whose runner was killed. Raises UserError."""
        deadline = Deadline(ORPHAN_S)
        for name, trial in self.begun.items():
            while trial["started"] and start_of(trial["pid"]) == trial["started"]:
                if deadline.over:
                    raise UserError(f"--out {self._out}: trial {name} still runs, as process {trial['pid']}; stop it")
                time.sleep(0.02)

    def begin(self, trial: str, settings: Mapping[str, Any], pid: int) -> None:
        self._add({"began": trial, "settings": dict(settings), "pid": pid, "started": start_of(pid)})

    def end(self, ended: Ended) -> None:
        self._add(asdict(ended))

    def _add(self, record: dict[str, Any]) -> None:
        with self._path.open("ab") as file:
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._hear(record)

    def _hear(self, record: dict[str, Any]) -> None:
        if "facts" in record:
            self.facts = dict(record["facts"])
        elif "began" in record:
            self.begun[record["began"]] = record
        else:
            ended = Ended(**record)
            self.begun.pop(ended.trial, None)
            self.ended.pop(ended.trial, None)
            self.ended[ended.trial] = ended


def facts_of(job: JobConfig, code_folder: Path) -> dict[str, Any]:
    """What decides the results of all trials of a job, by kind: its settings, the code of shardkeep and the user's."""
    settings = job.model_dump(mode="json")
    if job.data.source == "synthetic" and not job.own_modules:
        del settings["data"]["root"]  # nothing is read there
    return {"job": settings, "code": files_of(job, code_folder)}

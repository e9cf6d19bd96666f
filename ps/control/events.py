"""The events of a job: the latest progress, evaluation and summary, and the last events in order.

Collects the records that a call adds, for the job to write. Knows no state of the job. Not thread safe.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from shardkeep.base.errors import ProtocolError
from shardkeep.base.logs.log import EventLog
from shardkeep.compression.ledger import merge_totals
from shardkeep.ps.control.records import REPORT_KINDS, Formation, Member, Record
from shardkeep.records.telemetry import check_record

EVENTS_KEPT = 500

_log = EventLog("control")


class Events:
    """Holds what Status shows. The sink has the full history."""

    def __init__(self) -> None:
        self.progress: Record = {}
        self.evaluation: Record = {}
        self.summary: Record | None = None
        self.warnings: list[str] = []
        self.figures: Record = {}
        """For the summary of a job that is stopped."""
        self.closing: Record | None = None
        """The summary of a job in which no worker reported one."""
        self._telemetry: dict[tuple[str, int], Record] = {}
        self._unwritten: list[tuple[str, Record]] = []
        self._events: deque[Record] = deque(maxlen=EVENTS_KEPT)
        self._formed: Record | None = None
        self._sequence = 0

    @property
    def events(self) -> tuple[Record, ...]:
        """The last events, and before them the last formation, if later events displaced it."""
        kept, formed = tuple(self._events), self._formed
        return kept if formed is None or formed["seq"] >= kept[0]["seq"] else (formed, *kept)

    @property
    def telemetry(self) -> tuple[Record, ...]:
        """The newest telemetry record of each process: coordinator, servers, workers, each by index."""
        return tuple(self._telemetry[process] for process in sorted(self._telemetry))

    def report(self, member: Member, kind: str, record: Record) -> None:
        """Takes one record of a member. Raises ProtocolError for an unknown kind and for telemetry that is none."""
        if kind not in REPORT_KINDS:
            raise ProtocolError(f"{member} reported a {kind!r}; allowed: {', '.join(REPORT_KINDS)}")
        leads = member.role == "worker" and member.index == 0
        if kind == "summary":
            if not leads:
                raise ProtocolError(f"{member} reported a summary; only worker 0 does")
            self.summary = record
            return
        if kind == "telemetry":
            check_record(record, str(member))
            self.take_telemetry(member.role, member.index, {**record, "pid": member.pid, "host": member.host})
            return
        full = {**record, "kind": kind, "role": member.role, "index": member.index}
        if kind == "progress":
            self.progress = full if leads or not self.progress else self.progress
            self._unwritten.append((kind, full))
            return
        if kind == "eval":
            self.evaluation = full
        if kind == "event" and leads:
            self.figures = record.get("figures", self.figures)
        self._add(full)

    def take_telemetry(self, role: str, index: int, record: Record) -> None:
        """Takes a telemetry record of a process, the coordinator's too."""
        head = {"time": record["time"], "kind": "telemetry", "role": role, "index": index}
        full = {**head, **record, **head}
        self._telemetry[role, index] = full
        self._unwritten.append(("telemetry", full))

    def whole_summary(self) -> Record | None:
        """The summary of a job that is over. That of a loop of the user's own has the counts of trainer 0 alone: those
        of the others are in their last records."""
        summary = self.summary
        others = [record for (role, index), record in self._telemetry.items() if role == "worker" and index]
        if summary is None or not summary.get("loop") or not others:
            return summary
        staleness: Counter[str] = Counter(summary["staleness"])
        for record in others:
            staleness.update(record["staleness"])
        fp32 = {}
        if "fp32" in summary["bytes"]:
            counts = [summary["bytes"]["fp32"], *(record["fp32_bytes"] for record in others)]
            fp32 = {"fp32": {way: sum(one[way] for one in counts) for way in counts[0]}}
        return {
            **summary,
            "bytes": merge_totals([summary["bytes"], *(record["bytes"] for record in others)]) | fp32,
            "staleness": {steps: staleness[steps] for steps in sorted(staleness, key=int)},
            "dropped_rows": summary["dropped_rows"] + sum(record["dropped_rows"] for record in others),
        }

    def note(self, text: str, **facts: Any) -> None:
        """Adds an event of the coordinator itself and logs it."""
        _log.info(text)
        if (member := facts.get("member")) is not None:
            facts["member"] = {"role": member.role, "index": member.index}
        self._tell({"kind": "event", "text": text, **facts})

    def warn(self, text: str) -> None:
        """Adds a warning to the events, the log and the summary."""
        _log.warning(text)
        self.warnings.append(text)
        self._tell({"kind": "event", "text": f"warning: {text}", "warning": text})

    def formed(self, formation: Formation, text: str) -> None:
        """Adds the event of a formation, with the tables and what journals survive."""
        tables = [{"name": t.name, "dim": t.dim, "optimizer": t.optimizer.name} for t in formation.tables]
        self.note(text, phase="formed", tables=tables, journal=formation.journal)
        self._formed = self._events[-1]

    def tell(self, phase: str, record: Record) -> None:
        """Adds a phase of the job, which the launcher shows."""
        _log.info(str(record["text"]))
        self._tell({"kind": "phase", "phase": phase, **record})

    def restore(self, summary: Record | None, warnings: Sequence[str], recoveries: Sequence[Record]) -> None:
        """Takes over what a coordinator that died has written: for Status only."""
        self.summary, self.warnings = summary, list(warnings)
        for record in recoveries:
            self._remember({"kind": "phase", "phase": "recovery", **record, "role": "coordinator", "index": 0})

    def unwritten(self) -> list[tuple[str, Record]]:
        """Returns kind and record of each record added since the last call, in order."""
        records, self._unwritten = self._unwritten, []
        return records

    def _tell(self, record: Record) -> None:
        self._add({**record, "role": "coordinator", "index": 0})

    def _add(self, record: Record) -> None:
        self._remember(record)
        self._unwritten.append(("event", record))

    def _remember(self, record: Record) -> None:
        self._sequence += 1
        self._events.append({**record, "seq": self._sequence})

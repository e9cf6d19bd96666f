"""What members reported, in memory: latest progress, evaluation and summary, and the last events in order.

Passes each record on to the sink (the run folder). Knows no state of the job. Not thread safe.
"""

from __future__ import annotations

from collections import deque
from datetime import datetime
from typing import Any

from shardkeep.base.errors import ProtocolError
from shardkeep.base.log import EventLog
from shardkeep.ps.control.records import REPORT_KINDS, Formation, JobSink, Member, Record

EVENTS_KEPT = 500

_log = EventLog("control")


def time_of_day() -> str:
    """Now, as the lines of metrics.jsonl have it: local, ISO 8601."""
    return datetime.now().isoformat(timespec="milliseconds")


class Chronicle:
    """Keeps what Status shows; the full history is the sink's."""

    def __init__(self, sink: JobSink) -> None:
        self.progress: Record = {}
        self.evaluation: Record = {}
        self.summary: Record | None = None
        self.warnings: list[str] = []
        self.figures: Record = {}  # of the summary of a job that is stopped
        self._sink = sink
        self._events: deque[Record] = deque(maxlen=EVENTS_KEPT)
        self._formed: Record | None = None
        self._sequence = 0

    @property
    def events(self) -> tuple[Record, ...]:
        """The last ones, and before them the last formation, where later events have displaced it."""
        kept, formed = tuple(self._events), self._formed
        return kept if formed is None or formed["seq"] >= kept[0]["seq"] else (formed, *kept)

    def report(self, member: Member, kind: str, record: Record) -> None:
        """Takes one record of a member. Raises ProtocolError (unknown kind), or the sink's OSError."""
        if kind not in REPORT_KINDS:
            raise ProtocolError(f"{member} reported a {kind!r}; allowed: {', '.join(REPORT_KINDS)}")
        leads = member.role == "worker" and member.index == 0
        if kind == "summary":
            if not leads:
                raise ProtocolError(f"{member} reported a summary; only worker 0 does")
            self.summary = record
            return
        full = {**record, "kind": kind, "role": member.role, "index": member.index}
        if kind == "progress":
            self.progress = full if leads or not self.progress else self.progress
            self._sink.progress(full)
            return
        if kind == "eval":
            self.evaluation = full
        if kind == "event" and leads:
            self.figures = record.get("figures", self.figures)
        self._remember(full)
        self._sink.event(full)

    def note(self, text: str, **facts: Any) -> None:
        """An event of the coordinator itself: one line in its log too."""
        _log.info(text)
        self._tell({"kind": "event", "text": text, **facts})

    def warn(self, text: str) -> None:
        """What the user should know, and change perhaps: in the log, among the events and in the summary."""
        _log.warning(text)
        self.warnings.append(text)
        self._tell({"kind": "event", "text": f"warning: {text}"})

    def formed(self, formation: Formation, text: str) -> None:
        """The event of a formation, which tells the tables, too."""
        tables = [{"name": t.name, "dim": t.dim, "optimizer": t.optimizer.name} for t in formation.tables]
        self.note(text, tables=tables)
        self._formed = self._events[-1]

    def tell(self, phase: str, record: Record) -> None:
        """A phase of the job, which the launcher shows."""
        _log.info(str(record["text"]))
        self._tell({"kind": "phase", "phase": phase, **record})

    def recall(self, phase: str, record: Record) -> None:
        """A phase that another coordinator has told: for Status alone."""
        self._remember({"kind": "phase", "phase": phase, **record, "role": "coordinator", "index": 0})

    def _tell(self, record: Record) -> None:
        record = {**record, "role": "coordinator", "index": 0}
        self._remember(record)
        self._sink.event(record)

    def _remember(self, record: Record) -> None:
        self._sequence += 1
        self._events.append({**record, "seq": self._sequence})

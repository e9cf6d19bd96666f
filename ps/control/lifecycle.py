"""The state of a job and its legal changes. Knows no members, no sink.

           ┌─> recovering ─┐
forming ───┴─> training <──┴──> completed
   │               │
   ├───────────────┼──> failed      (recovering goes there, too)
   └───────────────┴──> stopping ──> stopped      (completed, if the last step was trained by then)
"""

from __future__ import annotations

from dataclasses import replace

from shardkeep.ps.control.records import JobState

FORMING = JobState()


class Lifecycle:
    """One job's state. The first failure stays, unless it was only a symptom and its cause shows later."""

    def __init__(self, now: JobState = FORMING, *, since: float = 0.0) -> None:
        self.now = now
        self.since = since
        """The time, by the job's clock, since which the group forms."""
        self._symptom = False

    @property
    def forms(self) -> bool:
        """Whether members must still join."""
        return self.now.state in ("forming", "recovering")

    @property
    def running(self) -> bool:
        """Neither over nor about to be."""
        return self.now.state in ("forming", "training", "recovering")

    def formed(self, generation: int) -> None:
        self._become("training", generation=generation, message="")

    def recovering(self, message: str, *, since: float) -> None:
        """Ends the generation; the members form another one."""
        self.since = since
        self._become("recovering", message=message)

    def complete(self) -> None:
        self._become("completed", exit_code=0)

    def stopping(self, reason: str) -> None:
        self._become("stopping", message=reason)

    def stopped(self, message: str) -> None:
        self._become("stopped", message=message, exit_code=1)

    def fail(self, message: str, *, exit_code: int = 1, lost: bool = False, symptom: bool = False) -> bool:
        """Returns whether this failure is now the job's."""
        better = self.now.state == "failed" and self._symptom and not symptom
        if not (self.running or self.now.state == "stopping" or better):
            return False
        self._symptom = symptom
        self._become("failed", message=message, exit_code=exit_code, lost=lost)
        return True

    def fail_unwritten(self, message: str) -> None:
        """Fails a job whose last change cannot be written, in place of that change."""
        self._symptom = False
        self._become("failed", message=message, exit_code=1, lost=False)

    def _become(self, state: str, **changes: object) -> None:
        self.now = replace(self.now, state=state, version=self.now.version + 1, **changes)  # type: ignore[arg-type]

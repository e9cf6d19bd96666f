"""How a job ended: its summary, or one line for the user that summary.json also holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardkeep.base.errors import JobError, JobStopped, UserError
from shardkeep.config import JobConfig
from shardkeep.launch.processes.children import Death
from shardkeep.ps.control.records import TRAINED
from shardkeep.run.checkpoints import out_of_grace
from shardkeep.run.folder import RunFolder


@dataclass(frozen=True)
class Ending:
    """What the launcher knows about the end of a job, and the conclusion that it draws."""

    config: JobConfig
    folder: RunFolder
    step: int | None
    """The last trained step; None = no step yet."""
    out_of_grace: bool = False
    """Whether the job did not stop within `liveness.grace_s`."""
    given_up: bool = False
    """Whether the launcher ended the job because of a death, before the coordinator reported the job's end."""
    no_take_over: str = ""
    """The reason why no coordinator could take over, as the end of a message."""

    def conclude(self, deaths: Sequence[Death], *, interrupted: bool, heard: Callable[[Death], bool]) -> dict[str, Any]:
        """Returns the summary of a job whose steps are all trained. Raises for any other, with the message that
        summary.json holds.

        Args:
            deaths: The roles that ended badly, the first to end first.
            interrupted: Whether the launcher received Ctrl-C or SIGTERM.
            heard: Whether the coordinator knew of a death when it reported the job's end.
        """
        summary = self.folder.summary() or {}
        status = summary.get("status")
        if status in TRAINED:
            return summary
        symptom = summary.pop("symptom", False) and bool(deaths) and not heard(deaths[0])
        if self.given_up or symptom or (status == "stopped" and self.out_of_grace):  # the launcher knows better
            summary.pop("message", None)
            status = None if self.given_up and status == "stopped" else status
        if status == "stopped" or (status is None and interrupted):
            raise JobStopped(self._settled(summary, "stopped", self._stopped_text()))
        message = self._settled(summary, "failed", self._failed_text(deaths))
        if any(death.code == UserError.exit_code for death in deaths):
            raise UserError(message)
        raise JobError(f"{message}; logs: {self.folder.logs}")

    def _settled(self, summary: Mapping[str, Any], status: str, text: str) -> str:
        """Returns the coordinator's message, or writes and returns `text` if there is none."""
        if message := str(summary.get("message") or ""):
            return message
        try:
            self.folder.finished(status, text, summary or {"steps": self.step or 0})
        except OSError as error:
            return f"{text}; {self.folder.path}: cannot be written ({error.strerror or error})"
        return text

    def _stopped_text(self) -> str:
        late = f"; {out_of_grace(self.config, self.folder.path)}" if self.out_of_grace else ""
        return f"stopped {'before the first step' if self.step is None else f'at step {self.step}'}{late}"

    def _failed_text(self, deaths: Sequence[Death]) -> str:
        last = f"last step {self.step}" if self.step is not None else "before the first step"
        ended = f"{deaths[0].text()}, {last}" if deaths else f"the roles ended without a summary, {last}"
        return ended + self.no_take_over

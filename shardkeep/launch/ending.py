"""How a job ended: its summary, or one line for the user that summary.json also holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardkeep.base.errors import JobError, JobStopped, UserError
from shardkeep.config import JobConfig
from shardkeep.launch.children import Death
from shardkeep.run.checkpoints import out_of_grace
from shardkeep.run.folder import RunFolder


class Ending:
    """Collects what the supervisor knows about the end of the job, and draws the conclusion."""

    def __init__(self, config: JobConfig, folder: RunFolder, *, step: int | None) -> None:
        """`step`: the last trained step; None = no step yet."""
        self._config, self._folder = config, folder
        self.step = step
        self.out_of_grace = False
        """Whether the job did not stop within `liveness.grace_s`."""
        self.given_up = False
        """Whether the launcher ended the job because of a death, before the coordinator reported the job's end."""
        self.no_take_over = ""
        """The reason why no coordinator could take over, as the end of a message."""

    def conclude(self, deaths: Sequence[Death], *, interrupted: bool, heard: Callable[[Death], bool]) -> dict[str, Any]:
        """Returns the summary of a completed job. Raises for any other, with the message that summary.json holds.

        Args:
            deaths: The roles that ended badly, the likely cause first.
            interrupted: Whether the launcher received Ctrl-C or SIGTERM.
            heard: Whether the coordinator knew of a death when it reported the job's end.
        """
        summary = self._folder.summary() or {}
        status = summary.get("status")
        if status == "completed":
            return summary
        if status == "stopped" and (self.given_up or self.out_of_grace):  # the launcher stopped it and knows why
            summary = {key: value for key, value in summary.items() if key != "message"}
            status = None if self.given_up else status
        if status == "stopped" or (status is None and interrupted):
            raise JobStopped(self._settled(summary, "stopped", self._stopped_text()))
        cause = next((death for death in deaths if death.by_signal and not heard(death)), None)
        message = self._settled(summary, "failed", self._failed_text(deaths), cause=cause)
        if any(death.code == UserError.exit_code for death in deaths):
            raise UserError(message)
        raise JobError(f"{message}; logs: {self._folder.logs}")

    def _settled(self, summary: Mapping[str, Any], status: str, text: str, *, cause: Death | None = None) -> str:
        """Returns the coordinator's message, or writes and returns `text`.

        `text` is used if there is no message, or if the message does not name `cause`, which the coordinator did not
        know: it then blames a process that only lost its peer."""
        message = str(summary.get("message") or "")
        if message and (cause is None or f"(pid {cause.pid} " in message):
            return message
        try:
            self._folder.finished(status, text, summary or {"steps": self.step or 0})
        except OSError as error:
            return f"{text}; {self._folder.path}: cannot be written ({error.strerror or error})"
        return text

    def _stopped_text(self) -> str:
        late = f"; {out_of_grace(self._config, self._folder.path)}" if self.out_of_grace else ""
        return f"stopped {'before the first step' if self.step is None else f'at step {self.step}'}{late}"

    def _failed_text(self, deaths: Sequence[Death]) -> str:
        last = f"last step {self.step}" if self.step is not None else "before the first step"
        ended = f"{deaths[0].text()}, {last}" if deaths else f"the roles ended without a summary, {last}"
        return ended + self.no_take_over

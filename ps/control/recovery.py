"""What a coordinator does when a member or a whole generation is lost."""

from __future__ import annotations

from collections.abc import Callable

from shardkeep.base.exit_codes import signal_left_on
from shardkeep.ps.control.ending import Ending
from shardkeep.ps.control.job import Job
from shardkeep.ps.control.membership import Seat


class Recovery:
    """Counts deaths and ends generations. Call it within a transaction.

    Args:
        job: What it changes.
        ending: Ends a job that cannot recover.
        close_store: Closes the store of a generation that ends, so that members that still form it stop at once.
    """

    def __init__(self, job: Job, ending: Ending, close_store: Callable[[], None]) -> None:
        self._job = job
        self._ending = ending
        self._close_store = close_store

    def lose(self, seat: Seat, message: str) -> None:
        """Declares a member dead."""
        job, member = self._job, seat.member
        seat.lost = True
        job.events.note(message, lost=member.role, lost_index=member.index)
        if job.life.now.state == "stopping":
            self._ending.stop_if_idle()
        elif job.events.summary is not None and job.life.running:  # every step is trained
            self._ending.complete_if_all_left()
        elif not job.life.running:
            self._ending.fail(message, lost=True)
        elif (problem := job.recoveries.count_death(member, message, unsent_rows=seat.unsent_rows)) is not None:
            self._ending.fail(problem, lost=True)
        elif job.life.now.state == "training":
            self.end_generation()
        elif job.life.now.state == "recovering":  # the cause of a death is better than its symptoms
            job.life.recovering(job.recoveries.cause, since=job.life.since)

    def end_generation(self, symptom: str = "") -> None:
        """Makes the members leave the running generation and form another one. `symptom`: why, if nobody's death is
        known."""
        job = self._job
        if symptom and (problem := job.recoveries.seen(symptom)) is not None:
            self._ending.fail(problem, symptom=True)
            return
        left = next((seat for seat in job.members.seats("worker") if seat.left_code is not None), None)
        if left is not None:  # a member that left is not replaced: the next generation would never form
            text = f"{job.recoveries.cause}; {left.member} had left by then, and nobody can replace it"
            self._ending.fail(text, lost=not symptom, symptom=bool(symptom))
            return
        for seat in job.members.seats():
            seat.joined = False
        job.life.recovering(job.recoveries.cause, since=job.clock())
        self._close_store()
        job.events.note(f"recovering: {job.recoveries.cause}")

    def leave(self, seat: Seat, code: int, message: str, *, symptom: bool, refused: bool) -> None:
        """Records that a member leaves with an exit code."""
        if signal_left_on(code) is not None:
            if not seat.gone:
                self.lose(seat, f"{seat.member} {message}, {self.last_step(seat)}")
        elif refused and self._job.recoveries.on and self._job.life.running:
            seat.lost = True
            self._job.events.note(f"{seat.member} was refused: {message}")
        elif seat.left_code is None:
            seat.left_code = code
            self._after_leaving(seat, message, symptom)

    def let_go(self, seat: Seat) -> None:
        """Lets a worker that joins after the last step leave."""
        if self._job.life.running and seat.member.role == "worker" and seat.left_code is None:
            seat.left_code = 0
            self._ending.complete_if_all_left()

    def last_step(self, seat: Seat) -> str:
        """Returns, for a message, the step of a lost member, or else of the job. Servers count no steps."""
        job = self._job
        steps = [s.step for s in job.members.seats("worker")] + [int(job.events.progress.get("step", -1))]
        if max(steps) < 0 or (seat.member.role == "worker" and seat.step >= 0):
            return seat.last_step
        return f"the job was at step {max(steps)}{' or later' if job.recoveries.untold else ''}"

    def _after_leaving(self, seat: Seat, message: str, symptom: bool) -> None:
        job, code = self._job, seat.left_code or 0
        why = f": {message}" if message else ""
        job.events.note(f"{seat.member} left with code {code}{why}")
        state = job.life.now.state
        if state == "stopping":
            self._ending.stop_if_idle()
        elif code == 2:  # the user's own mistake: the message names a file or a key, not a process
            self._ending.fail(message or f"{seat.member} refused its input", exit_code=2)
        elif code:
            self._ending.fail(f"{seat.member} failed (exit code {code}){why}", symptom=symptom)
        elif state == "forming" or (job.life.running and seat.member.role == "server"):
            self._ending.fail(f"{seat.member} left before the job was done{why}")
        elif state == "recovering" and job.events.summary is None:
            self._ending.fail(f"{job.recoveries.cause}; {seat.member} left before the job was done{why}")
        elif job.life.running:
            self._ending.complete_if_all_left()

"""How members leave a job, and how it ends by that: completed, incomplete, failed or stopped."""

from __future__ import annotations

from collections.abc import Callable

from shardkeep.base.deadlines import SILENCE_S
from shardkeep.base.exit_codes import signal_left_on
from shardkeep.ps.control.job import CoordinatedJob
from shardkeep.ps.control.membership import Seat


class Departures:
    """Counts deaths, ends generations, and ends the job once nobody is left. Call it within a transaction.

    Args:
        job: What it changes.
        close_store: Closes the store of a generation that ends, so that members that still form it stop at once.
    """

    def __init__(self, job: CoordinatedJob, close_store: Callable[[], None]) -> None:
        self._job = job
        self._close_store = close_store
        self.moves = 0
        """Grows with every sign that a member moves."""
        self._stop_limit_s, self._stop_by, self._stop_moves = SILENCE_S, job.clock() + SILENCE_S, True

    def lose(self, seat: Seat, message: str, *, reason: str = "") -> None:
        """Declares a member dead. `reason`: how its process ended; "" = nobody knows."""
        job, member = self._job, seat.member
        seat.lost, job.life.came = True, job.clock()
        facts = {"lost": member.role, "lost_index": member.index}
        job.events.note(message, phase="lost", **({"reason": reason} if reason else {}), **facts)
        if job.life.now.state == "stopping":
            self._stop_if_idle()
        elif job.events.summary is not None and job.life.running:  # every step is trained
            self._complete_if_all_left()
        elif not job.life.running:
            job.life.fail(message, lost=True)
        elif (problem := job.recoveries.count_death(member, message, seat.unsent_rows, reason)) is not None:
            job.life.fail(problem, lost=True)
        elif job.life.now.state == "training":
            self.end_generation()
        elif job.life.now.state == "recovering":  # the cause of a death is better than its symptoms
            job.life.recovering(job.recoveries.cause, since=job.life.since)

    def give_up(self, text: str) -> None:
        """Fails a job that needs the member which nobody starts again."""
        job = self._job
        if job.life.running and job.events.summary is None:
            job.life.fail(f"{text}; its launcher starts no other", lost=True)

    def end_generation(self, symptom: str = "") -> None:
        """Makes the members leave the running generation and form another one. `symptom`: why, if nobody's death is
        known."""
        job = self._job
        if symptom and (problem := job.recoveries.seen(symptom)) is not None:
            job.life.fail(problem, symptom=True)
            return
        left = next((seat for seat in job.members.seats("worker") if seat.left_code is not None), None)
        if left is not None:  # a member that left is not replaced: the next generation would never form
            text = f"{job.recoveries.cause}; {left.member} had left by then, and nobody can replace it"
            job.life.fail(text, lost=not symptom, symptom=bool(symptom))
            return
        for seat in job.members.seats():
            seat.joined = False
        job.life.recovering(job.recoveries.cause, since=job.clock())
        self._close_store()
        job.events.note(f"recovering: {job.recoveries.cause}", phase="recovering", reason=job.recoveries.cause)

    def leave(self, seat: Seat, code: int, message: str, *, symptom: bool, refused: bool) -> None:
        """Records that a member leaves with an exit code."""
        if signal_left_on(code) is not None:
            if not seat.gone:
                self.lose(seat, f"{seat.member} {message}, {self.last_step(seat)}")
        elif refused and self._job.recoveries.on and self._job.life.running:
            seat.lost = True
            self._job.events.note(f"{seat.member} was refused: {message}", phase="refused")
        elif seat.left_code is None:
            seat.left_code = code
            self._after_leaving(seat, message, symptom)

    def stop(self, reason: str, limit_s: float | None) -> None:
        """Asks workers to finish their step and leave. The job is over after `limit_s` seconds in any case; None =
        after SILENCE_S without a row of long work. A later call can only shorten the time."""
        job, now = self._job, self._job.clock()
        running, whole_s = job.life.running, SILENCE_S if limit_s is None else limit_s
        if running or now + whole_s < self._stop_by:
            self._stop_limit_s, self._stop_by, self._stop_moves = whole_s, now + whole_s, limit_s is None
        if running:
            job.life.stopping(reason)
            job.events.note(f"stopping: {reason}", phase="stopping", reason=reason)
            self._stop_if_idle()

    def moved(self, seat: Seat) -> None:
        """A member's phase changes, as with each row of long work: limits of silence count from now on."""
        self.moves += 1
        seat.moved = self._job.life.came = now = self._job.clock()
        if self._stop_moves:
            self._stop_by = now + SILENCE_S

    def stop_if_late(self) -> None:
        """Ends a stopping job once its time is over."""
        if self._job.life.now.state == "stopping" and self._job.clock() > self._stop_by:
            self._stopped(self._late())

    def let_go(self, seat: Seat) -> None:
        """Lets a worker that joins after the last step leave."""
        if self._job.life.running and seat.member.role == "worker" and seat.left_code is None:
            seat.left_code = 0
            self._complete_if_all_left()

    def last_step(self, seat: Seat) -> str:
        """Returns, for a message, the step of a lost member, or else of the job. Servers count no steps."""
        job = self._job
        steps = [s.step for s in job.members.seats("worker")] + [int(job.events.progress.get("step", -1))]
        if max(steps) < 0 or (seat.member.role == "worker" and seat.step >= 0):
            return seat.last_step
        return f"the job was at step {max(steps)}{' or later' if job.recoveries.without_step else ''}"

    def _after_leaving(self, seat: Seat, message: str, symptom: bool) -> None:
        job, code = self._job, seat.left_code or 0
        why = f": {message}" if message else ""
        job.events.note(f"{seat.member} left with code {code}{why}", phase="left", member=seat.member, code=code)
        state = job.life.now.state
        if state == "stopping":
            self._stop_if_idle()
        elif code == 2:  # the user's own mistake: the message names a file or a key, not a process
            job.life.fail(message or f"{seat.member} refused its input", exit_code=2)
        elif code:
            job.life.fail(f"{seat.member} failed (exit code {code}){why}", symptom=symptom)
        elif state == "forming" or (job.life.running and seat.member.role == "server"):
            job.life.fail(f"{seat.member} left before the job was done{why}")
        elif state == "recovering" and job.events.summary is None:
            job.life.fail(f"{job.recoveries.cause}; {seat.member} left before the job was done{why}")
        elif job.life.running:
            self._complete_if_all_left()

    def _stop_if_idle(self) -> None:
        """Ends a stopping job once no worker is left."""
        if self._job.events.summary is not None:  # the stop came after the last step: the job is done
            self._complete_if_all_left()
        elif all(seat.gone for seat in self._job.members.seats("worker")):
            self._stopped()

    def _complete_if_all_left(self) -> None:
        """Completes the job once every worker has left."""
        job = self._job
        if not all(seat.gone for seat in job.members.seats("worker")):
            return
        if job.events.summary is None:
            job.life.fail("all workers are done, but worker 0 reported no summary")
        else:
            unseen = job.formation is not None and job.formation.checkpoints == ""
            lacks = "the model is not saved: the members share no folder for checkpoints" if unseen else ""
            job.life.complete(job.events.summary.pop("lacks", lacks))

    def _late(self) -> str:
        """Returns a remark on members that did not leave in time."""
        late, saved = self._job.members.present(), self._job.recoveries.saved_step
        checkpoint = f"the last checkpoint is that of step {saved}" if saved else "there is no checkpoint"
        members = f"{len(late)} {'member' if len(late) == 1 else 'members'} did not leave in {self._stop_limit_s:g} s"
        last = max(late, key=lambda seat: seat.moved)
        return f" ({members}; {last.member} was {last.last_step}; {checkpoint})"

    def _stopped(self, remark: str = "") -> None:
        job = self._job
        saved = job.recoveries.saved_step or -1  # may be the checkpoint of the end, later than any heartbeat
        step = max([saved, *(seat.step for seat in job.members.seats("worker"))])
        step = step if step >= 0 else int(job.events.progress.get("step", -1))  # told before a heartbeat was
        where = f"at step {step}" if step >= 0 else "before the first step"
        why = {"stopped_by": job.life.now.message}
        job.events.closing = why | ({"steps": step} if step >= 0 else {}) | job.events.figures
        job.life.stopped(f"stopped {where}: {job.life.now.message}{remark}")

"""How a job ends: completed, failed or stopped."""

from __future__ import annotations

from shardkeep.ps.control.job import Job

STOP_PATIENCE_S = 600.0
"""Seconds after which a stopping job is over, even if members have not left."""


class Ending:
    """Ends the job. Call it within a transaction."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._stop_limit_s = STOP_PATIENCE_S
        self._stop_by = job.clock() + STOP_PATIENCE_S

    def fail(self, message: str, *, exit_code: int = 1, lost: bool = False, symptom: bool = False) -> None:
        """Fails the job. `lost`: because of a lost member. `symptom`: a better message may follow."""
        self._job.life.fail(message, exit_code=exit_code, lost=lost, symptom=symptom)

    def stop(self, reason: str, limit_s: float) -> None:
        """Asks workers to finish their step and leave. The job is over after `limit_s` seconds in any case. A later
        call can only shorten the time."""
        job, now = self._job, self._job.clock()
        running = job.life.running
        if running or now + limit_s < self._stop_by:
            self._stop_limit_s, self._stop_by = limit_s, now + limit_s
        if running:
            job.life.stopping(reason)
            job.events.note(f"stopping: {reason}")
            self.stop_if_idle()

    def stop_if_idle(self) -> None:
        """Ends a stopping job once no worker is left."""
        if self._job.events.summary is not None:  # the stop came after the last step: the job is done
            self.complete_if_all_left()
        elif all(seat.gone for seat in self._job.members.seats("worker")):
            self._stopped()

    def stop_if_late(self) -> None:
        """Ends a stopping job once its time is over."""
        if self._job.life.now.state == "stopping" and self._job.clock() > self._stop_by:
            self._stopped(self._late())

    def complete_if_all_left(self) -> None:
        """Completes the job once every worker has left."""
        job = self._job
        if not all(seat.gone for seat in job.members.seats("worker")):
            return
        if job.events.summary is None:
            self.fail("all workers are done, but worker 0 reported no summary")
        else:
            job.life.complete()

    def _late(self) -> str:
        """Returns a remark on members that did not leave in time."""
        late, saved = len(self._job.members.present()), self._job.recoveries.saved_step
        checkpoint = f"the last checkpoint is that of step {saved}" if saved else "there is no checkpoint"
        members = f"{late} {'member' if late == 1 else 'members'} did not leave in {self._stop_limit_s:g} s"
        return f" ({members}; {checkpoint})"

    def _stopped(self, remark: str = "") -> None:
        job = self._job
        saved = job.recoveries.saved_step or -1  # may be the checkpoint of the end, later than any heartbeat
        step = max([saved, *(seat.step for seat in job.members.seats("worker"))])
        where = f"at step {step}" if step >= 0 else "before the first step"
        job.events.closing = ({"steps": step} if step >= 0 else {}) | job.events.figures
        job.life.stopped(f"stopped {where}: {job.life.now.message}{remark}")

"""Where a generation continues, and how often a member may die: by a clock that the test turns."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from shardkeep.base.errors import JobError, PlaceLost, UserError
from shardkeep.ps.control.records import ResumeRange, Role
from shardkeep.ps.control.recovery import Losses
from tests.support.cases import every
from tests.support.control_job import formed
from tests.support.recovering import Recovering, checkpoint, held, reported, take_over


def test_a_death_ends_the_generation_and_its_replacement_forms_the_next() -> None:
    job = Recovering()
    first = job.form()
    assert first.restores and job.closed == 0
    job.coordinator.heartbeat("worker-0-100", step=4)
    job.kill("server", 0)
    assert (job.state.state, job.state.generation, job.closed) == ("recovering", 1, 1)
    assert job.come_back("worker", 0) is None  # a stalled call must not get the old formation
    again = job.recover()
    assert (again.generation, again.start_step, again.source, again.lacking) == (2, 4, 0, ())
    assert not again.restores and [m.pid for m in again.members] == [200, 100, 100]
    assert (job.state.state, job.state.message) == ("training", "")
    (record,) = reported(job)
    assert (record["step"], record["generation"], record["went_back"], record["lost_steps"]) == (4, 2, False, 0)
    assert record["text"].startswith("server 0 (pid 100 on 10.0.0.7) ended: killed by SIGKILL, the job was at step 4; ")
    job.summary()
    for role, index in (("worker", 0), ("worker", 1)):
        job.leave(role, index)
    ((_, status, _, summary),) = job.sink.of("finished")
    assert status == "completed" and summary is not None
    assert [r["generation"] for r in summary["recoveries"]] == [2]


def test_a_lost_group_forms_again_without_any_death_unless_a_worker_left() -> None:
    job = formed(Recovering())
    assert job.come_back("worker", 1, why="server 0 was lost after 0.1 s: ECONNRESET") is None
    assert job.state.state == "recovering" and "worker 1" in job.state.message and "ECONNRESET" in job.state.message
    assert job.come_back("worker", 0) is None
    formation = job.come_back("server", 0)
    assert formation is not None and formation.generation == 2

    job = formed(Recovering())
    job.leave("worker", 1)
    assert job.come_back("worker", 0, why="EOF") is None
    assert job.state.state == "failed"
    assert job.state.message.startswith("worker 0 (pid 100 on 10.0.0.7) lost the others: EOF; worker 1 (pid 100 on")


def test_a_death_is_the_cause_though_its_symptom_came_first_and_one_more_is_waited_for() -> None:
    job = formed(Recovering())
    job.come_back("worker", 1, why="EOF")
    job.kill("server", 0)
    assert job.state.message.startswith("server 0 (pid 100 on 10.0.0.7) ended: killed by SIGKILL")
    job.recover()
    (record,) = reported(job)
    assert record["cause"].startswith("server 0 (pid 100 on 10.0.0.7) ended: killed by SIGKILL")

    job = formed(Recovering())
    job.kill("server", 0)
    job.workers_come_back()
    job.kill("worker", 1)
    assert job.replaced("server", 0) is None  # without worker 1 there is no group
    formation = job.replaced("worker", 1, ResumeRange(), pid=300)
    assert formation is not None and formation.lacking == (1,) and formation.source == 0


def test_as_many_deaths_departures_or_lost_groups_in_a_row_as_allowed_and_one_more_unless_a_step_is_between() -> None:
    job = formed(Recovering(restarts=2))
    job.coordinator.heartbeat("worker-0-100", step=7)
    job.kill("server", 0)
    job.recover(pid=201)
    job.kill("server", 0, pid=201)
    job.recover(pid=202, after=2)
    job.kill("server", 0, pid=202)
    assert job.state.state == "failed"
    assert job.state.message.endswith("it died 3 times without one more trained step (recovery.restarts: 2)")

    job = formed(Recovering(restarts=1))
    job.leave("worker", 1, 143, "left on SIGTERM")
    job.recover(killed=("worker", 1))
    job.coordinator.leave("worker-1-200", code=143, message="left on SIGTERM")
    assert job.state.state == "failed"
    assert "worker 1 (pid 200 on 10.0.0.7) left on SIGTERM" in job.state.message
    assert job.state.message.endswith("it died 2 times without one more trained step (recovery.restarts: 1)")

    job = formed(Recovering(restarts=1))
    for number in range(5):
        job.coordinator.heartbeat("worker-0-100", step=number)
        job.kill("server", 0, pid=100 if not number else 200 + number - 1)
        job.recover(pid=200 + number, after=number + 1)
    assert job.state.state == "training"

    job = formed(Recovering(restarts=1))
    for after in (1, 2, 3):
        for role, index in job.names:
            job.come_back(role, index, after=after)
        assert job.state.state == "training"
    job.come_back("worker", 0, after=4)
    assert job.state.state == "failed"
    assert "the group was lost 4 times without one more trained step" in job.state.message


@every(("role", "index"), [("worker", 1), ("server", 0)])
def test_one_that_leaves_on_a_signal_is_replaced_at_once_and_its_launcher_may_be_late(role: Role, index: int) -> None:
    job = formed(Recovering())
    job.coordinator.heartbeat("worker-1-100", step=30, phase="training")
    assert job.leave(role, index, 143, "left on SIGTERM").state == "recovering"
    where = "last seen at step 30 (training)" if role == "worker" else "the job was at step 30"
    assert job.state.message == f"{role} {index} (pid 100 on 10.0.0.7) left on SIGTERM, {where}"
    assert job.recover(killed=(role, index)).generation == 2
    notes = [call[1] for call in job.sink.of("event") if "lost" in call[1]]
    assert [(note["lost"], note["lost_index"]) for note in notes] == [(role, index)]
    job.kill(role, index)  # its launcher comes late with it
    assert job.state.state == "training"


def test_without_restarts_the_first_that_dies_or_leaves_on_a_signal_fails_the_job_unless_it_stops() -> None:
    job = formed(Recovering(restarts=0))
    job.come_back("worker", 0, why="EOF")
    state = job.leave("worker", 1, 143, "left on SIGTERM")
    assert (state.state, state.lost) == ("failed", True)
    assert state.message == "worker 1 (pid 100 on 10.0.0.7) left on SIGTERM, last seen before its first step"
    job = formed(Recovering(restarts=0))
    job.kill("worker", 1)
    assert job.state.state == "failed"
    with pytest.raises(JobError):
        job.register("worker", 1, pid=200)

    job = formed(Recovering())
    job.coordinator.stop("Ctrl-C")  # then it is no failure
    job.leave("server", 0, 143, "left on SIGTERM")
    job.leave("worker", 0, 143, "left on SIGTERM")
    assert job.state.state == "stopping"
    job.leave("worker", 1)
    assert job.state.state == "stopped"


@every("taken_over", [False, True])
def test_a_replacement_that_reads_other_training_data_fails_the_job_as_the_users_mistake(taken_over: bool) -> None:
    job = Recovering()
    job.data = "aaaa-eeee"
    assert job.form().data == "aaaa-eeee"
    job.kill("worker", 1)
    if taken_over:
        take_over(job)
    job.come_back("server", 0)
    job.come_back("worker", 0)
    job.register("worker", 1, pid=200)
    job.data = "bbbb-eeee"
    assert job.come_back("worker", 1, pid=200, after=0) is None
    state = job.coordinator.state
    assert (state.state, state.exit_code) == ("failed", 2)
    told = "worker 1 (pid 200 on 10.0.0.7) reads other training data (fingerprint bbbb) than the job began with "
    assert state.message == f"{told}(fingerprint aaaa); all workers must read the same files until the job ends"

    job = Recovering()
    job.data = "aaaa"
    job.form()
    job.kill("server", 0)
    job.data = "bbbb"  # of all workers together
    job.workers_come_back()
    assert job.replaced("server", 0) is None
    assert job.coordinator.state.exit_code == 2


def test_a_member_is_replaced_in_a_time_that_counts_from_the_last_one_that_came_or_was_lost() -> None:
    job = formed(Recovering(replace_timeout_s=10.0))
    job.kill("server", 0)
    job.pass_time(10, alive=[("worker", 0), ("worker", 1)])
    assert job.state.state == "recovering"
    job.pass_time(1, alive=[("worker", 0), ("worker", 1)])
    assert job.state.state == "failed"
    assert "did not form within 10 s (recovery.replace_timeout_s)" in job.state.message
    assert "server 0 (not replaced)" in job.state.message

    job = formed(Recovering(servers=2, replace_timeout_s=10.0))
    job.kill("server", 0)
    workers = [("worker", 0), ("worker", 1)]
    job.pass_time(8, alive=[("server", 1), *workers])
    job.kill("server", 1)
    job.pass_time(8, alive=workers)
    job.register("server", 0, pid=200)
    status = job.coordinator.status()
    assert status.left_s == 10.0 and "server 1 (not replaced)" in map(str, status.missing)
    job.pass_time(8, alive=workers)
    assert job.state.state == "recovering" and job.coordinator.status().left_s == 2.0


def test_one_that_was_taken_for_dead_is_refused_when_it_wakes_up() -> None:
    job = formed(Recovering())
    job.pass_time(20, alive=[("server", 0), ("worker", 0)])
    assert job.state.state == "recovering"
    with pytest.raises(PlaceLost, match=r"worker 1 .* was declared dead, and the job continued without it"):
        job.coordinator.heartbeat("worker-1-100")
    with pytest.raises(PlaceLost, match="was declared dead"):
        job.come_back("worker", 1)


@every("on_its_way", [True, False])
def test_a_replacement_may_come_before_the_lease_ends_if_a_member_is_missed_or_silent(on_its_way: bool) -> None:
    job = formed(Recovering())
    if on_its_way:  # the group is lost, and worker 1 may come back too
        job.come_back("worker", 0)
    with pytest.raises(UserError, match="worker 1 is already in the job"):
        job.register("worker", 1, pid=200)
    job.pass_time(4, alive=[("server", 0), ("worker", 0)])
    job.register("worker", 1, pid=200)
    assert job.state.state == "recovering"
    told = "died: no heartbeat for 4 s, and another process took its place"
    assert on_its_way or job.state.message.endswith(told)


def test_trainers_that_all_start_again_begin_at_the_last_checkpoint() -> None:
    job = formed(Recovering(losses=Losses(most=10**9)))
    checkpoint(job, 20)
    job.coordinator.heartbeat("worker-0-100", step=27)
    job.pass_time(4, alive=[("server", 0)])
    for index in (0, 1):
        job.register("worker", index, pid=200)
    job.come_back("server", 0, held(27, 28))
    assert job.come_back("worker", 0, ResumeRange(), pid=200, after=0) is None
    formation = job.come_back("worker", 1, ResumeRange(), pid=200, after=0)
    assert formation is not None and formation.restores and formation.start_step == 20
    assert reported(job)[-1]["lost_steps"] == 8  # servers have one that no trainer reported before it died


def test_once_the_summary_is_in_no_death_matters() -> None:
    job = formed(Recovering())
    job.summary()
    job.kill("server", 0)
    assert job.state.state == "training"
    assert job.come_back("worker", 1) is None
    job.kill("worker", 0)
    assert job.state.state == "completed"


@every("victim", [("worker", 0), ("server", 0)])
@every(
    ("before", "how"),
    [(True, "had left by then, and nobody can replace it"), (False, "left before the job was done")],
)
def test_a_worker_that_left_before_the_summary_cannot_be_waited_for(
    victim: tuple[Role, int], before: bool, how: str
) -> None:
    job = formed(Recovering())
    acts = [lambda: job.leave("worker", 1), lambda: job.kill(*victim)]
    for act in acts if before else acts[::-1]:
        act()
    assert job.state.state == "failed"
    assert job.state.message == (
        f"{victim[0]} 0 (pid 100 on 10.0.0.7) ended: killed by SIGKILL, last seen before its first step; "
        f"worker 1 (pid 100 on 10.0.0.7) {how}"
    )
    assert len(job.sink.of("finished")) == 1


@every("registered", [False, True])
def test_a_member_that_nobody_starts_again_fails_the_job_that_needs_it(registered: bool) -> None:
    job = Recovering()
    if registered:
        job.form()
        job.kill("worker", 1)
        assert job.state.state == "recovering"
    state = job.coordinator.lost("worker", 1, pid=200, reason="killed by SIGKILL", final=True)
    assert (state.state, state.exit_code) == ("failed", 1)
    assert re.match(r"worker 1 .*ended.*: killed by SIGKILL; its launcher starts no other$", state.message)


@every(
    ("act", "pid"),
    [
        (lambda job: None, 200),  # another has its place
        (lambda job: job.leave("worker", 1), 100),
        (lambda job: job.coordinator.stop("Ctrl-C"), 100),
        (lambda job: job.summary(), 100),  # all steps are trained
    ],
)
def test_a_process_that_the_job_does_not_need_fails_no_job_when_nobody_starts_it_again(
    act: Callable[[Recovering], object], pid: int
) -> None:
    job = formed(Recovering())
    act(job)
    before = job.state.state
    assert job.coordinator.lost("worker", 1, pid=pid, reason="exit code 1", final=True).state == before

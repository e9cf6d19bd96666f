"""Who is started again after a death, and when, by a clock that the test moves."""

from __future__ import annotations

import signal
from itertools import count

from shardkeep.base.exit_codes import code_of_leaving
from shardkeep.launch.processes.children import Death
from shardkeep.launch.restart_policy import Restarts, Vacancy
from tests.support.cases import every

PIDS = count(100)


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def death(role: str = "worker", index: int = 0, code: int = -signal.SIGKILL) -> Death:
    return Death(role, index, next(PIDS), code, "")


def always(vacancy: Vacancy) -> bool:
    return True


def die(restarts: Restarts, step: int | None, role: str = "worker", index: int = 0) -> bool:
    """Whether the job outlives the death; opens the vacancy."""
    dead = death(role, index)
    if outlived := restarts.counts(dead, step):
        restarts.replace(dead)
    return outlived


def test_the_first_death_is_replaced_at_once() -> None:
    restarts = Restarts(1, Clock())
    assert die(restarts, step=3)
    assert [(vacancy.role, vacancy.index) for vacancy in restarts.take_due(always)] == [("worker", 0)]
    assert restarts.vacancies == []


def test_deaths_without_one_more_step_wait_twice_as_long_each_up_to_eight_seconds() -> None:
    clock = Clock()
    restarts = Restarts(9, clock)
    delays = []
    for _ in range(8):
        assert die(restarts, step=3)
        delays.append(restarts.vacancies[0].due - clock.now)
        clock.now = restarts.vacancies[0].due - 0.01
        assert restarts.take_due(always) == []
        clock.now += 0.02
        assert len(restarts.take_due(always)) == 1
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


@every("limit", [0, 1, 3])
def test_a_member_may_die_as_often_as_restarts_says_without_one_more_step(limit: int) -> None:
    restarts = Restarts(limit, Clock())
    assert [die(restarts, step=None) for _ in range(limit + 1)] == [True] * limit + [False]


def test_one_more_step_begins_the_count_again() -> None:
    restarts = Restarts(1, Clock())
    assert [die(restarts, step) for step in (None, 1, 2, 2, 3)] == [True, True, True, False, True]
    assert all(vacancy.due == 50.0 for vacancy in restarts.vacancies)


def test_each_member_has_a_count_of_its_own() -> None:
    restarts = Restarts(1, Clock())
    members = [("worker", 0), ("worker", 1), ("server", 0), ("coordinator", 0)]
    assert all(die(restarts, 5, role, index) for role, index in members)
    assert not any(die(restarts, 5, role, index) for role, index in members)


def test_a_vacancy_waits_until_the_coordinator_knows_of_the_death() -> None:
    restarts = Restarts(1, Clock())
    die(restarts, 5, "server")
    die(restarts, 5, "worker")
    assert [vacancy.role for vacancy in restarts.take_due(lambda vacancy: vacancy.role == "worker")] == ["worker"]
    assert [vacancy.role for vacancy in restarts.vacancies] == ["server"]


def test_a_job_that_stops_replaces_the_coordinator_alone() -> None:
    restarts = Restarts(1, Clock())
    for role in ("server", "coordinator", "worker"):
        die(restarts, 5, role)
    restarts.only_coordinator()
    assert [vacancy.role for vacancy in restarts.take_due(always)] == ["coordinator"]


@every(
    ("code", "fatal"),
    [(1, True), (2, True), (-signal.SIGKILL, False), (code_of_leaving(signal.SIGTERM), False)],
    ids=["failed", "wrong input", "killed", "left on SIGTERM"],
)
def test_only_a_process_that_a_signal_ended_is_replaced(code: int, fatal: bool) -> None:
    assert Restarts(1, Clock()).fatal(death(code=code)) == fatal


def test_a_refused_restart_is_fatal_for_that_death_alone() -> None:
    restarts = Restarts(1, Clock())
    refused = death()
    restarts.refuse(refused)
    assert restarts.fatal(refused)
    assert not restarts.fatal(death())

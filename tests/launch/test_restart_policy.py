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
        assert [(vacancy.role, vacancy.index) for vacancy in restarts.take_due(always)] == [("worker", 0)]
        assert restarts.vacancies == []
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


@every(
    ("limit", "steps", "outlived"),
    [
        (0, [None], [False]),
        (1, [None, None], [True, False]),
        (3, [None] * 4, [True, True, True, False]),
        (1, [None, 1, 2, 2, 3], [True, True, True, False, True]),  # one more step begins the count again
    ],
)
def test_a_member_may_die_as_often_as_restarts_says_without_one_more_step(
    limit: int, steps: list[int | None], outlived: list[bool]
) -> None:
    restarts = Restarts(limit, Clock())
    assert [die(restarts, step) for step in steps] == outlived
    assert limit != 1 or all(vacancy.due == 50.0 for vacancy in restarts.vacancies)


def test_each_member_has_a_count_of_its_own() -> None:
    restarts = Restarts(1, Clock())
    members = [("worker", 0), ("worker", 1), ("server", 0), ("coordinator", 0)]
    assert all(die(restarts, 5, role, index) for role, index in members)
    assert not any(die(restarts, 5, role, index) for role, index in members)


def test_a_vacancy_waits_until_the_coordinator_knows_of_the_death_and_a_job_that_stops_has_the_coordinators_alone() -> (
    None
):
    restarts = Restarts(1, Clock())
    for role in ("server", "coordinator", "worker"):
        die(restarts, 5, role)
    assert [vacancy.role for vacancy in restarts.take_due(lambda vacancy: vacancy.role == "worker")] == ["worker"]
    assert [vacancy.role for vacancy in restarts.vacancies] == ["server", "coordinator"]
    restarts.only_coordinator()
    assert [vacancy.role for vacancy in restarts.take_due(always)] == ["coordinator"]


def test_only_a_process_that_a_signal_ended_is_replaced_and_not_where_its_restart_was_refused() -> None:
    restarts = Restarts(1, Clock())
    for code, fatal in ((1, True), (2, True), (-signal.SIGKILL, False), (code_of_leaving(signal.SIGTERM), False)):
        assert restarts.fatal(death(code=code)) == fatal, code
    refused = death()
    restarts.refuse(refused)
    assert restarts.fatal(refused)
    assert not restarts.fatal(death())

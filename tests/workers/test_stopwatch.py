"""The parts of a step: they add up, a nested one gives its time back, and what is not a step counts nowhere."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from shardkeep.workers.step import StepResult
from shardkeep.workers.stopwatch import PARTS, Part, Stopwatch
from shardkeep.workers.telemetry import WARM_UP_STEPS, Telemetry

RESULT = StepResult(loss=0.5, applied=True, dropped_rows=0, staleness=0)


def spend(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_the_parts_add_up_to_the_time_between_the_first_and_the_last() -> None:
    watch = Stopwatch()
    spend(0.002)  # before the first: nobody's
    began = time.perf_counter()
    watch.enter("data")
    spend(0.002)
    watch.enter("forward")
    with watch.within("dense_reduce"):
        spend(0.003)
    spend(0.001)
    watch.enter(None)
    whole = time.perf_counter() - began
    spend(0.002)
    assert sum(watch.seconds.values()) == pytest.approx(whole, abs=2e-4)
    assert watch.seconds["dense_reduce"] == pytest.approx(0.003, abs=1e-3)
    assert watch.seconds["forward"] >= 0.001 and watch.seconds["data"] >= 0.002


def test_what_is_within_no_part_is_not_counted_and_the_part_goes_on() -> None:
    watch = Stopwatch()
    watch.enter("other")
    with watch.within(None):
        spend(0.01)
    spend(0.001)
    watch.enter(None)
    assert 0.001 <= sum(watch.seconds.values()) < 0.01


def test_a_part_that_raises_gives_the_time_back() -> None:
    watch = Stopwatch()
    watch.enter("backward")
    with pytest.raises(ValueError, match="gloo"), watch.within("dense_reduce"):
        raise ValueError("gloo")
    spend(0.001)
    watch.enter(None)
    assert watch.seconds["backward"] >= 0.001 > watch.seconds["dense_reduce"]


def test_a_switch_costs_microseconds() -> None:
    watch = Stopwatch()
    began = time.perf_counter()
    for _ in range(10_000):
        watch.enter("data")
    assert (time.perf_counter() - began) / 10_000 < 20e-6


class Seen:
    """An observer that keeps what it is told, and takes its time at each step."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def step(self, step: int) -> None:
        self.told.append(f"step {step}")
        spend(0.005)

    def follow(self, part: Part | None) -> None:
        self.told.append(str(part))

    @contextlib.contextmanager
    def nested(self, name: str):  # type: ignore[no-untyped-def]
        self.told.append(f"({name}")
        yield
        self.told.append(")")

    def close(self) -> None:
        self.told.append("close")


def test_an_observer_sees_steps_and_parts_and_its_time_is_nobodys() -> None:
    watch = Stopwatch()
    watch.observer = seen = Seen()
    paused = watch.begin(3)
    watch.enter("backward")
    thread = threading.Thread(target=lambda: watch.within("dense_reduce").__enter__())
    thread.start()
    thread.join()
    with watch.drawn("prepare"):
        pass
    watch.end()
    assert seen.told == ["None", "step 3", "other", "backward", "(dense_reduce", "(prepare", ")", "None", "close"]
    assert paused >= 0.005 > sum(watch.seconds.values())


def test_without_an_observer_nothing_is_paused_to_speak_of() -> None:
    watch = Stopwatch()
    assert watch.begin(0) < 1e-3
    watch.end()
    assert sum(watch.seconds.values()) < 1e-3


def test_a_record_has_the_mean_of_its_own_interval_and_the_summary_that_of_the_steady_state() -> None:
    telemetry = Telemetry(watch := Stopwatch())
    for step in range(WARM_UP_STEPS + 4):
        watch.enter("forward")
        spend(0.004 if step < WARM_UP_STEPS else 0.001)
        watch.enter(None)
        telemetry.step_done(10, RESULT)
        if step == WARM_UP_STEPS - 1:
            first = telemetry.snapshot()["step_ms"]
    second = telemetry.snapshot()["step_ms"]
    assert list(first) == ["total", *PARTS]
    assert first["forward"] == first["total"] == pytest.approx(4.0, rel=0.2)
    assert second["forward"] == pytest.approx(1.0, rel=0.5)
    assert telemetry.step_ms() == pytest.approx(second)
    assert telemetry.snapshot()["step_ms"]["total"] == 0.0  # no step since


def test_a_job_shorter_than_the_warm_up_reports_all_its_steps() -> None:
    telemetry = Telemetry(watch := Stopwatch())
    watch.enter("push")
    spend(0.002)
    watch.enter(None)
    telemetry.step_done(10, RESULT)
    assert telemetry.step_ms()["push"] >= 2.0

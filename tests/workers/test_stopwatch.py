"""The parts of a step: they add up, a nested one gives its time back, and what is not a step counts nowhere."""

from __future__ import annotations

import contextlib
import threading

import pytest

from shardkeep.workers.reporting.counters import WARM_UP_STEPS, StepCounters
from shardkeep.workers.step import StepResult
from shardkeep.workers.timing.clock import PARTS, Part, Stopwatch
from tests.support.step_losses import Loss

RESULT = StepResult(loss=Loss(0.5), applied=True, dropped_rows=0, staleness=0)


class Clock:
    """Continues only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def spent(watch: Stopwatch) -> dict[str, float]:
    """The parts that took time."""
    return {part: round(seconds, 9) for part, seconds in watch.seconds.items() if seconds}


def test_the_parts_add_up_to_the_time_between_the_first_and_the_last(clock: Clock) -> None:
    watch = Stopwatch(clock)
    clock.spend(7.0)  # before the first: nobody's
    watch.enter("data")
    clock.spend(2.0)
    watch.enter("forward")
    clock.spend(0.5)
    with watch.within("dense_reduce"):
        clock.spend(3.0)
    clock.spend(1.0)
    watch.enter(None)
    clock.spend(7.0)
    assert spent(watch) == {"data": 2.0, "forward": 1.5, "dense_reduce": 3.0}


def test_what_is_within_no_part_is_not_counted_and_the_part_goes_on(clock: Clock) -> None:
    watch = Stopwatch(clock)
    watch.enter("other")
    with watch.within(None):
        clock.spend(5.0)
    clock.spend(1.0)
    watch.enter(None)
    assert spent(watch) == {"other": 1.0}


def test_a_part_that_raises_gives_the_time_back(clock: Clock) -> None:
    watch = Stopwatch(clock)
    watch.enter("backward")
    with pytest.raises(ValueError, match="gloo"), watch.within("dense_reduce"):
        raise ValueError("gloo")
    clock.spend(1.0)
    watch.enter(None)
    assert spent(watch) == {"backward": 1.0}


class Seen:
    """An observer that keeps its records and is slow at each step."""

    def __init__(self, clock: Clock) -> None:
        self.told: list[str] = []
        self._clock = clock

    def step(self, step: int) -> None:
        self.told.append(f"step {step}")
        self._clock.spend(5.0)

    def follow(self, part: Part | None) -> None:
        self.told.append(str(part))

    @contextlib.contextmanager
    def nested(self, name: str):  # type: ignore[no-untyped-def]
        self.told.append(f"({name}")
        yield
        self.told.append(")")

    def close(self) -> None:
        self.told.append("close")


def test_an_observer_sees_steps_and_parts_and_its_time_is_nobodys(clock: Clock) -> None:
    seen = Seen(clock)
    watch = Stopwatch(clock, observer=seen)
    before = watch.now()
    watch.begin(3)
    assert watch.now() == before
    watch.enter("backward")
    thread = threading.Thread(target=lambda: watch.within("dense_reduce").__enter__())
    thread.start()
    thread.join()
    with watch.drawn("prepare"):
        pass
    watch.end()
    assert seen.told == ["None", "step 3", "other", "backward", "(dense_reduce", "(prepare", ")", "None", "close"]
    assert spent(watch) == {}


def test_without_an_observer_nothing_is_excluded(clock: Clock) -> None:
    watch = Stopwatch(clock)
    before = watch.now()
    watch.begin(0)
    clock.spend(1.0)
    watch.end()
    assert spent(watch) == {"other": 1.0} and watch.now() == before + 1.0


def test_what_is_excluded_is_no_part_and_no_training_and_the_part_goes_on(clock: Clock) -> None:
    watch = Stopwatch(clock)
    watch.enter("other")
    before = watch.now()
    with contextlib.suppress(KeyError), watch.excluded():
        clock.spend(4.0)
        watch.enter("lookup")  # of an evaluation's own
        raise KeyError
    clock.spend(0.5)
    watch.enter(None)
    assert spent(watch) == {"other": 0.5} and watch.now() == before + 0.5


def test_rates_are_of_training_alone(clock: Clock) -> None:
    counters = StepCounters(Stopwatch(clock))
    take_step(counters, clock, 100.0)
    with counters.watch.excluded():
        clock.spend(1000.0)
    take_step(counters, clock, 100.0)
    assert counters.samples_per_s() == pytest.approx(100.0)
    assert not counters.report_due(0.3)
    assert counters.report()["samples_per_s"] == pytest.approx(100.0)


def take_step(counters: StepCounters, clock: Clock, ms: float) -> None:
    counters.watch.enter("forward")
    clock.spend(ms / 1e3)
    counters.watch.enter(None)
    counters.step_done(10, RESULT)


def test_a_record_has_the_mean_of_its_own_interval_and_the_summary_that_of_the_steady_state(clock: Clock) -> None:
    counters = StepCounters(Stopwatch(clock))
    for _ in range(WARM_UP_STEPS):
        take_step(counters, clock, 4.0)
    first = counters.report()["step_ms"]
    assert list(first) == ["total", *PARTS]
    assert (first["total"], first["forward"], first["push"]) == (4.0, 4.0, 0.0)
    assert counters.step_ms()["total"] == 4.0  # no steady step yet
    for ms in (1.0, 2.0):
        take_step(counters, clock, ms)
    assert counters.report()["step_ms"]["forward"] == 1.5
    assert counters.report()["step_ms"]["total"] == 0.0  # no step since
    take_step(counters, clock, 3.0)
    assert counters.step_ms()["total"] == 2.0

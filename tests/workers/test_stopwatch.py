"""The parts of a step, and CPU time: they add up, a nested one gives its time back, what is no step counts nowhere."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from shardkeep.config import parse_config
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.reporting.counters import WARM_UP_STEPS, StepCounters
from shardkeep.workers.step import StepResult
from shardkeep.workers.timing.clock import PARTS, Part, Stopwatch
from shardkeep.workers.timing.cpu_time import CpuMeter
from tests.support.cases import every
from tests.support.local_job import LocalJob
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
    with watch.within(None):
        clock.spend(5.0)  # within no part: not counted
    clock.spend(0.25)
    with pytest.raises(ValueError, match="gloo"), watch.within("dense_reduce"):
        raise ValueError("gloo")  # gives the time back
    clock.spend(0.125)
    watch.enter(None)
    clock.spend(7.0)
    assert spent(watch) == {"data": 2.0, "forward": 1.875, "dense_reduce": 3.0}


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
    def nested(self, name: str) -> Iterator[None]:
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
    watch = Stopwatch(clock)  # without an observer nothing is excluded
    before = watch.now()
    watch.begin(0)
    clock.spend(1.0)
    watch.end()
    assert spent(watch) == {"other": 1.0} and watch.now() == before + 1.0


def take_step(counters: StepCounters, clock: Clock, ms: float) -> None:
    counters.watch.enter("forward")
    clock.spend(ms / 1e3)
    counters.watch.enter(None)
    counters.step_done(10, RESULT)


def test_rates_are_of_training_alone(clock: Clock) -> None:
    counters = StepCounters(Stopwatch(clock))
    take_step(counters, clock, 100.0)
    with counters.watch.excluded():
        clock.spend(1000.0)
    take_step(counters, clock, 100.0)
    assert counters.samples_per_s() == pytest.approx(100.0)
    assert not counters.report_due(0.3)
    assert counters.report()["samples_per_s"] == pytest.approx(100.0)


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


# CPU time of training: stretches between evaluations, the servers' beside this process's.


class Clocks:
    """CPU seconds as a test sets them."""

    def __init__(self) -> None:
        self.worker, self.servers, self.waited = 0.0, [0.0, 0.0], 0.0

    def pass_by(self, worker: float, *servers: float) -> None:
        self.worker += worker
        self.waited += worker / 2
        self.servers = [before + more for before, more in zip(self.servers, servers, strict=True)]


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def cpu(clocks: Clocks) -> CpuMeter:
    return CpuMeter(lambda: clocks.servers, clock=lambda: clocks.worker, waits=lambda: clocks.waited)


def test_what_passes_between_stretches_or_is_excluded_is_not_counted(cpu: CpuMeter, clocks: Clocks) -> None:
    with cpu.excluded(5):  # it does not run: it does not begin to
        clocks.pass_by(100.0, 100.0, 100.0)  # imports, compiling
    assert not cpu.running
    cpu.stop(5)
    assert cpu.mean_ms() == {}, "nothing counted is nothing told"
    cpu.start(10)
    clocks.pass_by(0.8, 0.2, 0.4)
    cpu.stop(20)
    clocks.pass_by(50.0, 50.0, 50.0)  # evaluation
    cpu.start(21)
    clocks.pass_by(0.5, 0.1, 0.1)
    with cpu.excluded(23):
        clocks.pass_by(50.0, 50.0, 50.0)
    clocks.pass_by(0.2, 0.0, 0.1)
    cpu.stop(26)
    assert cpu.mean_ms() == pytest.approx({"steps": 15, "worker": 100.0, "server": 30.0, "waited": 50.0})


def test_a_stretch_with_a_replaced_server_is_left_out(cpu: CpuMeter, clocks: Clocks) -> None:
    cpu.start(0)
    clocks.pass_by(1.0, 1.0, 0.5)
    cpu.stop(10)
    cpu.start(10)
    clocks.pass_by(9.0, 9.0, 0.1)
    clocks.servers[0] = 0.0
    cpu.stop(20)
    cpu.start(20)
    cpu.drop()
    cpu.stop(30)
    assert cpu.mean_ms() == {"steps": 10, "worker": 100.0, "server": 75.0, "waited": 50.0}


@every("workers", [1, 2])
def test_an_evaluation_tells_the_bytes_of_training_of_all_workers(workers: int) -> None:
    config = parse_config(
        f"""
        servers: 2
        workers: {workers}
        data: {{synthetic: {{train_samples: 600, eval_samples: 100, num_dense: 2, table_sizes: [40, 90]}}}}
        model: {{bottom: [4], hidden: [4]}}
        tables: {{default: {{dim: 4}}}}
        tower: {{compile: off}}
        train: {{batch_size: {30 // workers}}}
        eval: {{every_steps: 8}}
        """
    )
    job = LocalJob(config, open_data(config.data, seed=config.seed))
    summary = job.run()
    records = [record for kind, record in job.records if kind == "eval"]
    assert [(r["step"], r["train_samples"]) for r in records] == [(8, 240), (16, 480), (20, 600)]
    totals = [r["train_bytes"]["total"] for r in records]
    assert 0 < totals[0] < totals[1] < totals[2]
    counted = {direction: sum(summary["bytes"][direction].values()) for direction in ("push", "pull", "tower")}
    assert records[-1]["train_bytes"] == counted | {"total": sum(counted.values())}
    assert (counted["tower"] > 0) == (workers > 1)
    assert summary["cpu_ms"]["steps"] == 10 and summary["cpu_ms"]["worker"] > 0
    assert summary["cpu_ms"]["server"] == 0.0  # in this process: counted with the worker

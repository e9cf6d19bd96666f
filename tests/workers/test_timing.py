"""The parts of a step, and CPU time: they add up, and what is no step counts nowhere; profiles of some steps."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import ConfigError
from shardkeep.ps.wire.message import Kind
from shardkeep.workers.config import ProfileConfig
from shardkeep.workers.timing.clock import Stopwatch
from shardkeep.workers.timing.cpu_time import CpuMeter
from shardkeep.workers.timing.profiling import Profile, check_profile, trace_path
from tests.support.messages import Message, pack


class Clock:
    """Continues only when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def spend(self, seconds):
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


def spent(watch):
    return {part: round(seconds, 9) for part, seconds in watch.seconds.items() if seconds}


def test_the_parts_add_up_to_the_time_between_the_first_and_the_last(clock):
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


def test_what_is_excluded_is_no_part_and_no_training_and_the_part_goes_on(clock):
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

    def __init__(self, clock):
        self.told, self._clock = [], clock

    def step(self, step):
        self.told.append(f"step {step}")
        self._clock.spend(5.0)

    def follow(self, part):
        self.told.append(str(part))

    @contextlib.contextmanager
    def nested(self, name):
        self.told.append(f"({name}")
        yield
        self.told.append(")")

    def close(self):
        self.told.append("close")


def test_an_observer_sees_steps_and_parts_and_its_time_is_nobodys(clock):
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


# CPU time of training: stretches between evaluations, the servers' beside this process's.


class Clocks:
    """CPU seconds as a test sets them, and a meter of them."""

    def __init__(self):
        self.worker, self.servers, self.waited = 0.0, [0.0, 0.0], 0.0
        self.meter = CpuMeter(lambda: self.servers, clock=lambda: self.worker, waits=lambda: self.waited)

    def pass_by(self, worker, *servers):
        self.worker += worker
        self.waited += worker / 2
        self.servers = [before + more for before, more in zip(self.servers, servers, strict=True)]


def test_what_passes_between_stretches_or_is_excluded_is_not_counted():
    clocks = Clocks()
    cpu = clocks.meter
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


def test_a_stretch_with_a_replaced_server_is_left_out():
    clocks = Clocks()
    cpu = clocks.meter
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


# Profiles


def ranges(path: Path) -> Counter[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return Counter(e["name"] for e in events if e.get("cat") == "user_annotation")


def take_steps(watch: Stopwatch, count: int) -> None:
    for step in range(count):
        watch.begin(step)
        watch.enter("forward")
        with watch.within("dense_reduce"), watch.drawn("prepare"):
            pass


def test_a_workers_trace_holds_its_steps_and_their_parts_and_no_others(tmp_path: Path) -> None:
    path = trace_path(tmp_path, "worker", 1)
    assert path.name == "worker-1.pt.trace.json"
    watch = Stopwatch(observer=Profile(ProfileConfig(start=2, steps=3), path))
    take_steps(watch, 7)
    assert path.exists()  # as soon as the steps are over
    watch.end()
    found = ranges(path)
    assert {name for name in found if "#" in name} == {f"ProfilerStep#{step}" for step in (2, 3, 4)}
    names = ("other", "forward", "dense_reduce", "prepare")
    assert [found[f"shardkeep:{name}"] for name in names] == [3, 3, 3, 3]
    watch = Stopwatch(observer=Profile(ProfileConfig(steps=100), tmp_path / "a.json"))
    take_steps(watch, 2)
    assert not (tmp_path / "a.json").exists()
    watch.end()  # a job that ends within the profiled steps leaves what there is
    assert ranges(tmp_path / "a.json")["ProfilerStep#1"] == 1


def test_a_servers_trace_goes_from_the_first_steps_first_message_to_the_last_steps_push(tmp_path: Path) -> None:
    seen: list[Bytes] = []

    def handle(buffer: Bytes) -> Future[Bytes]:
        seen.append(buffer)
        future: Future[Bytes] = Future()
        future.set_result(buffer)
        return future

    def message(kind: Kind, step: int) -> Bytes:
        return pack(Message(kind, 0, 0, step))

    profile = Profile(ProfileConfig(start=5, steps=2), tmp_path / "a.json")
    led = profile.led(handle)
    sent = [message(Kind.PULL, 4), message(Kind.PUSH, 4)]
    sent += [message(Kind.PULL, step) for step in (5, 6, 7)]  # a window of three
    sent += [message(Kind.READ, 0), message(Kind.ASK, 0), np.zeros(3, dtype=np.uint8)]
    sent += [message(Kind.PUSH, 5), message(Kind.PUSH, 6)]
    sent += [message(Kind.PULL, 8), message(Kind.PUSH, 7), message(Kind.PULL, 9)]
    for buffer in sent:
        assert led(buffer).result() is buffer
    assert len(seen) == len(sent)
    found = ranges(tmp_path / "a.json")
    assert found == {"shardkeep:pull": 4, "shardkeep:push": 2, "shardkeep:read": 1, "shardkeep:ask": 1}
    profile.close()
    assert ranges(tmp_path / "a.json") == found


def test_a_trace_that_cannot_be_had_is_told_and_ends_no_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    profile = Profile(ProfileConfig(start=5, steps=2), tmp_path / "a.json")
    (tmp_path / "profile").write_text("a file where the folder should be")
    watch = Stopwatch(observer=Profile(ProfileConfig(steps=1), trace_path(tmp_path, "worker", 0)))
    with caplog.at_level(logging.WARNING):
        profile.close()
        profile.close()
        take_steps(watch, 3)
        watch.end()
    told = ["no profile: none of its steps was trained", "the profile is lost"]
    assert [r.getMessage() for r in caplog.records] == told and not (tmp_path / "a.json").exists()


def test_steps_that_the_job_does_not_have_are_refused() -> None:
    check_profile(ProfileConfig(), total_steps=0)
    check_profile(ProfileConfig(start=9, steps=5), total_steps=10)
    with pytest.raises(ConfigError, match=r"profile.start: 10 is not allowed: the job has 10 steps, counted from 0"):
        check_profile(ProfileConfig(start=10, steps=1), total_steps=10)

"""Profiles: which steps a trace holds, what is in it, and that one which cannot be had ends no job."""

from __future__ import annotations

import json
import logging
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
from shardkeep.workers.timing.profiling import Profile, check_profile, trace_path
from tests.support.messages import Message, pack


def ranges(path: Path) -> Counter[str]:
    """How often each named range is in the trace."""
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
    line = "profile.start: 10 is not allowed: the job has 10 steps, counted from 0"
    with pytest.raises(ConfigError, match=line):
        check_profile(ProfileConfig(start=10, steps=1), total_steps=10)

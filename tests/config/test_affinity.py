"""Which cores processes are pinned to. Pinned processes of a real job: tests/integration/test_affinity.py."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from shardkeep import affinity
from shardkeep.affinity import AffinityConfig, choose, describe, shown, spread
from shardkeep.base.errors import ConfigError
from shardkeep.config import JobConfig, parse_config
from tests.support.cases import every

ALLOWED = "allowed: none, auto, or cores by role, as in {workers: [[0], [1]], servers: [[2, 3]]}"


@every(
    ("text", "line"),
    [
        ("launch: {affinity: sometimes}", f"launch.affinity: 'sometimes' is not allowed; {ALLOWED}"),
        ("launch: {affinity: [[0]]}", f"launch.affinity: [[0]] is not allowed; {ALLOWED}"),
        ("launch: {affinity: {worker: [[0]]}}", "launch.affinity.worker: unknown key; did you mean workers?"),
        (
            "launch: {affinity: {workers: [[0], []]}}",
            "launch.affinity.workers: [[0], []] is not allowed: a list is empty; allowed: at least one core in each",
        ),
        (
            "launch: {affinity: {servers: [[0, 0]]}}",
            "launch.affinity.servers: [[0, 0]] is not allowed: [0, 0]; "
            "allowed: numbers of cores from 0, each once in a list",
        ),
        (
            "launch: {affinity: {servers: [[-1]]}}",
            "launch.affinity.servers: [[-1]] is not allowed: [-1]; "
            "allowed: numbers of cores from 0, each once in a list",
        ),
        (
            "launch: {affinity: {workers: [0]}}",
            "launch.affinity.workers.0: 0 is not allowed; allowed: a list, each a whole number",
        ),
        (
            "launch: {affinity: {auto: true, workers: [[0]]}}",
            "launch.affinity: auto chooses the cores; allowed: auto, or lists of cores",
        ),
        (
            "{servers: 1, launch: {affinity: {servers: [[0], [1]]}}}",
            "launch.affinity.servers: lists of cores for 2, there are 1; allowed: at most one list for each",
        ),
    ],
    ids=["word", "list", "unknown-role", "empty", "twice", "negative", "flat", "both", "too-many"],
)
def test_a_wrong_affinity_is_one_line(text: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    assert str(caught.value) == f"config: {line}"


@pytest.mark.parametrize("value", ["none", "auto", "{workers: [[0], [1]], servers: [[1, 0]]}"])
def test_an_affinity_is_set_on_the_command_line_and_reads_back_equal(value: str) -> None:
    config = parse_config("", [f"launch.affinity={value}"])
    assert parse_config(config.to_yaml()) == config
    assert config.launch.affinity.wanted == (value != "none")


def test_a_core_that_is_not_there_is_named_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "usable_cores", lambda: (0, 1, 2, 5))
    with pytest.raises(ConfigError) as caught:
        choose(AffinityConfig(workers=[[0], [3]]), servers=2, workers=2, threads=1)
    assert str(caught.value) == "launch.affinity.workers: there is no core 3 to use; allowed: 0-2,5"


def test_a_platform_that_pins_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    monkeypatch.setattr(affinity.sys, "platform", "darwin")
    with pytest.raises(ConfigError) as caught:
        choose(AffinityConfig(auto=True), servers=1, workers=1, threads=1)
    assert str(caught.value) == "launch.affinity: darwin cannot pin a process to cores; allowed: none"
    assert choose(AffinityConfig(), servers=1, workers=1, threads=1) == {}


def test_lists_are_used_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "usable_cores", lambda: (0, 1, 2, 3))
    pins = choose(AffinityConfig(workers=[[1, 0], [2]]), servers=2, workers=3, threads=1)
    assert pins == {("worker", 0): (0, 1), ("worker", 1): (2,), ("worker", 2): (0, 1)}
    assert describe(pins) == "worker 0 on cores 0-1; worker 1 on core 2; worker 2 on cores 0-1"


@every(
    ("cores", "servers", "workers", "threads", "expected"),
    [
        ([0, 1], 1, 1, 1, "worker 0 on core 0; server 0 on core 1"),
        ([0, 1], 2, 2, 1, "worker 0 on core 0; worker 1 on core 1"),
        ([0, 1], 1, 4, 1, "worker 0 on core 0; worker 1 on core 1; worker 2 on core 0; worker 3 on core 1"),
        ([4, 5, 6, 9], 1, 1, 2, "worker 0 on cores 4-6; server 0 on core 9"),
        (
            range(8),
            2,
            2,
            1,
            "worker 0 on cores 0-1; worker 1 on cores 2-3; server 0 on cores 4-5; server 1 on cores 6-7",
        ),
        ([0, 1], 0, 1, 1, "nobody is pinned"),
        ([0], 1, 1, 4, "worker 0 on core 0"),
    ],
    ids=["a-core-each", "too-few", "far-too-few", "threads", "left-over", "one-process", "one-core"],
)
def test_auto_gives_cores_of_their_own_where_they_suffice_else_pins_workers(
    cores: Sequence[int], servers: int, workers: int, threads: int, expected: str
) -> None:
    pins = spread(tuple(cores), servers=servers, workers=workers, threads=threads)
    assert describe(pins) == expected
    own = [core for chosen in pins.values() for core in chosen]
    if len(cores) >= workers * threads + servers and servers:
        assert sorted(own) == sorted(cores)  # each core once


def test_cores_are_written_as_runs() -> None:
    assert shown([3, 0, 1, 2, 6]) == "0-3,6"


def test_nothing_is_pinned_by_default() -> None:
    assert not JobConfig().launch.affinity.wanted

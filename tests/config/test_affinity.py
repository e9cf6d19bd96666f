"""The setting of cores. What it chooses: test_core_plan.py. Pinned jobs: tests/integration/test_affinity.py."""

from __future__ import annotations

import pytest

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


@every("value", ["none", "auto", "{workers: [[0], [1]], servers: [[1, 0]]}"])
def test_an_affinity_is_set_on_the_command_line_and_reads_back_equal(value: str) -> None:
    config = parse_config("", [f"launch.affinity={value}"])
    assert parse_config(config.to_yaml()) == config
    assert config.launch.affinity.wanted == (value != "none")


def test_nothing_is_pinned_by_default() -> None:
    assert not JobConfig().launch.affinity.wanted

"""A served model that follows a run: each checkpoint is served, and what cannot be served changes nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkeep
from shardkeep.base.deadlines import Deadline
from shardkeep.inference.following import AGAIN_S, Follower
from shardkeep.inference.server.follow import following
from shardkeep.inference.server.served_model import ServedModel
from tests.support.served_clicks import as_bytes, begun, publish, texts
from tests.support.serving import Server, raw_request, scores_of

COLUMNS = texts(20, seed=8)
REQUEST = raw_request(as_bytes(COLUMNS))
LIMIT_S = 60.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def later(increments: Path, run: Path) -> list[Path]:
    """The checkpoints of `run` behind its first, which it has."""
    first, *later = begun(increments, run)
    publish(run, first)
    return later


@pytest.fixture
def served(run: Path, later: list[Path]) -> ServedModel:
    return ServedModel(shardkeep.load(run))


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def until(true: Callable[[], bool]) -> None:
    deadline = Deadline(LIMIT_S)
    while not true():
        assert not deadline.over


def test_requests_see_each_checkpoint_of_a_run_and_none_fails(
    increments: Path, run: Path, later: list[Path], served: ServedModel
) -> None:
    with Server(served) as server, following(served, Follower(run), every_s=0.01):
        for checkpoint in later[:2]:
            publish(run, checkpoint)
            deadline = Deadline(LIMIT_S)
            while (reply := server.infer(REQUEST)).model_version != str(step_of(checkpoint)):
                assert not deadline.over
            expected = shardkeep.load(increments, step_of(checkpoint)).predict(COLUMNS)
            assert np.abs(scores_of(reply) - expected).max() < 1e-6
            assert time.time() - served.current.made_at < LIMIT_S
        metrics = server.http("GET", "/metrics")[2].decode()
    assert f"shardkeep_serve_model_step {float(step_of(later[1]))}" in metrics


def test_an_error_of_any_kind_while_following_is_logged_and_counted_and_ends_nothing(
    run: Path,
    later: list[Path],
    served: ServedModel,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    follower = Follower(run)
    asked, errors = threading.Event(), [RuntimeError("a bug"), OSError(5, "Input/output error"), MemoryError()]
    look = follower.look

    def failing() -> Any:
        asked.set()
        if errors:
            raise errors.pop(0)
        return look()

    monkeypatch.setattr(follower, "look", failing)
    with Server(served) as server, following(served, follower, every_s=0.001):
        assert asked.wait(LIMIT_S)
        until(lambda: served.num_missed == 3)
        assert scores_of(server.infer(REQUEST)).shape == (20,)
        publish(run, later[0])
        until(lambda: server.infer(REQUEST).model_version == str(step_of(later[0])))
        assert "shardkeep_serve_follow_errors_total 3.0\n" in server.http("GET", "/metrics")[2].decode()
    lines = [str(vars(record).get("fields")) for record in caplog.records]
    assert len([line for line in lines if "RuntimeError: a bug" in line]) == 1
    assert any("Input/output error" in line for line in lines) and any("MemoryError" in line for line in lines)


def test_a_damaged_checkpoint_leaves_the_older_model_and_is_served_once_it_is_whole(
    run: Path, served: ServedModel
) -> None:
    now_s = [0.0]
    before, lines = served.current, list[str]()
    follower = Follower(run, clock=lambda: now_s[0])
    rows = next((run / "checkpoints").rglob("rows-*.safetensors"))
    kept = rows.read_bytes()
    rows.write_bytes(kept[: len(kept) // 2])
    with Server(served) as server, following(served, follower, every_s=0.001, told=lines.append):
        until(lambda: served.num_missed == 1)
        now_s[0] += AGAIN_S + 1
        until(lambda: served.num_missed == 2)
        assert served.current is before and scores_of(server.infer(REQUEST)).shape == (20,)
        rows.write_bytes(kept)
        now_s[0] += AGAIN_S + 1
        until(lambda: bool(lines))
        assert served.current is not before and "read all rows" in lines[0]
        assert "shardkeep_serve_follow_errors_total 2.0\n" in server.http("GET", "/metrics")[2].decode()


def test_a_model_for_which_there_is_no_memory_is_tried_again(
    run: Path, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, replace = [0.0], ServedModel.replace
    before, scarce = served.current, [True]

    def replaced(*arguments: Any) -> None:
        if scarce[0]:
            raise MemoryError
        replace(*arguments)

    monkeypatch.setattr(ServedModel, "replace", replaced)
    with following(served, Follower(run, clock=lambda: now_s[0]), every_s=0.001):
        until(lambda: served.num_missed == 1)
        scarce[0] = False
        now_s[0] += AGAIN_S + 1
        until(lambda: served.current is not before)


def test_lines_that_nobody_reads_do_not_end_the_following(run: Path, later: list[Path], served: ServedModel) -> None:
    def closed(_line: str) -> None:
        raise BrokenPipeError

    with following(served, Follower(run), every_s=0.001, told=closed):
        for checkpoint in later[:2]:
            publish(run, checkpoint)
            step = step_of(checkpoint)
            until(lambda step=step: served.current.predictor.step == step)  # type: ignore[misc]

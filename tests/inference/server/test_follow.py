"""A served model that follows a run: each checkpoint is served, and what cannot be served changes nothing."""

from __future__ import annotations

import shutil
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
from shardkeep.ps.checkpoints.folder import Checkpoints
from tests.support.click_files import COLUMNS, click_job, click_rows, write_csv
from tests.support.served_clicks import trained
from tests.support.serving import Server, raw_request, scores_of

TEXTS: Any = {name: [row[name].encode() for row in click_rows(20, seed=8)] for name in COLUMNS if name != "clicked"}
LIMIT_S = 60.0


def test_requests_see_each_checkpoint_of_a_run_and_none_fails(tmp_path: Path) -> None:
    job = click_job(write_csv(tmp_path / "train.csv", click_rows(1500)))
    job["checkpoint"] = {"every_steps": 10, "keep": 100, "full_every": 3}
    shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=tmp_path / "whole", quiet=True)
    run = tmp_path / "run"
    shutil.copytree(tmp_path / "whole", run, ignore=shutil.ignore_patterns("step-*"))
    checkpoints = Checkpoints(tmp_path / "whole" / "checkpoints").complete()
    first, *later = checkpoints
    shutil.copytree(first[1], run / "checkpoints" / first[1].name)
    served = ServedModel(shardkeep.load(run))
    with Server(served) as server, following(served, Follower(run), every_s=0.01):
        for step, folder in later:
            hidden = run / "checkpoints" / f".{folder.name}"
            shutil.copytree(folder, hidden)
            hidden.rename(run / "checkpoints" / folder.name)
            deadline = Deadline(LIMIT_S)
            while (reply := server.infer(raw_request(TEXTS))).model_version != str(step):
                assert not deadline.over
            expected = shardkeep.load(tmp_path / "whole", step).predict(
                {name: [text.decode() for text in texts] for name, texts in TEXTS.items()}
            )
            assert np.abs(scores_of(reply) - expected).max() < 1e-6
            assert time.time() - served.current.made_at < LIMIT_S
        metrics = server.http("GET", "/metrics")[2].decode()
    assert f"shardkeep_serve_model_step {float(later[-1][0])}" in metrics


def test_a_run_of_other_columns_is_not_served(tmp_path: Path) -> None:
    for name, sparse in (("served", ["user", "item"]), ("other", ["user"])):
        job = click_job(write_csv(tmp_path / "train.csv", click_rows(300)))
        job["data"]["sparse"] = sparse
        shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=tmp_path / name, quiet=True)
    served = ServedModel(shardkeep.load(tmp_path / "served"))
    before, follower = served.current, Follower(tmp_path / "other")
    with following(served, follower, every_s=0.01):
        until(lambda: served.num_missed == 1)
    assert served.current is before and follower.step


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a few checkpoints."""
    changes = {"every_steps": 10, "keep": 100, "full_every": 3}
    return trained(tmp_path_factory.mktemp("whole"), checkpoint=changes)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of it that has only the first checkpoint."""
    shutil.copytree(whole, tmp_path / "run", ignore=shutil.ignore_patterns("step-*"))
    publish(whole, tmp_path / "run", 0)
    return tmp_path / "run"


def publish(whole: Path, run: Path, number: int) -> int:
    """Adds a checkpoint. Returns its step."""
    step, folder = Checkpoints(whole / "checkpoints").complete()[number]
    shutil.copytree(folder, run / "checkpoints" / f".{folder.name}")
    (run / "checkpoints" / f".{folder.name}").rename(run / "checkpoints" / folder.name)
    return step


def until(true: Callable[[], bool]) -> None:
    deadline = Deadline(LIMIT_S)
    while not true():
        assert not deadline.over


def test_an_error_of_any_kind_while_following_is_logged_and_counted_and_ends_nothing(
    whole: Path, run: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, follower = ServedModel(shardkeep.load(run)), Follower(run)
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
        assert scores_of(server.infer(raw_request(TEXTS))).shape == (20,)
        step = publish(whole, run, 1)
        until(lambda: server.infer(raw_request(TEXTS)).model_version == str(step))
        assert "shardkeep_serve_follow_errors_total 3.0\n" in server.http("GET", "/metrics")[2].decode()
    lines = [str(vars(record).get("fields")) for record in caplog.records]
    assert len([line for line in lines if "RuntimeError: a bug" in line]) == 1
    assert any("Input/output error" in line for line in lines) and any("MemoryError" in line for line in lines)


def test_a_damaged_checkpoint_leaves_the_older_model_and_is_served_once_it_is_whole(whole: Path, run: Path) -> None:
    served, now_s = ServedModel(shardkeep.load(run)), [0.0]
    before, lines = served.current, list[str]()
    follower = Follower(run, clock=lambda: now_s[0])
    rows = next((run / "checkpoints").rglob("rows-*.safetensors"))
    kept = rows.read_bytes()
    rows.write_bytes(kept[: len(kept) // 2])
    with Server(served) as server, following(served, follower, every_s=0.001, told=lines.append):
        until(lambda: served.num_missed == 1)
        now_s[0] += AGAIN_S + 1
        until(lambda: served.num_missed == 2)
        assert served.current is before and scores_of(server.infer(raw_request(TEXTS))).shape == (20,)
        rows.write_bytes(kept)
        now_s[0] += AGAIN_S + 1
        until(lambda: bool(lines))
        assert served.current is not before and "read all rows" in lines[0]
        assert "shardkeep_serve_follow_errors_total 2.0\n" in server.http("GET", "/metrics")[2].decode()


def test_a_model_for_which_there_is_no_memory_is_tried_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served, now_s, replace = ServedModel(shardkeep.load(run)), [0.0], ServedModel.replace
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


def test_lines_that_nobody_reads_do_not_end_the_following(whole: Path, run: Path) -> None:
    served = ServedModel(shardkeep.load(run))

    def closed(_line: str) -> None:
        raise BrokenPipeError

    with following(served, Follower(run), every_s=0.001, told=closed):
        for number in (1, 2):
            step = publish(whole, run, number)
            until(lambda step=step: served.current.predictor.step == step)  # type: ignore[misc]

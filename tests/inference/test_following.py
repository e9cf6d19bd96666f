"""Follower: the model after each checkpoint of a run, from increments, beside the model that is loaded whole."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkeep
from shardkeep.base.errors import CheckpointError, UserError
from shardkeep.inference import following, trained as model_reading
from shardkeep.inference.following import Followed, Follower
from shardkeep.inference.predictor import Predictor
from shardkeep.ps.checkpoints.folder import Checkpoints
from tests.support.served_clicks import begun, publish, texts, trained

ROWS = {name: [*column, "x" if name == "user" else "2"] for name, column in texts(60, seed=8).items()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def checkpoints(increments: Path, run: Path) -> list[Path]:
    """Those of `run`, which has none yet."""
    return begun(increments, run)


def check_as_loaded(found: Followed | None, run: Path) -> np.ndarray:
    assert found is not None
    scores_N = Predictor(found.trained).predict(ROWS)
    assert np.array_equal(scores_N, shardkeep.load(run, found.trained.step).predict(ROWS))
    return scores_N


def rows_of(checkpoint: Path) -> Path:
    return next(checkpoint.rglob("rows-*.safetensors"))


def test_a_checkpoint_that_the_job_deletes_while_it_is_read_gives_way_to_the_newer_one(
    run: Path, checkpoints: list[Path], increments: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Checkpoints(increments / "checkpoints")
    first, second = [path for step, path in steps.complete() if len(steps.load(step).chain) == 1][:2]
    publish(run, first)
    load_snapshots, tables = model_reading.load_snapshots, []

    def while_the_job_goes_on(*arguments: Any, **options: Any) -> None:
        tables.append(arguments)
        if len(tables) == 1:
            publish(run, second)
            shutil.rmtree(run / "checkpoints" / first.name)
        load_snapshots(*arguments, **options)

    monkeypatch.setattr(model_reading, "load_snapshots", while_the_job_goes_on)
    assert shardkeep.load(run).step == Checkpoints(run / "checkpoints").complete()[-1][0]
    assert len(tables) == 2


def test_each_checkpoint_becomes_the_model_that_loading_it_gives(run: Path, checkpoints: list[Path]) -> None:
    follower = Follower(run)
    assert follower.look() is None
    fulls, scores = [], []
    for number, checkpoint in enumerate(checkpoints):
        publish(run, checkpoint)
        if number % 5 == 2:
            continue  # a slow follower sees two at once
        found = follower.look()
        assert found is not None and follower.look() is None
        fulls.append(found.full)
        scores.append(check_as_loaded(found, run))
    assert fulls == [True, False, False, True, False, False, True]
    assert all(not np.array_equal(a, b) for a, b in itertools.pairwise(scores))


def test_many_increments_become_one_layer(run: Path, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MOST_LAYERS", 2)
    follower, last = Follower(run), None
    for checkpoint in checkpoints[:8]:
        publish(run, checkpoint)
        last = follower.look()
        assert last is not None
    check_as_loaded(last, run)


def test_a_base_that_is_pruned_meanwhile_is_left_out_until_the_next_full_checkpoint(
    run: Path, checkpoints: list[Path]
) -> None:
    publish(run, *checkpoints[:3])
    follower, rows = Follower(run), rows_of(run / "checkpoints" / checkpoints[0].name)
    kept = rows.read_bytes()
    rows.unlink()
    with pytest.raises((CheckpointError, OSError), match=rows.name):
        follower.look()
    rows.write_bytes(kept)
    assert follower.look() is None  # not yet
    publish(run, *checkpoints[3:5])  # the newer one does not wait
    found = follower.look()
    assert found is not None and found.full and found.trained.step == 5
    check_as_loaded(found, run)


def test_a_checkpoint_that_cannot_be_read_is_tried_again_after_a_while(run: Path, checkpoints: list[Path]) -> None:
    publish(run, checkpoints[0])
    now_s, rows = [100.0], rows_of(run / "checkpoints")
    follower = Follower(run, clock=lambda: now_s[0])
    kept = rows.read_bytes()
    rows.write_bytes(kept[:-1])
    for _ in range(2):
        with pytest.raises(CheckpointError, match=rows.name):
            follower.look()
        now_s[0] += following.AGAIN_S - 0.1
        assert follower.look() is None
        now_s[0] += 0.2
    rows.write_bytes(kept)
    check_as_loaded(follower.look(), run)
    now_s[0] += 10 * following.AGAIN_S
    assert follower.look() is None  # it is the one that is known


def test_a_model_that_could_not_be_used_is_given_once_more(run: Path, checkpoints: list[Path]) -> None:
    publish(run, *checkpoints[:2])
    now_s = [100.0]
    follower = Follower(run, clock=lambda: now_s[0])
    first = follower.look()
    follower.forget()
    assert first is not None and follower.look() is None
    now_s[0] += following.AGAIN_S + 0.1
    again = follower.look()
    assert again is not None and again.full and again.trained.step == first.trained.step
    check_as_loaded(again, run)


def test_a_job_that_went_back_is_followed(run: Path, checkpoints: list[Path]) -> None:
    publish(run, *checkpoints[:3])
    follower = Follower(run)
    assert follower.look() is not None
    shutil.rmtree(run / "checkpoints" / checkpoints[2].name)
    found = follower.look()
    assert found is not None and found.full and found.trained.step == 2


def test_only_runs_can_be_followed(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("no run")
    for path, why in ((tmp_path, r"is not a run folder; it has no config\.yaml"), (file, r"there is no such folder")):
        with pytest.raises(UserError, match=why):
            Follower(path)


def test_a_run_may_begin_later(increments: Path, run: Path) -> None:
    follower = Follower(run)
    assert follower.look() is None and follower.awaited() == f"{run} does not exist yet"
    run.mkdir()
    assert follower.look() is None and follower.awaited() == f"{run} does not exist yet"
    run.rmdir()
    checkpoints = begun(increments, run)
    assert follower.look() is None and follower.awaited() == f"{run} has no checkpoint yet"
    publish(run, checkpoints[0])
    found = follower.look()
    assert found is not None and found.trained.step > 0 and follower.awaited() is None


def test_rows_that_go_return_to_their_initial_value_in_the_model_that_follows(tmp_path: Path, run: Path) -> None:
    evict = {"ttl_steps": 2, "sweep_steps": 1}
    tables = {"default": {"dim": 4, "evict": evict}, "user": {"evict": evict, "admit": {"min_count": 2}}}
    often = {"every_steps": 2, "keep": 1000, "full_every": 4}
    checkpoints, removed = begun(trained(tmp_path, "whole", tables=tables, checkpoint=often), run), 0
    follower = Follower(run)
    for checkpoint in checkpoints:
        publish(run, checkpoint)
        found = follower.look()
        check_as_loaded(found, run)
        removed += found is not None and not found.full and any(checkpoint.rglob("removed.safetensors"))
    assert removed > 2

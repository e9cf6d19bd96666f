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
from shardkeep.inference.following import Follower
from shardkeep.inference.predictor import Predictor
from shardkeep.ps.checkpoints.folder import Checkpoints
from tests.support.click_files import COLUMNS, click_job, click_rows, write_csv

ROWS = {
    name: [row[name] for row in click_rows(150, seed=8)] + ["", "x"] * (name == "user") + ["1", "2"] * (name != "user")
    for name in COLUMNS
    if name != "clicked"
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with many checkpoints: of three in a row two are increments."""
    folder = tmp_path_factory.mktemp("following")
    job = click_job(write_csv(folder / "train.csv", click_rows(3000)))
    job["checkpoint"] = {"every_steps": 5, "keep": 1000, "full_every": 4}
    shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=folder / "run", quiet=True)
    return folder / "run"


def copied(trained: Path, run: Path) -> tuple[Path, list[Path]]:
    """A copy of the run without checkpoints, and these, oldest first."""
    shutil.copytree(trained, run, ignore=shutil.ignore_patterns("step-*"))
    return run, [path for _, path in Checkpoints(trained / "checkpoints").complete()]


def publish(checkpoint: Path, run: Path) -> None:
    """As a job does it: by a rename."""
    hidden = run / "checkpoints" / f".{checkpoint.name}"
    shutil.copytree(checkpoint, hidden)
    hidden.rename(run / "checkpoints" / checkpoint.name)


def test_a_checkpoint_that_the_job_deletes_while_it_is_read_gives_way_to_the_newer_one(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = copied(trained, tmp_path / "run")
    steps = Checkpoints(trained / "checkpoints")
    first, second = [path for step, path in steps.complete() if len(steps.load(step).chain) == 1][:2]
    publish(first, run)
    load_snapshots, tables = model_reading.load_snapshots, []

    def while_the_job_goes_on(*arguments: Any, **options: Any) -> None:
        tables.append(arguments)
        if len(tables) == 1:
            publish(second, run)
            shutil.rmtree(run / "checkpoints" / first.name)
        load_snapshots(*arguments, **options)

    monkeypatch.setattr(model_reading, "load_snapshots", while_the_job_goes_on)
    assert shardkeep.load(run).step == Checkpoints(run / "checkpoints").complete()[-1][0]
    assert len(tables) == 2


def test_each_checkpoint_becomes_the_model_that_loading_it_gives(trained: Path, tmp_path: Path) -> None:
    run, checkpoints = copied(trained, tmp_path / "run")
    follower = Follower(run)
    assert follower.look() is None
    fulls, scores = [], []
    for number, checkpoint in enumerate(checkpoints):
        publish(checkpoint, run)
        if number % 5 == 4:
            continue  # a slow follower sees two at once
        found = follower.look()
        assert found is not None and follower.look() is None
        fulls.append(found.full)
        model = Predictor(found.trained)
        scores.append(model.predict(ROWS))
        assert np.array_equal(scores[-1], shardkeep.load(run, found.trained.step).predict(ROWS))
    assert fulls.count(True) <= len(fulls) // 3 and len(fulls) > 10
    assert all(not np.array_equal(a, b) for a, b in itertools.pairwise(scores))


def test_many_increments_become_one_layer(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MOST_LAYERS", 2)
    run, checkpoints = copied(trained, tmp_path / "run")
    follower, last = Follower(run), None
    for checkpoint in checkpoints[:8]:
        publish(checkpoint, run)
        last = follower.look()
        assert last is not None
    assert last is not None
    assert np.array_equal(Predictor(last.trained).predict(ROWS), shardkeep.load(run).predict(ROWS))


def test_a_base_that_is_pruned_meanwhile_is_left_out_until_the_next_full_checkpoint(
    trained: Path, tmp_path: Path
) -> None:
    run, checkpoints = copied(trained, tmp_path / "run")
    for checkpoint in checkpoints[:3]:
        publish(checkpoint, run)
    follower = Follower(run)
    rows = next((run / "checkpoints" / checkpoints[0].name).rglob("rows-*.safetensors"))
    kept = rows.read_bytes()
    rows.unlink()
    with pytest.raises((CheckpointError, OSError), match=rows.name):
        follower.look()
    rows.write_bytes(kept)
    assert follower.look() is None  # not yet
    for checkpoint in checkpoints[3:5]:
        publish(checkpoint, run)
    found = follower.look()
    assert found is not None and found.full
    assert np.array_equal(Predictor(found.trained).predict(ROWS), shardkeep.load(run).predict(ROWS))


def test_a_checkpoint_that_cannot_be_read_is_tried_again_after_a_while(trained: Path, tmp_path: Path) -> None:
    run, checkpoints = copied(trained, tmp_path / "run")
    publish(checkpoints[0], run)
    now_s = [100.0]
    follower = Follower(run, clock=lambda: now_s[0])
    rows = next((run / "checkpoints").rglob("rows-*.safetensors"))
    kept = rows.read_bytes()
    rows.write_bytes(kept[:-1])
    for _ in range(2):
        with pytest.raises(CheckpointError, match=rows.name):
            follower.look()
        now_s[0] += following.AGAIN_S - 0.1
        assert follower.look() is None
        now_s[0] += 0.2
    rows.write_bytes(kept)
    found = follower.look()
    assert found is not None
    assert np.array_equal(Predictor(found.trained).predict(ROWS), shardkeep.load(run).predict(ROWS))
    now_s[0] += 10 * following.AGAIN_S
    assert follower.look() is None  # it is the one that is known


def test_a_newer_checkpoint_does_not_wait_for_one_that_cannot_be_read(trained: Path, tmp_path: Path) -> None:
    run, checkpoints = copied(trained, tmp_path / "run")
    for checkpoint in checkpoints[:4]:
        publish(checkpoint, run)
    follower = Follower(run, clock=lambda: 100.0)
    next((run / "checkpoints" / checkpoints[3].name).rglob("rows-*.safetensors")).unlink()
    with pytest.raises((CheckpointError, OSError)):
        follower.look()
    publish(checkpoints[4], run)
    found = follower.look()
    assert found is not None and found.trained.step == Checkpoints(run / "checkpoints").last_step()


def test_a_model_that_could_not_be_used_is_given_once_more(trained: Path, tmp_path: Path) -> None:
    run, checkpoints = copied(trained, tmp_path / "run")
    for checkpoint in checkpoints[:2]:
        publish(checkpoint, run)
    now_s = [100.0]
    follower = Follower(run, clock=lambda: now_s[0])
    first = follower.look()
    follower.forget()
    assert first is not None and follower.look() is None
    now_s[0] += following.AGAIN_S + 0.1
    again = follower.look()
    assert again is not None and again.full and again.trained.step == first.trained.step
    assert np.array_equal(Predictor(again.trained).predict(ROWS), shardkeep.load(run).predict(ROWS))


def test_a_job_that_went_back_is_followed(trained: Path, tmp_path: Path) -> None:
    run, checkpoints = copied(trained, tmp_path / "run")
    for checkpoint in checkpoints[:3]:
        publish(checkpoint, run)
    follower = Follower(run)
    assert follower.look() is not None
    shutil.rmtree(run / "checkpoints" / checkpoints[2].name)
    found = follower.look()
    assert found is not None and found.full and found.trained.step == Checkpoints(run / "checkpoints").last_step()


def test_only_runs_can_be_followed(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("no run")
    for path, why in ((tmp_path, r"is not a run folder; it has no config\.yaml"), (file, r"there is no such folder")):
        with pytest.raises(UserError, match=why):
            Follower(path)


def test_a_run_may_begin_later(trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "later"
    follower = Follower(path)
    assert follower.look() is None and follower.awaited() == f"{path} does not exist yet"
    path.mkdir()
    assert follower.look() is None and follower.awaited() == f"{path} does not exist yet"
    path.rmdir()
    _, checkpoints = copied(trained, path)
    assert follower.look() is None and follower.awaited() == f"{path} has no checkpoint yet"
    publish(checkpoints[0], path)
    found = follower.look()
    assert found is not None and found.trained.step > 0 and follower.awaited() is None


def test_rows_that_go_return_to_their_initial_value_in_the_model_that_follows(tmp_path: Path) -> None:
    evict = {"ttl_steps": 4, "sweep_steps": 2}
    tables = {"default": {"dim": 4, "evict": evict}, "user": {"evict": evict, "admit": {"min_count": 2}}}
    job = click_job(write_csv(tmp_path / "train.csv", click_rows(3000)), tables=tables)
    job["checkpoint"] = {"every_steps": 5, "keep": 1000, "full_every": 4}
    shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=tmp_path / "whole", quiet=True)
    run, checkpoints = copied(tmp_path / "whole", tmp_path / "run")
    follower, removed = Follower(run), 0
    for checkpoint in checkpoints:
        publish(checkpoint, run)
        found = follower.look()
        assert found is not None
        removed += not found.full and any(checkpoint.rglob("removed.safetensors"))
        whole = shardkeep.load(run, found.trained.step)
        assert np.array_equal(Predictor(found.trained).predict(ROWS), whole.predict(ROWS))
    assert removed > 5

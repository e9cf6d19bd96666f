"""A served model that follows a run: each checkpoint is served, and what cannot be served changes nothing."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

import shardkeep
from shardkeep.base.deadlines import Deadline
from shardkeep.inference.following import Follower
from shardkeep.inference.server.follow import following
from shardkeep.inference.server.served_model import ServedModel
from shardkeep.ps.checkpoints import Checkpoints
from tests.support.click_files import COLUMNS, click_job, click_rows, write_csv
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
        deadline = Deadline(LIMIT_S)
        while not follower.step:  # it has read the checkpoint
            assert not deadline.over
    assert served.current is before

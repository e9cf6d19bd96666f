"""Estimates beside the summary.json of the jobs themselves, run as real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardkeep.config import JobConfig
from shardkeep.estimate.estimate import estimate
from tests.support.cluster import Cluster
from tests.support.golden import Golden

pytestmark = pytest.mark.waits_for_processes

SMALL = ("data.synthetic.train_samples=50000", "data.synthetic.eval_samples=500", "train.batch_size=512")


def agrees(found: dict[str, Any], summary: dict[str, Any]) -> None:
    assert found["bytes_per_sample"] == pytest.approx(summary["bytes"]["per_sample"], rel=0.05)
    assert [t["rows"] for t in found["tables"]] == [t["rows"] for t in summary["tables"]]
    told, held = (sum(t["bytes"] for t in tables) for tables in (found["tables"], summary["tables"]))
    assert told == pytest.approx(held, rel=0.25)


def test_a_job_moves_as_many_bytes_per_sample_as_was_estimated(golden: Golden) -> None:
    agrees(estimate(JobConfig.model_validate(golden.config), gbit_per_s=10.0), golden.summary)


@pytest.mark.chaos
def test_the_demo_moves_as_many_bytes_per_sample_as_was_estimated(tmp_path: Path) -> None:
    settings = [word for setting in SMALL for word in ("--set", setting)]
    with Cluster(tmp_path) as cluster:
        asked = cluster.command("estimate", "demo", "--json", *settings).end()
        assert (asked.code, asked.err) == (0, "")
        ended = cluster.command("train", "demo", "--run-dir", str(tmp_path / "run"), *settings).end()
        assert (ended.code, ended.err) == (0, "")
    agrees(json.loads(asked.out), json.loads((tmp_path / "run" / "summary.json").read_text()))

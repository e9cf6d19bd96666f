"""The estimate of the example job beside the summary.json of the job itself, run as real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cluster import Cluster

pytestmark = pytest.mark.processes

SMALL = ("data.synthetic.train_samples=50000", "data.synthetic.eval_samples=500", "train.batch_size=512")


def test_the_demo_moves_as_many_bytes_per_sample_as_was_estimated(tmp_path: Path) -> None:
    settings = [word for setting in SMALL for word in ("--set", setting)]
    with Cluster(tmp_path) as cluster:
        asked = cluster.command("estimate", "demo", "--json", *settings).end()
        assert (asked.code, asked.err) == (0, "")
        ended = cluster.command("train", "demo", "--run-dir", str(tmp_path / "run"), *settings).end()
        assert (ended.code, ended.err) == (0, "")
    found, summary = json.loads(asked.out), json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["bytes_per_sample"] == pytest.approx(summary["bytes"]["per_sample"], rel=0.05)
    assert [t["rows"] for t in found["tables"]] == [t["rows"] for t in summary["tables"]]
    told, held = (sum(t["bytes"] for t in tables) for tables in (found["tables"], summary["tables"]))
    assert told == pytest.approx(held, rel=0.25)

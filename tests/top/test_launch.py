"""Whole jobs from their configs, in one process. Those in processes: tests/integration/test_jobs.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardkeep
from shardkeep.base.errors import UserError
from shardkeep.report import RunFolder

TINY: dict[str, Any] = {
    "name": "tiny",
    "data": {"synthetic": {"train_samples": 4000, "eval_samples": 500, "num_dense": 3, "table_sizes": [50, 90]}},
    "model": {"bottom": [8], "top": [8]},
    "tower": {"compile": "off"},
    "train": {"batch_size": 100, "report_every_s": 0.1},
}


def tiny(**changes: Any) -> shardkeep.JobConfig:
    return shardkeep.JobConfig.model_validate({**TINY, **changes})


def test_a_job_in_one_process_fills_its_run_folder(tmp_path: Path) -> None:
    summary = shardkeep.train(tiny(servers=0, workers=1), run_dir=tmp_path / "run", quiet=True)
    folder = RunFolder(tmp_path / "run")
    assert summary == folder.summary()
    assert (summary["status"], summary["steps"], summary["samples"]) == ("completed", 40, 4000)
    assert 0.4 < summary["eval"]["auc"] <= 1.0
    assert [t["name"] for t in summary["tables"]] == ["C1", "C2"]
    assert folder.metrics_path.exists()


def test_a_model_option_of_another_model_is_the_users_error_and_written_down(tmp_path: Path) -> None:
    config = tiny(servers=0, workers=1, model={"name": "dlrm", "cross_layers": 2})
    with pytest.raises(UserError, match="cross_layers"):
        shardkeep.train(config, run_dir=tmp_path / "run", quiet=True)
    assert (RunFolder(tmp_path / "run").summary() or {})["status"] == "failed"

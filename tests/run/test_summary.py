"""`Summary` describes summary.json completely: its keys are those that jobs write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import shardkeep
from shardkeep.run.folder import NO_SUMMARY
from shardkeep.run.summary import Summary
from tests.support.cases import every
from tests.support.golden import Golden

JOB: dict[str, Any] = {
    "servers": 0,
    "workers": 1,
    "data": {"synthetic": {"train_samples": 400, "eval_samples": 100, "num_dense": 2, "table_sizes": [20, 30]}},
    "model": {"bottom": [4], "hidden": [4]},
    "train": {"batch_size": 50},
    "tower": {"compile": "off"},
    "checkpoint": {"every_steps": "off"},
}
COMPRESSED = {
    "consistency": "bounded",
    "compression": {
        "push": {"values": "int8", "pool_rows": 64, "keep_rows": 0.5},
        "pull": {"values": "int8", "cache_rows": 64, "lease": 4},
    },
}


def unknown(model: BaseModel, path: str = "") -> Iterator[str]:
    """The keys of a parsed summary that no model describes, with the path to each."""
    yield from (f"{path}{key}" for key in model.model_extra or {})
    for name in type(model).model_fields:
        value = getattr(model, name)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, BaseModel):
                yield from unknown(each, f"{path}{name}.")


def trained(folder: Path, **changes: Any) -> Summary:
    return shardkeep.train(shardkeep.JobConfig.model_validate(JOB | changes), run_dir=folder / "run", quiet=True)


def test_every_key_of_a_job_of_processes_is_described(golden: Golden) -> None:
    assert golden.summary and not list(unknown(Summary.model_validate(golden.summary)))


@every("changes", [{}, COMPRESSED], ids=["plain", "compressed"])
def test_train_returns_what_summary_json_holds(tmp_path: Path, changes: dict[str, Any]) -> None:
    summary = trained(tmp_path, **changes)
    written = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert not list(unknown(summary))
    assert summary.to_dict() == written | {"run_dir": str(tmp_path / "run")}
    assert summary.status == "completed" and summary.run_dir == tmp_path / "run"
    assert (summary.residuals_and_cache is None) == (not changes)
    assert summary.held_back == summary.residuals_and_cache


def test_every_key_of_a_job_that_ended_early_is_described() -> None:
    assert not list(unknown(Summary.model_validate({**NO_SUMMARY, "status": "failed"})))


def test_a_key_that_no_model_describes_is_found() -> None:
    found = {"status": "failed", "news": 1, "job": {"starts": 1, "more": 2}}
    assert list(unknown(Summary.model_validate(found))) == ["news", "job.more"]


def test_a_summary_cannot_be_changed_and_is_no_mapping() -> None:
    summary = Summary(status="completed")
    with pytest.raises(ValidationError, match="frozen"):
        summary.steps = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"write summary\.eval, or summary\.to_dict\(\)\['eval'\]"):
        summary["eval"]

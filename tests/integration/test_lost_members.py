"""Features with a state of their own x losses of members, in one process and without a clock: the same bits in sync.

tests/integration/test_recovered_features.py has them as jobs of processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardkeep.ps.checkpoints.folder import Checkpoints
from tests.support.local_job import LocalJob
from tests.support.resumed_jobs import COMPRESSION, drawn_data, job_config

ADAM = "{name: adam, lr: 0.01, weight_decay: 0.001, weight_decay_on: table}"
STOPPING = "{metric: logloss, patience: 9, min_delta: 1.0}"
FALLING = "{metric: logloss, patience: 1, min_delta: 1.0, factor: 0.3}"
FEATURES: dict[str, dict[str, Any]] = {
    "compression": {
        "compression": COMPRESSION % "powersgd",
        "tables__b__compression": "{push: {rounding: stochastic}}",
    },
    "policies": {
        "tables__default__evict": "{ttl_steps: 2, sweep_steps: 1}",
        "tables__b__admit": "{min_count: 2, window_steps: 4}",
        "tables__b__evict": "{ttl_steps: 3, max_rows: 262144, decay: 0.8, decay_steps: 2, sweep_steps: 2}",
        "checkpoint__full_every": 3,
        "train__epochs": 2,
    },
    "packed rows, decay, norm, falling rate": {
        "tables__default__dtype": "int8",
        "tables__default__optimizer": ADAM,
        "tables__b": "{dim: 6, dtype: fp16, optimizer: adam, state_dtype: bf16}",
        "model__norm": "batch",
        "eval__every_steps": 2,
        "train__plateau": FALLING,
        "train__early_stopping": STOPPING,
    },
}
LOST_AT, SAVED_AT = 5, {"policies": 6}
"""The first checkpoint is that of step 3; of step 6 with policies: an increment."""


def end_of(job: LocalJob) -> tuple[str, dict[str, Any]]:
    summary = job.run()
    return summary["state_digest"], summary["eval"]


@pytest.mark.parametrize("feature", FEATURES)
def test_whoever_is_lost_a_job_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path, feature: str) -> None:
    config = job_config(2, 2, **{"train__epochs": 1} | FEATURES[feature])
    whole = Checkpoints(tmp_path / "undisturbed")
    undisturbed = end_of(LocalJob(config, drawn_data(), whole))
    again = LocalJob(config, drawn_data(), Checkpoints(tmp_path / "again"), whole.load(SAVED_AT.get(feature, 3)))
    assert end_of(again) == undisturbed, "everything is lost but a checkpoint"
    folder = tmp_path / "lost"
    folder.mkdir()
    job = LocalJob(
        config, drawn_data(), Checkpoints(folder / "checkpoints"), rewinds=folder, journals=folder / "journals"
    )
    job.lose(LOST_AT)
    job.replace_server(1)  # it has the rows of a checkpoint and of its journal
    replaced = () if feature == "compression" else (1,)  # what a worker has not sent dies with it
    job.continue_at(LOST_AT, replaced=replaced)  # another worker takes the tower of the first
    assert end_of(job) == undisturbed

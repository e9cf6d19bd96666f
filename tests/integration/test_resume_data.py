"""Resuming with other data, or with more of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardkeep.base.errors import ConfigError
from shardkeep.ps.checkpoints.folder import Checkpoint, Checkpoints
from tests.support.local_job import LocalJob
from tests.support.resumed_jobs import job_config, marked
from tests.support.samples import as_data, draw


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """At step 9 of a job on data `aaaa-eeee`, 100 samples."""
    checkpoints = Checkpoints(tmp_path_factory.mktemp("marked"))
    LocalJob(job_config(1, 1), marked("aaaa-eeee"), checkpoints).run()
    return checkpoints.load(9)


def test_other_data_of_as_many_samples_are_refused_until_they_are_accepted(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    told = (
        r"\(fingerprint bbbb now, aaaa then; 100 samples now, 100 then\); put those back, or --set data.accept=bbbb to "
    )
    for config in (job_config(1, 1), job_config(1, 1, data__accept="cccc")):
        with pytest.raises(ConfigError, match=told):
            LocalJob(config, marked("bbbb-eeee"), resumed=checkpoint)
    accepted = job_config(1, 1, data__accept="bbbb")
    LocalJob(accepted, marked("bbbb-eeee"), Checkpoints(tmp_path / "after"), checkpoint).run()
    assert {folder.name for _, folder in Checkpoints(tmp_path / "after").complete()} >= {"step-00000012"}
    assert Checkpoints(tmp_path / "after").load(26).facts["data"] == "bbbb-eeee"


def test_with_more_samples_the_epoch_goes_on_at_the_same_position(checkpoint: Checkpoint) -> None:
    more = replace(as_data(draw(130, pooling="mean")), fingerprint="bbbb")
    assert LocalJob(job_config(1, 1, data__accept="bbbb"), more, resumed=checkpoint).run()["samples"] == 2 * 130


def test_other_evaluation_data_are_told_and_trained_beside(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="shardkeep")
    LocalJob(job_config(1, 1), marked("aaaa-ffff"), resumed=checkpoint)
    told = [getattr(record, "fields", {}).get("why", "") for record in caplog.records]
    assert any("the evaluation data are not those of step-00000009" in text for text in told)


def test_a_checkpoint_of_an_earlier_version_which_noted_no_fingerprint_is_gone_on_from(checkpoint: Checkpoint) -> None:
    facts = {key: value for key, value in checkpoint.facts.items() if key != "data"}
    LocalJob(job_config(1, 1), marked("bbbb-eeee"), resumed=replace(checkpoint, facts=facts))

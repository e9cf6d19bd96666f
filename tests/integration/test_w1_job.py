"""benchmarks/w1_job.py: W1 as a real job, measured from outside; and the samples that it hands to the job."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import psutil
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import w1_data
import w1_job
import workload
from w1_job import Moment


@pytest.mark.chaos
@pytest.mark.waits_for_processes
def test_a_job_is_measured_in_all_its_processes_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # it keeps samples there
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    figures = w1_job.shardkeep_job(servers=1, dim=4, workers=1, seconds=0.5, warm_up_s=0.1, batch=64)
    assert figures["samples_per_s"] == pytest.approx(64 * figures["steps_per_s"]) and figures["steps_per_s"] > 1
    parts = [figures[f"{part}_cpu_us"] for part in ("worker", "server", "other")]
    assert sum(parts) == pytest.approx(figures["cpu_us_per_sample"]) and min(parts[:2]) > 1
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_figures_are_those_between_two_moments() -> None:
    before = Moment(10, 100.0, {"worker 0": 1.0, "worker 1": 1.0, "server 0": 2.0, "coordinator 0": 0.5})
    after = Moment(30, 104.0, {"worker 0": 3.0, "worker 1": 2.0, "server 0": 2.5, "coordinator 0": 0.75})
    assert w1_job.figures(before, after, 1000) == {
        "samples_per_s": 5000.0,
        "steps_per_s": 5.0,
        "cpu_us_per_sample": pytest.approx(187.5),
        "worker_cpu_us": pytest.approx(150.0),
        "server_cpu_us": pytest.approx(25.0),
        "other_cpu_us": pytest.approx(12.5),
    }


def test_the_jobs_samples_are_the_workloads_batches_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # it keeps them there
    data = w1_data.ready(split="train", num_batches=2, seed=3)
    assert data is not None and w1_data.ready(split="eval", num_batches=2, seed=3) is None
    ids_NFB = workload.draw_ids(2, seed=3)
    dense_NBI, label_NB1 = workload.draw_dense(2, seed=3)
    second = data.gather(np.arange(workload.BATCH, 2 * workload.BATCH))
    assert len(data) == 2 * workload.BATCH
    assert np.array_equal(second.dense_BI, dense_NBI[1]) and np.array_equal(second.label_BT, label_NB1[1])
    assert all(np.array_equal(second.ids[name].values_N, ids_NFB[1, f]) for f, name in enumerate(data.names))
    with pytest.raises(ValueError, match=r"consecutive.*order: stored"):
        data.gather(np.array([0, 2]))

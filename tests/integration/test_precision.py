"""Jobs of real processes whose tables have rows of fewer than 32 bits a value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.chaos import SHORT, SHORT_STEPS, completed
from tests.support.cluster import Cluster
from tests.support.faults import Fault, play

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.timeout(600)]
PACKED: dict[str, Any] = {
    **SHORT,
    "tables": {
        "default": {"dim": 8, "dtype": "int8"},
        "C2": {"dtype": "fp16", "optimizer": "adam", "state_dtype": "bf16"},
    },
}


@pytest.fixture
def cluster(tmp_path: Path) -> Any:
    with Cluster(tmp_path) as cluster:
        yield cluster


@pytest.mark.slow
def test_deaths_and_another_number_of_servers_change_no_bit_of_packed_rows(cluster: Cluster) -> None:
    whole = completed(*cluster.job(PACKED, name="whole"), steps=SHORT_STEPS)
    job, folder = cluster.job(PACKED, name="killed")
    kills = [Fault.kill("server 0", at=45), Fault.kill("server 1", "worker 1", at=120)]
    assert not play(job, folder, kills, limit_s=200.0)
    killed = completed(job, folder, steps=SHORT_STEPS)
    assert len(killed["recoveries"]) == 2
    assert killed["state_digest"] == whole["state_digest"] and killed["eval"] == whole["eval"]
    job, folder = cluster.job({**PACKED, "servers": 3}, name="three")
    assert completed(job, folder, steps=SHORT_STEPS)["state_digest"] == whole["state_digest"]


def test_a_state_that_an_optimizer_does_not_take_is_refused_in_one_line(cluster: Cluster) -> None:
    wrong = {**PACKED, "tables": {"default": {"state_dtype": "bf16"}}}
    job, _ = cluster.job(wrong, name="wrong")
    ended = job.end()
    assert ended.code == 2 and "state_dtype: bf16 with optimizer.name: rowwise_adagrad" in ended.err, ended.err
    assert len(ended.err.strip().splitlines()) == 1 and "Traceback" not in ended.err

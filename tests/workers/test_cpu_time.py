"""CPU time of training: stretches between evaluations, the servers' beside this process's; and bytes at evaluations."""

from __future__ import annotations

import pytest

from shardkeep.config import parse_config
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.timing.cpu_time import CpuMeter
from tests.support.cases import every
from tests.support.local_job import LocalJob


class Clocks:
    """CPU seconds as a test sets them."""

    def __init__(self) -> None:
        self.worker, self.servers, self.waited = 0.0, [0.0, 0.0], 0.0

    def pass_by(self, worker: float, *servers: float) -> None:
        self.worker += worker
        self.waited += worker / 2
        self.servers = [before + more for before, more in zip(self.servers, servers, strict=True)]


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def cpu(clocks: Clocks) -> CpuMeter:
    return CpuMeter(lambda: clocks.servers, clock=lambda: clocks.worker, waits=lambda: clocks.waited)


def test_what_passes_between_stretches_is_not_counted(cpu: CpuMeter, clocks: Clocks) -> None:
    clocks.pass_by(100.0, 100.0, 100.0)  # imports, compiling
    cpu.start(10)
    clocks.pass_by(0.8, 0.2, 0.4)
    cpu.stop(20)
    clocks.pass_by(50.0, 50.0, 50.0)  # evaluation
    cpu.start(21)
    clocks.pass_by(0.7, 0.1, 0.2)
    cpu.stop(26)
    assert cpu.mean_ms() == {"steps": 15, "worker": 100.0, "server": 30.0, "waited": 50.0}


def test_what_is_excluded_is_not_counted(cpu: CpuMeter, clocks: Clocks) -> None:
    with cpu.excluded(5):  # it does not run: it does not begin to
        clocks.pass_by(100.0, 100.0, 100.0)
    assert not cpu.running
    cpu.start(10)
    clocks.pass_by(0.8, 0.2, 0.4)
    with cpu.excluded(20):
        clocks.pass_by(50.0, 50.0, 50.0)
    clocks.pass_by(0.2, 0.1, 0.1)
    cpu.stop(30)
    assert cpu.mean_ms() == {"steps": 20, "worker": 50.0, "server": 20.0, "waited": 25.0}


def test_a_stretch_with_a_replaced_server_is_left_out(cpu: CpuMeter, clocks: Clocks) -> None:
    cpu.start(0)
    clocks.pass_by(1.0, 1.0, 0.5)
    cpu.stop(10)
    cpu.start(10)
    clocks.pass_by(9.0, 9.0, 0.1)
    clocks.servers[0] = 0.0
    cpu.stop(20)
    cpu.start(20)
    cpu.drop()
    cpu.stop(30)
    assert cpu.mean_ms() == {"steps": 10, "worker": 100.0, "server": 75.0, "waited": 50.0}


def test_nothing_counted_is_nothing_told(cpu: CpuMeter) -> None:
    cpu.stop(5)
    cpu.start(5)
    cpu.stop(5)
    assert cpu.mean_ms() == {}


@every("workers", [1, 2])
def test_an_evaluation_tells_the_bytes_of_training_of_all_workers(workers: int) -> None:
    config = parse_config(
        f"""
        servers: 2
        workers: {workers}
        data: {{synthetic: {{train_samples: 1200, eval_samples: 300, num_dense: 2, table_sizes: [40, 90]}}}}
        model: {{bottom: [4], hidden: [4]}}
        tables: {{default: {{dim: 4}}}}
        tower: {{compile: off}}
        train: {{batch_size: {60 // workers}}}
        eval: {{every_steps: 8}}
        """
    )
    job = LocalJob(config, open_data(config.data, seed=config.seed))
    summary = job.run()
    records = [record for kind, record in job.records if kind == "eval"]
    assert [(r["step"], r["train_samples"]) for r in records] == [(8, 480), (16, 960), (20, 1200)]
    totals = [r["train_bytes"]["total"] for r in records]
    assert 0 < totals[0] < totals[1] < totals[2]
    counted = {direction: sum(summary["bytes"][direction].values()) for direction in ("push", "pull", "tower")}
    assert records[-1]["train_bytes"] == counted | {"total": sum(counted.values())}
    assert (counted["tower"] > 0) == (workers > 1)
    assert summary["cpu_ms"]["steps"] == 10 and summary["cpu_ms"]["worker"] > 0
    assert summary["cpu_ms"]["server"] == 0.0  # in this process: counted with the worker

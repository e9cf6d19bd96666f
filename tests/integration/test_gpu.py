"""Jobs, loops and a group of ranks with a GPU. `scripts/gpu-check` runs them where there is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from shardkeep import EmbeddingClient, TableSpec
from shardkeep.workers.collectives.process_group import ProcessCollective
from tests.support.chaos import JOB, hurt_job
from tests.support.cluster import Cluster, kinds, records
from tests.support.hurt import Hurt, in_turn
from tests.support.label_files import job_of as job_of_labels, rows_of
from tests.support.sharded import whole_values
from tests.support.towers import batch, seeded_model, tower_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(200),
]
DEMO: dict[str, Any] = {
    **JOB,
    "servers": 1,
    "workers": 1,
    "data": {"synthetic": {"train_samples": 60_000, "eval_samples": 20_000}},
    "tables": {
        "default": {"dim": 8, "optimizer": {"name": "rowwise_adagrad", "lr": 0.1, "initial_accumulator": 0.001}}
    },
    "model": {"bottom": [32], "hidden": [64, 32]},
    "train": {"batch_size": 500, "report_every_s": 0.02},
    "eval": {"every_steps": "epoch"},
    "checkpoint": {"every_steps": "off"},
}


def job_of(config: dict[str, Any], device: str, **tower: Any) -> dict[str, Any]:
    return {**config, "tower": {**config["tower"], "device": device, **tower}}


def summary_of(cluster: Cluster, config: dict[str, Any], name: str) -> dict[str, Any]:
    job, folder = cluster.job(config, name=name, fresh=True)
    ended = job.end()
    assert (ended.code, ended.err) == (0, ""), job.printed()
    return folder.summary() or {}


@pytest.fixture(scope="module")
def auc_on_cpu(tmp_path_factory: pytest.TempPathFactory) -> float:
    with Cluster(tmp_path_factory.mktemp("cpu")) as cluster:
        auc: float = summary_of(cluster, job_of(DEMO, "cpu"), "cpu")["eval"]["auc"]
    assert auc > 0.6
    return auc


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"amp": "bf16"},
        {"amp": "fp16"},
        {"compile": "on"},
        {"compile": "on", "mode": "reduce-overhead", "amp": "bf16"},
    ],
    ids=["fp32", "bf16", "fp16", "compiled", "CUDA graphs"],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_tower_on_a_gpu_learns_as_on_a_cpu(
    cluster: Cluster, auc_on_cpu: float, settings: dict[str, Any], accumulate: int
) -> None:
    config = job_of(DEMO, "cuda", **settings)
    config["train"] = {**config["train"], "batch_size": 500 // accumulate, "accumulate": accumulate}
    summary = summary_of(cluster, config, "gpu")
    assert abs(summary["eval"]["auc"] - auc_on_cpu) < 0.01
    (worker,) = [p for p in summary["processes"] if p["role"] == "worker"]
    assert worker["peak_cuda_bytes"] > 0
    assert bool(worker.get("compile_s")) == (settings.get("compile") == "on")


@pytest.mark.parametrize("encoder", ["mean", "din", "transformer", "hstu"])
def test_sequences_on_a_gpu_train_as_on_a_cpu(cluster: Cluster, encoder: str) -> None:
    """Few steps: the losses drift apart with the arithmetic, and the rows with them."""
    stream = {"task": "sequences", "train_samples": 20_000, "eval_samples": 5000, "table_sizes": [100]}
    model = {"name": "dnn", "hidden": [32], "encoder": {"name": encoder}}
    config = {**DEMO, "data": {"synthetic": stream}, "model": model}
    found = [
        summary_of(cluster, job_of(config, device, amp="off"), f"{encoder}-{number}")
        for number, device in enumerate(("cpu", "cuda"))
    ]
    assert abs(found[0]["eval"]["auc"] - found[1]["eval"]["auc"]) < 0.01
    assert abs(found[0]["eval"]["logloss"] - found[1]["eval"]["logloss"]) < 0.01


@pytest.mark.parametrize("name", ["mmoe", "ple", "dnn"])
def test_several_labels_on_a_gpu_train_as_on_a_cpu(cluster: Cluster, tmp_path: Path, name: str) -> None:
    rows = rows_of(4000)
    found = []
    for number, device in enumerate(("cpu", "cuda")):
        job = job_of_labels(tmp_path, rows, tower={"device": device, "amp": "off"}, servers=1, workers=1)
        job["model"] = {"name": name, "hidden": [16]}
        found.append(summary_of(cluster, job, f"{name}-{number}")["eval"])
    for metric in ("auc/clicked", "auc/bought", "mse/seconds"):
        assert found[0][metric] == pytest.approx(found[1][metric], abs=0.02), metric


def test_a_death_of_the_worker_or_the_server_changes_no_bit_in_sync(cluster: Cluster) -> None:
    config = job_of({**JOB, "workers": 1, "train": {**JOB["train"], "batch_size": 100}}, "cuda")
    whole, again = (summary_of(cluster, config, name)["state_digest"] for name in ("whole", "again"))
    assert whole == again
    hurts = in_turn(Hurt("worker 0", "pushing", 60), Hurt("server 1", "push received", 60))
    assert hurt_job(cluster, config, hurts, fresh=True)["state_digest"] == whole


def test_two_workers_share_a_gpu_over_gloo_and_a_death_changes_no_bit(cluster: Cluster) -> None:
    config = job_of(JOB, "cuda")
    whole = summary_of(cluster, config, "whole")["state_digest"]
    assert hurt_job(cluster, config, [Hurt("worker 1", "pushing", 120)], fresh=True)["state_digest"] == whole


def test_a_run_of_a_gpu_is_evaluated_and_resumed_without_one(cluster: Cluster) -> None:
    config = job_of({**DEMO, "servers": 0, "checkpoint": {"every_steps": 60}}, "cuda")
    job, folder = cluster.job(config, fresh=True)
    assert job.end().code == 0, job.printed()
    told = (folder.summary() or {})["eval"]["auc"]
    evaluated = cluster.command("evaluate", str(folder.path), "--json", fresh=True, env={"CUDA_VISIBLE_DEVICES": ""})
    done = evaluated.end()
    assert done.code == 0, evaluated.printed()
    assert json.loads(done.out)["auc"] == pytest.approx(told, abs=1e-4)
    longer = ("--set", "train.epochs=2", "--set", "tower.device=cpu")
    resumed = cluster.command("train", "--resume", str(folder.path), *longer, fresh=True)
    assert resumed.end().code == 0, resumed.printed()
    assert "progress" in kinds(folder) and max(r["step"] for r in records(folder) if "step" in r) == 240


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_one_rank_over_nccl_gives_the_tower_of_one_process(parallel: str) -> None:
    device = torch.device("cuda")
    found = []
    for grouped in (False, True):
        collective = (
            ProcessCollective(dist.HashStore(), rank=0, world_size=1, generation=0, backend="nccl") if grouped else None
        )
        config = {"parallel": parallel if grouped else "ddp"}
        tower = tower_of(model=seeded_model(), collective=collective, config=config, device=device, sync=False)
        for step in range(5):
            dense, values, label = batch(step, 24)
            leaves = {name: value.to(device).requires_grad_() for name, value in values.items()}
            tower.backward(dense.to(device), leaves, label.to(device), 1 / 24, last=True)
            assert tower.update(step).applied
        assert (tower.shards is not None) == (grouped and parallel == "fsdp")
        found.append(whole_values(tower).cpu())
        if collective is not None:
            assert collective.backend == "nccl"
            collective.close()
    torch.testing.assert_close(found[0], found[1])


def test_a_loop_of_ones_own_trains_on_a_gpu_as_on_a_cpu() -> None:
    losses: dict[str, list[float]] = {}
    for device in ("cpu", "cuda"):
        drawn = torch.Generator().manual_seed(0)
        weight = torch.randn(8, 1, generator=drawn).to(device)
        told = losses.setdefault(device, [])
        with EmbeddingClient.local([TableSpec(name="item", dim=8, optimizer={"name": "adagrad", "lr": 0.1})]) as client:
            for _ in range(30):
                ids = torch.randint(50, (256,), generator=drawn)
                label = (ids % 3 == 0).float().to(device)
                rows = client.lookup({"item": ids.to(device)})
                assert rows["item"].device.type == device
                loss = F.binary_cross_entropy_with_logits((rows["item"] @ weight).squeeze(1), label)
                loss.backward()
                client.apply(rows)
                told.append(loss.item())
    assert losses["cuda"][-1] < losses["cuda"][0]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-3)

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
ADAGRAD = {"name": "rowwise_adagrad", "lr": 0.1, "initial_accumulator": 0.001}
DEMO: dict[str, Any] = {
    **JOB,
    "servers": 1,
    "workers": 1,
    "data": {"synthetic": {"train_samples": 60_000, "eval_samples": 20_000}},
    "tables": {"default": {"dim": 8, "optimizer": ADAGRAD}},
    "model": {"bottom": [32], "hidden": [64, 32]},
    "train": {"batch_size": 500, "report_every_s": 0.02},
    "eval": {"every_steps": "epoch"},
    "checkpoint": {"every_steps": "off"},
}


def summary_of(cluster: Cluster, config: dict[str, Any], name: str, device: str, **tower: Any) -> dict[str, Any]:
    config = {**config, "tower": {**config["tower"], "device": device, **tower}}
    job, folder = cluster.job(config, name=name, fresh=True)
    ended = job.end()
    assert (ended.code, ended.err) == (0, ""), job.printed()
    return folder.summary() or {}


@pytest.fixture(scope="module")
def auc_on_cpu(tmp_path_factory: pytest.TempPathFactory) -> float:
    with Cluster(tmp_path_factory.mktemp("cpu")) as cluster:
        auc: float = summary_of(cluster, DEMO, "cpu", "cpu")["eval"]["auc"]
    assert auc > 0.6
    return auc


GRAPHS = {"compile": "on", "mode": "reduce-overhead", "amp": "bf16"}


@pytest.mark.parametrize(
    "settings",
    [{}, {"amp": "bf16"}, {"amp": "fp16"}, {"compile": "on"}, GRAPHS],
    ids=["fp32", "bf16", "fp16", "compiled", "CUDA graphs"],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_tower_on_a_gpu_learns_as_on_a_cpu(
    cluster: Cluster, auc_on_cpu: float, settings: dict[str, Any], accumulate: int
) -> None:
    train = {**DEMO["train"], "batch_size": 500 // accumulate, "accumulate": accumulate}
    summary = summary_of(cluster, {**DEMO, "train": train}, "gpu", "cuda", **settings)
    assert abs(summary["eval"]["auc"] - auc_on_cpu) < 0.01
    (worker,) = [p for p in summary["processes"] if p["role"] == "worker"]
    assert worker["peak_cuda_bytes"] > 0
    assert bool(worker.get("compile_s")) == (settings.get("compile") == "on")


@pytest.mark.parametrize("encoder", ["mean", "din", "transformer", "hstu"])
def test_sequences_on_a_gpu_train_as_on_a_cpu(cluster: Cluster, encoder: str) -> None:
    """Few steps: the losses drift apart with the arithmetic, and the rows with them."""
    options = {"categories": 100, "rows": 20_000, "eval_rows": 5000}
    data = {"source": "shardkeep.examples.synthetic.sequences:samples", "options": options}
    model = {"name": "dnn", "hidden": [32], "encoder": {"name": encoder}}
    config = {**DEMO, "data": data, "model": model}
    found = [summary_of(cluster, config, device, device, amp="off")["eval"] for device in ("cpu", "cuda")]
    for metric in ("auc", "logloss"):
        assert abs(found[0][metric] - found[1][metric]) < 0.01, metric


@pytest.mark.parametrize("name", ["mmoe", "ple", "dnn"])
def test_several_labels_on_a_gpu_train_as_on_a_cpu(cluster: Cluster, tmp_path: Path, name: str) -> None:
    job = job_of_labels(tmp_path, rows_of(4000), tower={"amp": "off"}, servers=1, workers=1)
    job["model"] = {"name": name, "hidden": [16]}
    found = [summary_of(cluster, job, device, device)["eval"] for device in ("cpu", "cuda")]
    for metric in ("auc/clicked", "auc/bought", "mse/seconds"):
        assert found[0][metric] == pytest.approx(found[1][metric], abs=0.02), metric


@pytest.mark.parametrize("workers", [1, 2])  # two share the GPU over gloo
def test_deaths_of_a_worker_and_a_server_change_no_bit_in_sync(cluster: Cluster, workers: int) -> None:
    config = {**JOB, "workers": workers, "train": {**JOB["train"], "batch_size": 100 // workers}}
    whole, again = (summary_of(cluster, config, name, "cuda")["state_digest"] for name in ("whole", "again"))
    assert whole == again
    hurts = in_turn(Hurt(f"worker {workers - 1}", "pushing", 60), Hurt("server 1", "push received", 60))
    config["tower"] = {**config["tower"], "device": "cuda"}
    assert hurt_job(cluster, config, hurts, fresh=True)["state_digest"] == whole


def test_a_run_of_a_gpu_is_evaluated_and_resumed_without_one(cluster: Cluster) -> None:
    config = {**DEMO, "servers": 0, "checkpoint": {"every_steps": 60}, "tower": {**DEMO["tower"], "device": "cuda"}}
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
    collective = ProcessCollective(dist.HashStore(), rank=0, world_size=1, generation=0, backend="nccl")
    assert collective.backend == "nccl"
    found = []
    for group in (None, collective):
        config = {"parallel": parallel if group else "ddp"}
        tower = tower_of(model=seeded_model(), collective=group, config=config, device=device, sync=False)
        for step in range(5):
            dense, values, label = batch(step, 24)
            leaves = {name: value.to(device).requires_grad_() for name, value in values.items()}
            tower.backward(dense.to(device), leaves, label.to(device), 1 / 24, last=True)
            assert tower.update(step).applied
        assert (tower.shards is not None) == (group is not None and parallel == "fsdp")
        found.append(whole_values(tower).cpu())
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

"""shardkeep.nn in two trainers with gloo DDP: the model of one trainer with the whole batch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from shardkeep import EmbeddingClient, TableSpec
from shardkeep.nn import EmbeddingBagCollection
from tests.support.cluster import Cluster
from tests.support.forked_trainers import FORKED
from tests.support.import_path import IMPORT_PATH

STEPS, BATCH, LR = 12, 16, 0.4
TABLES = [TableSpec(name=name, dim=4, optimizer={"name": "sgd", "lr": LR}) for name in ("user", "tag")]
IDS = {"user": torch.arange(20), "tag": torch.arange(20)}
TRAINER = f"""
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from shardkeep import connect
from shardkeep.nn import EmbeddingBagCollection
from tests.integration.test_modules import BATCH, IDS, TABLES, Model, samples
dist.init_process_group("gloo")
with connect(tables=TABLES) as client:
    bags = EmbeddingBagCollection(client, {{"user": "user", "tags": "tag"}}, pooling="mean")
    top = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(top.parameters(), lr={LR})
    half = slice(client.rank * BATCH // 2, (client.rank + 1) * BATCH // 2)
    parts = [{{name: values[half] for name, values in samples(step).items()}} for step in range({STEPS})]
    coming = [bags.prefetch(parts[0])]
    for step, part in enumerate(parts):
        if step + 1 < {STEPS}:
            coming.append(bags.prefetch(parts[step + 1]))
        optimizer.zero_grad()
        top(bags(coming.pop(0)), part["label"]).backward()
        optimizer.step()
    rows = client.read(IDS)
    if client.rank == 0:
        torch.save([rows, top.module.state_dict()], "found.pt")
    dist.barrier()
    dist.destroy_process_group()
"""


class Model(nn.Module):
    """Loss of two features; equal values in every process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 1)

    def forward(self, rows: dict[str, torch.Tensor], label: torch.Tensor) -> torch.Tensor:
        logits = self.layer(torch.cat([rows["user"], rows["tags"]], dim=1))[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(logits, label)


def samples(step: int) -> dict[str, torch.Tensor]:
    """A batch of the whole job."""
    random = torch.Generator().manual_seed(step)
    user, tags = (torch.randint(0, 20, shape, generator=random) for shape in ((BATCH,), (BATCH, 3)))
    return {"user": user, "tags": tags, "label": (user % 2).float()}


@pytest.mark.slow
@pytest.mark.waits_for_processes
@pytest.mark.timeout(300)
def test_two_trainers_that_prefetch_end_with_the_model_of_one(tmp_path: Path, cluster: Cluster) -> None:
    with EmbeddingClient.local(TABLES, seed=5, consistency="sync") as client:
        bags, top = EmbeddingBagCollection(client, {"user": "user", "tags": "tag"}, pooling="mean"), Model()
        optimizer = torch.optim.SGD(top.parameters(), lr=LR)
        for step in range(STEPS):
            optimizer.zero_grad()
            top(bags(samples(step)), samples(step)["label"]).backward()
            optimizer.step()
        expected = [client.read(IDS), top.state_dict()]
    (tmp_path / "train.py").write_text(TRAINER)
    settings = ("--servers", "1", "--set", "seed=5", "--set", "consistency.mode=sync")
    trainers = (sys.executable, "-m", *FORKED, "torch", "train.py")
    job = cluster.command("with", *settings, "--", *trainers, cwd=tmp_path, env={"PYTHONPATH": IMPORT_PATH})
    assert job.end().code == 0, job.printed()
    torch.testing.assert_close(torch.load(tmp_path / "found.pt"), expected, rtol=1e-4, atol=1e-6)

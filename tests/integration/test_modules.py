"""shardkeep.nn in two trainers with gloo DDP: the model of one trainer with the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shardkeep import EmbeddingClient, TableSpec
from shardkeep.nn import EmbeddingBagCollection
from tests.support.cluster import Command
from tests.support.forked import SCRIPT

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.timeout(300)]
STEPS, BATCH, LR = 12, 16, 0.4
SGD = {"name": "sgd", "lr": LR}

TRAINER = f"""
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from shardkeep import connect
from shardkeep.nn import EmbeddingBagCollection
from tests.integration.test_modules import Model, samples
run, rank, ahead = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "ahead"
with connect(run, index=rank) as client:
    dist.init_process_group("gloo", init_method="file://" + run + "/store", rank=rank, world_size=2)
    assert client.num_trainers == 2
    bags = EmbeddingBagCollection(client, {{"user": "user", "tags": "tag"}}, pooling="mean")
    top = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(top.parameters(), lr={LR})
    half = slice(rank * {BATCH // 2}, (rank + 1) * {BATCH // 2})
    parts = [{{name: values[half] for name, values in samples(step).items()}} for step in range({STEPS})]
    coming = [bags.prefetch(parts[0])] if ahead else []
    for step, part in enumerate(parts):
        if ahead and step + 1 < {STEPS}:
            coming.append(bags.prefetch(parts[step + 1]))
        optimizer.zero_grad()
        top(bags(coming.pop(0) if ahead else part), part["label"]).backward()
        optimizer.step()
    rows = client.read({{"user": torch.arange(20), "tag": torch.arange(20)}})
    if rank == 0:
        torch.save([rows, top.module.state_dict()], run + "/found.pt")
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


@pytest.mark.parametrize(
    "way", [pytest.param("ahead", marks=pytest.mark.slow), pytest.param("plain", marks=pytest.mark.chaos)]
)
def test_two_trainers_end_with_the_model_of_one(tmp_path: Path, way: str) -> None:
    tables = [TableSpec(name=name, dim=4, optimizer=SGD) for name in ("user", "tag")]
    with EmbeddingClient.local(tables, seed=5, consistency="sync") as client:
        bags, top = EmbeddingBagCollection(client, {"user": "user", "tags": "tag"}, pooling="mean"), Model()
        optimizer = torch.optim.SGD(top.parameters(), lr=LR)
        for step in range(STEPS):
            optimizer.zero_grad()
            top(bags(samples(step)), samples(step)["label"]).backward()
            optimizer.step()
        expected = [client.read({"user": torch.arange(20), "tag": torch.arange(20)}), top.state_dict()]

    config, run = tmp_path / "job.yaml", tmp_path / "run"
    spec = f"{{dim: 4, optimizer: {{name: sgd, lr: {LR}}}}}"
    config.write_text(
        f"servers: 1\nworkers: 2\nseed: 5\nconsistency: {{mode: sync}}\ntables: {{user: {spec}, tag: {spec}}}\n"
    )
    (tmp_path / "train.py").write_text(TRAINER)
    coordinator = Command("coordinator", str(config), "--run-dir", str(run))
    roles = [coordinator]
    try:
        coordinator.line("{")
        roles.append(Command("server", "--coordinator", str(run), "--index", "0", "--run-dir", str(tmp_path)))
        trainers = [Command("train.py", str(run), str(rank), way, main=SCRIPT, cwd=tmp_path) for rank in range(2)]
        roles += trainers
        for role in reversed(roles):
            assert role.end(limit_s=120).code == 0, role.printed()
    finally:
        for role in roles:
            role.kill()
    found = torch.load(run / "found.pt")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)

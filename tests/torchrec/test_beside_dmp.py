"""Two trainers beside TorchRec's own table-wise sharding, over gloo: the same losses and rows.

FBGEMM computes in another order: after 8 steps rows differed by 1e-8 (SGD) to 7e-7 (Adagrad), at values up to 0.7. It
has no Adam for CPUs ("Optimizer adam is not supported in CPU mode"), so Adam is compared with plain PyTorch
(tests/ps/server/table). Needs torchrec (installed as CONTRIBUTING.md says)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.support.cluster import Command
from tests.support.forked_trainers import FORKED
from tests.support.import_path import IMPORT_PATH
from tests.support.late_import import late_import

late_import("torchrec")
pytestmark = [
    pytest.mark.waits_for_processes,
    pytest.mark.slow,
    pytest.mark.timeout(200),
    pytest.mark.filterwarnings("ignore"),
]

SCRIPT = """
import os, sys, torch, torch.distributed as dist, torchrec
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
import shardkeep
from shardkeep.torchrec import load, shard, tables_of

ROWS, BATCH, STEPS, CPU = 40, 16, 8, torch.device("cpu")
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.5}),
    "rowwise": (RowWiseAdagrad, {"lr": 0.1}),
}
dist.init_process_group("gloo")
rank = dist.get_rank()

class Model(nn.Module):
    def __init__(self, name):
        super().__init__()
        torch.manual_seed(len(name))
        def configs(made):
            return [torchrec.EmbeddingBagConfig(name=f"{name}_{table}", embedding_dim=8, num_embeddings=ROWS,
                    feature_names=features) for table, features in made]
        bags = [("t0", ["f0", "shared"]), ("t1", ["f1"]), ("t2", ["shared"])]
        self.bags = torchrec.EmbeddingBagCollection(configs(bags), device=CPU)
        self.top, self.first, self.third = nn.Linear(32, 1), f"{name}_t0", f"{name}_t2"
        kind, settings = OPTIMIZERS[name]
        apply_optimizer_in_backward(kind, self.bags.parameters(), settings)
    def forward(self, features):
        bags = self.bags(features)  # theirs have another order of keys
        parts = [bags[key] for key in ("f0", "shared@" + self.first, "f1", "shared@" + self.third)]
        return self.top(torch.cat(parts, dim=1))[:, 0]

def batches():
    # keys in another order than the model's, one key too many, empty bags
    random = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        keys = ["other", "f1", "shared", "f0"]
        lengths = torch.randint(0, 4, (len(keys) * BATCH,), generator=random)
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=random)
        kjt = torchrec.KeyedJaggedTensor.from_lengths_sync(keys, values, lengths=lengths)
        yield kjt, torch.randint(0, 2, (BATCH,), generator=random).float()

def losses_of(model):
    sgd = torch.optim.SGD(model.module.top.parameters(), lr=0.1)
    found = []
    for features, wanted in batches():
        sgd.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(features), wanted)
        loss.backward()
        sgd.step()
        found.append(loss.item())
    return found

def theirs(model):
    names = [c.name for c in model.bags.embedding_bag_configs()]
    start = {key: weight.detach().clone() for key, weight in model.state_dict().items() if "embedding" in key}
    only = ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE.value],
                                compute_kernels=[EmbeddingComputeKernel.FUSED.value])
    topology = Topology(world_size=2, compute_device="cpu", local_world_size=2)
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=BATCH, constraints=dict.fromkeys(names, only))
    sharders = [EmbeddingBagCollectionSharder()]
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    model = DistributedModelParallel(model, env=env, device=CPU, plan=plan, sharders=sharders)
    def local():
        return {key: each.local_shards() for key, each in model.state_dict().items() if "embedding" in key}
    for key, shards in local().items():
        for part in shards:
            part.tensor.copy_(start[key])
    losses = losses_of(model)
    return losses, {key.split(".")[-2]: part.tensor.clone() for key, shards in local().items() for part in shards}

def ours(model, client):
    model = DistributedModelParallel(shard(model, client), device=CPU)
    losses = losses_of(model)
    names = [c.name for c in model.module.bags.configs]
    return losses, {name: client.read({name: torch.arange(ROWS)})[name] for name in names}

with shardkeep.connect(tables=[spec for name in OPTIMIZERS for spec in tables_of(Model(name))]) as client:
    state = {f"{name}.{key}": weight for name in OPTIMIZERS for key, weight in Model(name).state_dict().items()}
    load(state, client)
    found = {}
    for name in OPTIMIZERS:
        found[name] = {"ours": ours(Model(name), client), "theirs": theirs(Model(name))}
    torch.save(found, f"found-{rank}.pt")
dist.destroy_process_group()
"""


def test_two_trainers_train_as_torchrecs_table_wise_sharding(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    trainers = (sys.executable, "-m", *FORKED, "torchrec", "train.py")
    settings = ("--servers", "2", "--set", "consistency.mode=sync", "--run-dir", "run")
    done = Command("with", *settings, "--", *trainers, cwd=tmp_path, env={"PYTHONPATH": IMPORT_PATH}).end(limit_s=150)
    assert done.code == 0, done
    first, second = (torch.load(tmp_path / f"found-{rank}.pt") for rank in (0, 1))
    for name in ("sgd", "rowwise"):
        for rank in (first, second):
            losses, expected = rank[name]["ours"][0], rank[name]["theirs"][0]
            assert len(losses) == 8 and losses == pytest.approx(expected, rel=1e-6)
        rows, expected = first[name]["ours"][1], first[name]["theirs"][1] | second[name]["theirs"][1]
        assert rows.keys() == expected.keys() and len(rows) == 3  # each of theirs is whole on one rank
        for table in rows:
            torch.testing.assert_close(rows[table], expected[table], rtol=1e-5, atol=2e-6)

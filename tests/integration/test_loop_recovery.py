"""Servers and trainers die under a loop of the user's own, two trainers with gloo DDP: the same rows and model."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import write
from shardkeep.run.folder import RunFolder
from tests.support.cluster import Command
from tests.support.forked_trainers import FORKED
from tests.support.import_path import IMPORT_PATH

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.timeout(400)]

STEPS, KILLS = 120, 4
MANY = int(os.environ.get("LOOP_KILLS", "50"))
"""Kills of one loop."""
KILLING = """
import os
from pathlib import Path
from shardkeep.run.folder import RunFolder
def kill_server(step):
    for when, index in (each.split(":") for each in os.environ.get("KILLS", "").split()):
        if int(when) == step:
            os.kill(next(m["pid"] for m in RunFolder(Path("run")).member_list()
                         if (m["role"], m["index"]) == ("server", int(index))), 9)
"""
"""The first trainer kills servers of its own job at the steps `STEP:INDEX` of KILLS."""
SCRIPT = (
    KILLING
    + """
import hashlib, json, os, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import shardkeep
from shardkeep.nn import EmbeddingBagCollection
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)  # torch 2.13 keeps addresses of the dead
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
steps = int(os.environ["STEPS"])
with shardkeep.connect() as client:
    bags = EmbeddingBagCollection(client, {"user": "user", "tags": "tag"}, pooling="mean")
    torch.manual_seed(0)
    top = DistributedDataParallel(nn.Linear(16, 1))
    optimizer = torch.optim.Adam(top.parameters(), lr=0.01)
    random = torch.Generator().manual_seed(rank)
    parts = [
        {name: torch.randint(0, 50, shape, generator=random) for name, shape in (("user", (16,)), ("tags", (16, 3)))}
        for _ in range(steps)
    ]
    if client.dense_state is not None:
        top.load_state_dict(client.dense_state["model"])
        optimizer.load_state_dict(client.dense_state["optimizer"])
    coming = [bags.prefetch(parts[client.step])]
    for step, part in list(enumerate(parts))[client.step :]:
        if step and step % 25 == 0 and os.environ.get("CHECKPOINTS"):
            client.checkpoint({"model": top.state_dict(), "optimizer": optimizer.state_dict()})
        if rank == 1 and step == 60 and os.environ.get("DEATHS"):
            death = dict(enumerate(os.environ["DEATHS"].split())).get(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
            if death == "kill":
                os.kill(os.getpid(), 9)
            if death == "raise":
                raise RuntimeError("a bug")
        if step + 1 < steps:
            coming.append(bags.prefetch(parts[step + 1]))
        rows = bags(coming.pop(0))
        score = top(torch.cat([rows["user"], rows["tags"]], dim=1))[:, 0]
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(score, (part["user"] % 2).float()).backward()
        optimizer.step()
        if rank == 0:
            kill_server(step)
    digest = client.summary(digest=True)["state_digest"]
    if rank == 0:
        tower = b"".join(p.detach().numpy().tobytes() for p in top.parameters())
        print("found", digest, hashlib.sha256(tower).hexdigest(), flush=True)
    dist.barrier()
    dist.destroy_process_group()
"""
)
COMMON = (
    KILLING
    + """
import hashlib, os, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import shardkeep

steps, rank = int(os.environ["STEPS"]), int(os.environ["RANK"])
random = torch.Generator().manual_seed(rank)
parts = [{"user": torch.randint(0, 50, (16,), generator=random), "tag": torch.randint(0, 50, (16, 3), generator=random)}
         for _ in range(steps)]
def loss_of(score, user):
    return nn.functional.binary_cross_entropy_with_logits(score[:, 0], (user % 2).float())
def told(step):
    if rank == 0:
        kill_server(step)
def found(client, model):
    digest = client.summary(digest=True)["state_digest"]
    if rank == 0:
        tower = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        print("found", digest, hashlib.sha256(tower).hexdigest(), flush=True)
"""
)
PLAIN = (
    COMMON
    + """
dist.init_process_group("gloo")
with shardkeep.connect() as client:
    torch.manual_seed(0)
    top = DistributedDataParallel(nn.Linear(16, 1))
    optimizer = torch.optim.Adam(top.parameters(), lr=0.01)
    for step, (part, rows) in enumerate(client.ahead(parts, lambda part: part)):
        score = top(torch.cat([rows["user"], rows["tag"].mean(1)], dim=1))
        optimizer.zero_grad()
        loss_of(score, part["user"]).backward()
        optimizer.step()
        client.apply(rows, scale=0.5)
        told(step)
    found(client, top)
    dist.barrier()
dist.destroy_process_group()
"""
)
TORCHREC = (
    COMMON
    + """
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from shardkeep.torchrec import shard
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bags = EmbeddingBagCollection(tables=[EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=50,
                                                   feature_names=[name]) for name in ("user", "tag")])
        self.top = nn.Linear(16, 1)
    def forward(self, batch):
        loss = loss_of(self.top(self.bags(batch.sparse_features).values()), batch.labels)
        return loss, loss.detach()
def batch_of(part):
    lengths = torch.tensor([[1], [3]]).expand(-1, 16).flatten()
    ids = torch.cat([part["user"], part["tag"].flatten()])
    return Batch(torch.zeros(16, 1), KeyedJaggedTensor.from_lengths_sync(["user", "tag"], ids, lengths=lengths),
                 part["user"])
dist.init_process_group("gloo")
with shardkeep.connect() as client:
    model = DistributedModelParallel(shard(Model(), client), device=torch.device("cpu"))
    dense = KeyedOptimizerWrapper(dict(in_backward_optimizer_filter(model.named_parameters())),
                                  lambda p: torch.optim.Adam(p, lr=0.01))
    both = CombinedOptimizer([model.fused_optimizer, dense])
    pipeline = TrainPipelineSparseDist(model, both, torch.device("cpu"))
    batches = iter([batch_of(part) for part in parts])
    for step in range(steps):
        pipeline.progress(batches)
        told(step)
    found(client, model.module.top)
    dist.barrier()
dist.destroy_process_group()
"""
)
LIGHTNING = (
    COMMON
    + """
import lightning as L
from shardkeep.nn import EmbeddingBagCollection
class Module(L.LightningModule):
    def __init__(self, client):
        super().__init__()
        torch.manual_seed(0)
        self.bags, self.top = EmbeddingBagCollection(client, {"user": "user", "tag": "tag"}), nn.Linear(16, 1)
    def training_step(self, part, batch_idx):
        rows = self.bags(part)
        told(batch_idx)
        return loss_of(self.top(torch.cat([rows["user"], rows["tag"]], dim=1)), part["user"])
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)
with shardkeep.connect() as client:
    module = Module(client)
    trainer = L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                        accelerator="cpu", devices=2, strategy="ddp", use_distributed_sampler=False)
    trainer.fit(module, torch.utils.data.DataLoader(parts, batch_size=None))
    found(client, module.top)
    dist.barrier()
"""
)
TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2")
SCRIPTS = {
    "nn": ("torch", SCRIPT),
    "plain": ("torch", PLAIN),
    "torchrec": ("torchrec", TORCHREC),
    "lightning": ("lightning", LIGHTNING),
}
"""By kind of loop: the library that it needs, and its script."""
TABLES = "tables: {user: {dim: 8, optimizer: {name: adagrad, lr: 0.05}}, tag: {dim: 8, optimizer: {name: adam}}}\n"
BY_REFERENCE = "compression: {ids: coded, push: {keep_rows: 0.5, pool_rows: 4096, values: bf16}}\n"


def kills_of(count: int, steps: int, seed: int) -> str:
    """So many kills of random servers at random steps, some steps apart: a server is back before the next one dies."""
    chance = random.Random(seed)
    return " ".join(f"{step}:{chance.randrange(2)}" for step in sorted(chance.sample(range(8, steps - 5, 4), count)))


def trained(
    folder: Path,
    settings: str,
    *,
    steps: int = STEPS,
    script: str = SCRIPT,
    launcher: Sequence[str] = (*FORKED, "torch"),
    **variables: str,
) -> str:
    """The digests of rows and model."""
    folder.mkdir()
    (folder / "train.py").write_text(script)
    (folder / "tables.yaml").write_text("servers: 2\nconsistency: sync\nseed: 5\n" + TABLES + settings)
    around = ("with", "--config", "tables.yaml", "--run-dir", "run", "--", sys.executable, "-m")
    environment = {"STEPS": str(steps), "PYTHONPATH": IMPORT_PATH, **variables}
    job = Command(*around, *launcher, "train.py", cwd=folder, env=environment)
    try:
        line = job.line("found", limit_s=300)
        assert job.end().code == 0
        return line
    finally:
        job.kill()


def recoveries(folder: Path) -> list[dict[str, Any]]:
    """Of a completed loop."""
    summary = RunFolder(folder / "run").summary() or {}
    assert summary["status"] == "completed"
    return list(summary["recoveries"])


@pytest.mark.slow
def test_servers_that_die_and_trainers_that_torchrun_starts_again_change_no_bit(tmp_path: Path) -> None:
    """The trainers resume from the checkpoint of step 50, twice."""
    deaths = {"CHECKPOINTS": "yes", "DEATHS": "kill raise", "KILLS": "10:1 40:0"}
    undisturbed = trained(tmp_path / "one", BY_REFERENCE)
    assert trained(tmp_path / "two", BY_REFERENCE, launcher=TORCHRUN, **deaths) == undisturbed
    found = recoveries(tmp_path / "two")
    assert sum(death["role"] == "server" for record in found for death in record["died"]) == 2
    assert 12 <= sum(record["lost_steps"] for record in found) <= 24, json.dumps(found)


@pytest.mark.chaos
@pytest.mark.parametrize("settings", ["", BY_REFERENCE], ids=["whole gradients", "with checkpoints"])
def test_servers_that_die_change_no_bit_of_two_trainers(tmp_path: Path, settings: str) -> None:
    undisturbed = trained(tmp_path / "one", settings)
    kills = {"KILLS": kills_of(KILLS, STEPS, 0)} | ({"CHECKPOINTS": "yes"} if settings else {})
    assert trained(tmp_path / "two", settings, **kills) == undisturbed
    found = recoveries(tmp_path / "two")
    assert sum(len(record["died"]) for record in found) == KILLS, json.dumps(found)


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("loop", SCRIPTS)
def test_many_kills_of_servers_change_no_bit(tmp_path: Path, loop: str) -> None:
    library, script = SCRIPTS[loop]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")
    steps = 40 * MANY
    how: dict[str, Any] = {"steps": steps, "script": script, "launcher": (*FORKED, library)}
    undisturbed = trained(tmp_path / "one", BY_REFERENCE, **how)
    assert trained(tmp_path / "two", BY_REFERENCE, **how, KILLS=kills_of(MANY, steps, MANY)) == undisturbed
    summary = RunFolder(tmp_path / "two" / "run").summary() or {}
    deaths = [death for record in summary["recoveries"] for death in record["died"]]
    assert len(deaths) == MANY and not sum(record["lost_steps"] for record in summary["recoveries"])
    seconds = sorted(record["seconds"] for record in summary["recoveries"])
    if (path := os.environ.get("LOOP_KILLS_JSON")) is not None:
        found = {
            "kills": len(deaths),
            "steps": steps,
            "recoveries": len(seconds),
            "lost_steps": 0,
            "equal": True,
            "loop": loop,
        }
        write(Path(path) / f"{loop}.json", f"chaos: {MANY} kills of servers under a loop", found | {"seconds": seconds})

"""Servers and trainers die under a loop of the user's own, two trainers with gloo DDP: the same rows and model."""

from __future__ import annotations

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
from tests.support.cluster import Cluster
from tests.support.forked_trainers import FORKED
from tests.support.import_path import IMPORT_PATH

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.timeout(400)]
MANY = int(os.environ.get("LOOP_KILLS", "50"))
"""Kills of one loop."""
SCRIPT = """
import hashlib, os, torch, torch.distributed as dist
from pathlib import Path
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import shardkeep
from shardkeep.nn import EmbeddingBagCollection
from shardkeep.run.folder import RunFolder
rank, world, start = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore(str(start), store)  # torch 2.13 keeps addresses of the dead
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
steps, kills = int(os.environ["STEPS"]), [each.split(":") for each in os.environ.get("KILLS", "").split()]
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
        if rank == 1 and step == 60:
            death = dict(enumerate(os.environ.get("DEATHS", "").split())).get(start)
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
        for index in (int(index) for when, index in kills if rank == 0 and int(when) == step):
            os.kill(next(m["pid"] for m in RunFolder(Path("run")).member_list()
                         if (m["role"], m["index"]) == ("server", index)), 9)
    digest = client.summary(digest=True)["state_digest"]
    if rank == 0:
        tower = b"".join(p.detach().numpy().tobytes() for p in top.parameters())
        print("found", digest, hashlib.sha256(tower).hexdigest(), flush=True)
    dist.barrier()
    dist.destroy_process_group()
"""
"""The first trainer kills servers of its own job at the steps `STEP:INDEX` of KILLS, the second dies as in DEATHS."""
CONFIG = """
servers: 2
consistency: sync
seed: 5
tables: {user: {dim: 8, optimizer: {name: adagrad, lr: 0.05}}, tag: {dim: 8, optimizer: {name: adam}}}
compression: {ids: coded, push: {select: "shardkeep.examples.compression.dgc:Dgc", keep: 0.5, pool_rows: 4096}}
"""


def trained(
    cluster: Cluster, name: str, *, steps: int = 120, launcher: Sequence[str] = (*FORKED, "torch"), **variables: str
) -> tuple[str, list[dict[str, Any]]]:
    folder = cluster.folder(name)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "tables.yaml").write_text(CONFIG)
    around = ("with", "--config", "tables.yaml", "--run-dir", "run", "--", sys.executable, "-m")
    environment = {"STEPS": str(steps), "PYTHONPATH": IMPORT_PATH, **variables}
    job = cluster.command(*around, *launcher, "train.py", cwd=folder, env=environment)
    line = job.line("found", limit_s=300)
    assert job.end().code == 0
    summary = RunFolder(folder / "run").summary() or {}
    assert summary["status"] == "completed"
    return line, summary["recoveries"]


@pytest.mark.slow
def test_servers_that_die_and_trainers_that_torchrun_starts_again_change_no_bit(cluster: Cluster) -> None:
    """The trainers resume from the checkpoint of step 50, twice."""
    deaths = {"CHECKPOINTS": "yes", "DEATHS": "kill raise", "KILLS": "10:1 40:0"}
    torchrun = ("torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2")
    undisturbed, _ = trained(cluster, "one")
    digests, recoveries = trained(cluster, "two", launcher=torchrun, **deaths)
    assert digests == undisturbed
    assert sum(death["role"] == "server" for record in recoveries for death in record["died"]) == 2
    assert 12 <= sum(record["lost_steps"] for record in recoveries) <= 24, json.dumps(recoveries)


@pytest.mark.chaos
@pytest.mark.timeout(1200)
def test_many_kills_of_servers_change_no_bit(cluster: Cluster) -> None:
    steps, chance = 40 * MANY, random.Random(MANY)
    at = sorted(chance.sample(range(8, steps - 5, 4), MANY))  # a server is back before the next one dies
    undisturbed, _ = trained(cluster, "one", steps=steps)
    kills = " ".join(f"{step}:{chance.randrange(2)}" for step in at)
    digests, recoveries = trained(cluster, "two", steps=steps, KILLS=kills)
    assert digests == undisturbed
    assert sum(len(record["died"]) for record in recoveries) == MANY
    assert not sum(record["lost_steps"] for record in recoveries)
    if (path := os.environ.get("LOOP_KILLS_JSON")) is not None:
        seconds = sorted(record["seconds"] for record in recoveries)
        found = {"kills": MANY, "steps": steps, "recoveries": len(seconds), "equal": True, "seconds": seconds}
        write(Path(path), f"chaos: {MANY} kills of servers under a loop", found)

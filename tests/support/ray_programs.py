"""Programs for a Ray cluster, as texts: its Python is another one."""

JOB = """
import json, sys, ray, shardkeep
ray.init(address="auto")
config, run_dir, keep = sys.argv[1:]
try:
    summary = shardkeep.ray.train(config, run_dir=run_dir, nodes=2, keep=keep or None)
    print("ended", json.dumps([summary.status, summary.state_digest]))
except shardkeep.ShardkeepError as error:
    print("ended", json.dumps([type(error).__name__, str(error)]))
"""
"""A job. Prints its status and digest, or its error."""

TRAINERS = """
import json, os, signal, sys
from pathlib import Path
import ray, ray.train.torch, torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.nn import functional as F
import shardkeep
from shardkeep.run.reader import RunReader

def kill_server(run_dir):
    pid, = (each["pid"] for each in RunReader(run_dir).member_list() if each["role"] == "server" and each["index"] == 1)
    os.kill(pid, signal.SIGKILL)

def fail(run_dir):
    raise ValueError("of one trainer")

FAULTS = {20: kill_server, 50: lambda run_dir: os.kill(os.getpid(), signal.SIGKILL), 80: fail}
faulty, *steps = sys.argv[1:]

def loop(config):
    run_dir = config["run"].run_dir
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with config["run"].connect() as client:
        if client.dense_state is not None:
            model.load_state_dict(client.dense_state["model"])
            optimizer.load_state_dict(client.dense_state["optimizer"])
        while client.step < 100:
            fault = run_dir / f"fault-{client.step}"
            if client.rank == 1 and client.step in config["faults"] and not fault.exists():
                fault.touch()
                FAULTS[client.step](run_dir)
            ids = torch.randint(300, (64,), generator=torch.Generator().manual_seed(2 * client.step + client.rank))
            rows = client.lookup({"item": ids})
            loss = F.binary_cross_entropy_with_logits(model(rows["item"])[:, 0], (ids % 2).float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            client.apply(rows, scale=0.5)
            if client.step % 30 == 0:
                client.checkpoint({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        digest = client.summary(digest=True)["state_digest"]
    if client.rank == 0:
        (run_dir / "result").write_text(json.dumps([digest, loss.item()]))

ray.init(address="auto")
config = shardkeep.JobConfig(consistency="sync", tables={"item": {"dim": 8}})
for name in (f"undisturbed-{faulty}", faulty):
    with shardkeep.ray.servers(config, num=2, trainers=2, run_dir=name) as run:
        TorchTrainer(
            loop,
            train_loop_config={"run": run, "faults": [*map(int, steps)] if name == faulty else []},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=f"{Path.cwd()}/results", name=name,
                                 failure_config=FailureConfig(max_failures=3)),
        ).fit()
    print(name.removesuffix(f"-{faulty}"), Path(name, "result").read_text(), flush=True)
"""
"""Two trainers, undisturbed and then, in the run NAME, with the faults at STEP...: `NAME STEP...`. Prints digest and
loss of each."""

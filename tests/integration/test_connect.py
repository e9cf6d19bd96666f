"""`connect()` in a plain process under `shardkeep with`, and a client that gets its tables later."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardkeep.run.folder import RunFolder
from tests.support.cluster import Command, Ended
from tests.support.forked_trainers import FORKED
from tests.support.import_path import IMPORT_PATH

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.timeout(300)]
PLAIN = """
import torch, shardkeep
from shardkeep.nn import EmbeddingBagCollection
client = shardkeep.connect()
print("trainer", client.rank, "of", client.num_trainers)
ids = {"item": torch.arange(3)}
uses = {
    "lookup": lambda: client.lookup(ids), "read": lambda: client.read(ids), "tables": lambda: client.tables,
    "report": lambda: client.report(loss=1.0), "step": lambda: client.step, "state": lambda: client.dense_state,
    "module": lambda: EmbeddingBagCollection(client, {"item": "item"}), "apply": lambda: client.apply(),
    "ahead": lambda: next(client.ahead([1], lambda _: ids)), "fill": lambda: client.fill({"item": torch.ones(2, 4)}),
    "stopping": lambda: client.stopping, "summary": lambda: client.summary(),
}
for name, use in uses.items():
    try:
        print(name, use())
    except shardkeep.UserError as error:
        assert "no tables yet" in str(error) and "tables_of(model)" in str(error) and "declare" in str(error), error
assert not hasattr(shardkeep.EmbeddingClient, "__nothing__")
client.declare([shardkeep.TableSpec(name="item", dim=4)])
rows = client.lookup(ids)
rows["item"].sum().backward()
client.apply(rows)
try:
    client.declare([shardkeep.TableSpec(name="user", dim=4)])
except shardkeep.UserError as error:
    print(error)
try:
    shardkeep.EmbeddingClient.serve([shardkeep.TableSpec(name="user", dim=4)], quiet=True)
except shardkeep.UserError as error:
    print(error)
print("step", client.step)
"""
SHARDED = r"""
import sys, torch, torch.distributed as dist, torchrec, shardkeep
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from shardkeep.torchrec import shard
dist.init_process_group("gloo")
table = torchrec.EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=9, feature_names=["f"])
bags = torchrec.EmbeddingBagCollection([table], device=torch.device("meta"))
client = shardkeep.connect()
try:
    shard(torchrec.EmbeddingBagCollection([table]), client)
except shardkeep.UserError as error:
    sys.stdout.write(f"{error}\n")  # at once: the other trainer writes there, too
apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.1})
bags = shard(bags, client, tables={"t": "items"})
features = torchrec.KeyedJaggedTensor.from_lengths_sync(["f"], torch.arange(4), torch.tensor([1, 3]))
bags(features).wait().values().sum().backward()
sys.stdout.write(f"step {client.step} {[(spec.name, spec.optimizer.lr) for spec in client.tables]}\n")
"""


def ended(folder: Path, script: str, *command: str) -> Ended:
    (folder / "train.py").write_text(script)
    around = ("with", "--run-dir", "run", "--servers", "1", "--")
    run = Command(*around, *command, "train.py", cwd=folder, env={"PYTHONPATH": IMPORT_PATH})
    try:
        return run.end(limit_s=200)
    finally:
        run.kill()


def test_a_plain_process_is_the_only_trainer_and_declares_its_tables_later(tmp_path: Path) -> None:
    done = ended(tmp_path, PLAIN, sys.executable)
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "trainer 0 of 1",
        "declare: the client has its tables: item",
        "another EmbeddingClient of this process is open (torch has one RPC group a process); allowed: close() it, "
        "or EmbeddingClient.local",
        "step 1",
    ]
    assert (RunFolder(tmp_path / "run").summary() or {})["status"] == "completed"


@pytest.mark.chaos
def test_shard_declares_the_tables_of_a_client_without_any_in_all_trainers(tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    done = ended(tmp_path, SHARDED, sys.executable, "-m", *FORKED, "torchrec")
    assert done.code == 0, done.err
    refused = "table t: has no optimizer; allowed: apply_optimizer_in_backward, or tables_of(model, optimizer="
    assert [line.startswith(refused) for line in done.out.splitlines()].count(True) == 2
    assert done.out.count("step 1 [('items', 0.1)]") == 2


@pytest.mark.chaos
def test_a_process_without_a_number_is_none_of_several_trainers(tmp_path: Path) -> None:
    script = "import shardkeep; shardkeep.connect(tables=[shardkeep.TableSpec(name='item', dim=4)])"
    done = ended(tmp_path, script, *("env", "-u", "RANK", sys.executable))
    assert done.code == 0, done.err
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "train.py").write_text(script)
    run = Command("with", "--trainers", "2", "--", sys.executable, "train.py", cwd=tmp_path / "two")
    try:
        done = run.end(limit_s=100)
    finally:
        run.kill()
    assert done.code == 1 and "UserError: no index: give it, or use a launcher" in done.err


AGAIN = """
import os, sys, shardkeep
restarted = True
failing = not os.fork()
if not failing:
    os.wait()
    sys.exit(1) if not restarted else None
with shardkeep.connect(index=0, restarted=restarted, tables=[shardkeep.TableSpec(name="item", dim=4)]) as client:
    if failing:
        raise ValueError("of one trainer")
    print("step", client.step)
"""


@pytest.mark.parametrize("restarted", [True, False], ids=["started again", "not started again"])
def test_a_trainer_s_error_ends_the_job_unless_its_caller_says_that_it_starts_again(
    tmp_path: Path, restarted: bool
) -> None:
    done = ended(tmp_path, AGAIN.replace("= True", f"= {restarted}"), sys.executable)
    status = (RunFolder(tmp_path / "run").summary() or {})["status"]
    assert (done.code, status) == ((0, "completed") if restarted else (1, "failed")), done.err
    assert "ValueError: of one trainer" in done.err

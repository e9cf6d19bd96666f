"""Loops whose tables are in processes: served by scripts, replaced after deaths, connected by hand."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from shardkeep import EmbeddingClient, JobConfig, connect, train
from shardkeep.base.errors import ConfigError, MemberLost, ShardkeepError, UserError
from shardkeep.base.files import atomic_write
from shardkeep.compression.config import CompressionConfig
from shardkeep.launch.processes.children import SHARDKEEP
from shardkeep.run.folder import RunFolder
from shardkeep.trust.endpoint import make_token
from tests.support import forked
from tests.support.cluster import Cluster, Command, within
from tests.support.forked import SCRIPT
from tests.support.import_path import ROOT
from tests.support.two_tables import TABLES


def some_steps(client: EmbeddingClient, first: int = 0, count: int = 4) -> None:
    for step in range(first, first + count):
        ids = torch.arange(6).reshape(2, 3) * (step + 1) - 4
        rows = client.lookup({"user": ids, "item": ids.flatten()})
        ((rows["user"] ** 2).sum() + rows["item"].sum() * step).backward()
        client.apply(rows)


@pytest.mark.slow
@pytest.mark.waits_for_processes
def test_a_loop_goes_on_with_equal_bits_after_deaths_until_a_journal_is_lost(tmp_path: Path, caplog: Any) -> None:
    compression = CompressionConfig.model_validate({"ids": "coded", "push": {"keep": 0.5, "pool_rows": 64}})
    settings: dict[str, Any] = {"seed": 5, "consistency": "sync", "compression": compression}
    with EmbeddingClient.local(TABLES, **settings) as client:
        some_steps(client, count=40)
        expected = client.summary(digest=True)["state_digest"]
    lost = pytest.raises(
        MemberLost, match=r"; 40 steps are lost: server 0 came back without its journal.*: start all tr"
    )
    with lost, EmbeddingClient.serve(TABLES, servers=2, run_dir=tmp_path / "run", **settings) as client:
        for number, (role, index) in enumerate((("server", 1), ("server", 0), ("coordinator", 0), ("", 0))):
            some_steps(client, 10 * number, count=10)
            members = {(m["role"], m["index"]): m["pid"] for m in RunFolder(tmp_path / "run").member_list()}
            if role == "coordinator":
                (pid,) = RunFolder(tmp_path / "run").coordinator_pids()
                os.kill(pid, signal.SIGKILL)
            elif role:
                os.kill(members[role, index], signal.SIGKILL)
        found = client.summary(digest=True)
        assert (found["state_digest"], found["steps"]) == (expected, 40)
        shutil.rmtree(next((tmp_path / "run").glob("recovery/*/server-0/journal")))
        os.kill(members["server", 0], signal.SIGKILL)
        some_steps(client, 40)
    starts = [record.getMessage() for record in caplog.records if "starting another" in record.getMessage()]
    assert [text.split(" (pid")[0] for text in starts] == ["server 1", "server 0", "coordinator 0", "server 0"]
    recoveries = (RunFolder(tmp_path / "run").summary() or {})["recoveries"]
    assert [record["lost_steps"] for record in recoveries] == [0, 0, 0, 40]


@pytest.mark.slow
@pytest.mark.waits_for_processes
@pytest.mark.timeout(150)  # a replacement gets longer
def test_a_loop_that_raises_while_a_server_is_replaced_ends_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def replaced() -> bool:
        return any("starting another" in record.getMessage() for record in caplog.records)

    with (
        pytest.raises(ValueError, match="the loop's own"),
        EmbeddingClient.serve(TABLES, servers=1, consistency="sync", run_dir=tmp_path / "run") as client,
    ):
        some_steps(client)
        os.kill(RunFolder(tmp_path / "run").member_list()[0]["pid"], signal.SIGKILL)
        within(90, replaced, "the death is not seen", lambda: True)
        raise ValueError("the loop's own")
    assert not [child for child in psutil.Process().children(recursive=True) if SHARDKEEP[-1] in child.cmdline()]


TRAINER = """
import sys, torch
from shardkeep import connect
run, index = sys.argv[1], int(sys.argv[2])
with connect(run, index=index) as client:
    for step in range(4):
        rows = client.lookup({"user": torch.arange(6) + index})
        (rows["user"] ** 2).sum().backward()
        client.apply(rows, scale=0.5)
    seen = client.read({"user": torch.arange(8)})["user"].numpy().tobytes().hex()
    print(seen, client.summary(digest=True)["state_digest"])
"""


@pytest.mark.waits_for_processes
def test_trainers_connect_by_hand_to_servers_started_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer 0 is this process."""
    config = tmp_path / "job.yaml"
    config.write_text(
        "servers: 1\nworkers: 2\nseed: 5\nconsistency: {mode: sync}\n"
        "tables: {user: {dim: 4, optimizer: {name: sgd, lr: 0.5}}}\n"
    )
    run = tmp_path / "run"
    coordinator = Command("coordinator", str(config), "--run-dir", str(run))
    roles = [coordinator]
    monkeypatch.setattr(sys, "argv", ["trainer", str(run), "0"])
    try:
        coordinator.line("{")
        roles.append(Command("server", "--coordinator", str(run), "--index", "0", "--run-dir", str(tmp_path)))
        (tmp_path / "trainer.py").write_text(TRAINER)
        roles.append(other := Command("trainer.py", str(run), "1", main=forked.SCRIPT, cwd=tmp_path))
        exec(TRAINER, {})
        assert [role.end().code for role in roles] == [0, 0, 0]
    finally:
        for role in roles:
            role.kill()
    assert capsys.readouterr().out == other.printed() == _both_trainers_in_one()


def _both_trainers_in_one() -> str:
    with EmbeddingClient.local(TABLES[:1], seed=5, consistency="sync") as client:
        for _ in range(4):
            lookups = [client.lookup({"user": torch.arange(6) + index}) for index in range(2)]
            for rows in lookups:
                (rows["user"] ** 2).sum().backward()
            client.apply(*lookups, scale=0.5)
        seen = client.read({"user": torch.arange(8)})["user"].numpy().tobytes().hex()
        return f"{seen} {client.summary(digest=True)['state_digest']}\n"


def test_a_notebook_trains_modules_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for source in ("custom_model/my_model.py", "custom_source/my_source.py"):
        shutil.copy(ROOT / "examples" / source, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)  # a notebook is no file
    job = {
        "servers": 0,
        "workers": 1,
        "data": {"source": "my_source:sessions", "options": {"rows": 2000}},
        "model": {"name": "my_model:GatedSum", "options": {"width": 8}},
        "tables": {"default": {"dim": 4}},
        "tower": {"compile": "off"},
        "train": {"batch_size": 256},
    }
    try:
        summary = train(JobConfig.model_validate(job), quiet=True)
    finally:
        for module in ("my_model", "my_source"):
            sys.modules.pop(module, None)
    assert (summary.status, summary.steps, capsys.readouterr().err) == ("completed", 8, "")
    assert summary.eval is not None and 0.5 < summary.eval.auc < 1.0


def test_connect_wants_a_token_a_flag_for_an_address_that_others_reach_and_an_answer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the job's token is needed"):
        connect("127.0.0.1:9", index=0, tables=TABLES)
    with pytest.raises(ConfigError, match=r"^advertise 10\.9\.0\.2: other .* insecure_data_plane=True$"):
        connect("127.0.0.1:9", index=0, tables=TABLES, advertise="10.9.0.2")
    atomic_write(tmp_path / "token", make_token(), private=True)
    with pytest.raises(ShardkeepError, match=r"127\.0\.0\.1:9"):
        connect("127.0.0.1:9", index=0, tables=TABLES, token_file=tmp_path / "token", timeout_s=0.3)


# ---- forks ----


FORKING = """
import os, sys, torch, shardkeep
TABLES = [shardkeep.TableSpec(name="user", dim=64)]

def train(client):
    rows = client.lookup({"user": torch.arange(4000)})
    torch.nn.functional.linear(rows["user"], torch.ones(256, 64)).sum().backward()
    client.apply(rows)
    return client.step

def said(call):
    try:
        return str(call())
    except shardkeep.UserError as error:
        return str(error)

def forked(call):
    '''Whether the fork ended as a script does, with code 0; its answer is on stdout.'''
    sys.stdout.flush()
    if not (child := os.fork()):
        print(said(call), flush=True)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def lines_of(code: str) -> list[str]:
    """What a script prints. Fails where it fails, or hangs. It has two threads: a fork waits for the second."""
    env = os.environ | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", FORKING + code]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.waits_for_processes
def test_a_local_client_works_on_after_a_fork_on_both_sides(cluster: Cluster, tmp_path: Path) -> None:
    code = """
torch.set_num_threads(2)
with shardkeep.EmbeddingClient.local(TABLES) as client:
    train(client)
    forked(lambda: train(client))
    print(train(client), train(client))
"""
    (tmp_path / "script.py").write_text(FORKING + code)
    ended = cluster.command("script.py", cwd=tmp_path, main=SCRIPT).end()
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == ["2", "2 3"]


@pytest.mark.slow
@pytest.mark.waits_for_processes
def test_a_fork_of_a_served_client_and_a_second_client_are_refused_and_leave_the_firsts_processes_alone() -> None:
    code = """
def serve():
    with shardkeep.EmbeddingClient.serve(TABLES, servers=1, quiet=True) as client:
        return train(client)

with shardkeep.EmbeddingClient.serve(TABLES, servers=1, quiet=True) as client:
    train(client)
    for call in (lambda: train(client), serve, client.close):
        forked(call)
    print(train(client))
    print(said(serve))
forked(serve)
"""
    used, served, closed, again, second, after = lines_of(code)
    assert used.startswith("lookup: the client is of process ") and "; allowed: call it there, or connect " in used
    assert "was forked while its EmbeddingClient was open; allowed: spawn this process" in served
    assert second.startswith("another EmbeddingClient of this process is open") and "close() it, or" in second
    assert (closed, again, after) == ("None", "2", "1")

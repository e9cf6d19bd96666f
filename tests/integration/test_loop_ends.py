"""The end of a trainer that does not close its client: its exit code and its traceback are its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shardkeep.run.folder import RunFolder
from tests.support.cluster import Cluster
from tests.support.import_path import IMPORT_PATH

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.timeout(600)]
LIMIT_S = 200.0
WITH = ("with", "--run-dir", "run", "--servers", "1", "--")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
SCRIPT = """
import os, signal, sys, torch, shardkeep
from shardkeep.nn import EmbeddingBagCollection
way, tables = sys.argv[1], [shardkeep.TableSpec(name="item", dim=4)]
client = {client}
if client.rank == 1:
    way = "return"  # its push waits for the other trainer, who must not wait for it
bags = EmbeddingBagCollection(client, {{"item": "item"}})
for step in range(3):
    bags({{"item": torch.randint(0, 100, (8, 3))}})["item"].square().sum().backward()
print("trained", flush=True)
if way == "raise":
    raise ValueError("the script's own")
if way == "exit":
    sys.exit(3)
if way == "SIGTERM":
    os.kill(os.getpid(), signal.SIGTERM)
"""
CLIENTS = {
    "local": "shardkeep.EmbeddingClient.local(tables)",
    "serve": "shardkeep.EmbeddingClient.serve(tables, servers=1, run_dir='run', quiet=True)",
    "connect": "shardkeep.connect(tables=tables)",
}
CODES = {"return": 0, "raise": 1, "exit": 3, "SIGTERM": -signal.SIGTERM}
IN_CI = ("connect", "SIGTERM")
"""The end that CI plays; `make chaos` plays all."""
Ends = subprocess.CompletedProcess[str]


def ended(folder: Path, client: str, way: str) -> Ends:
    """How a script ends that leaves its client open."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT.format(client=CLIENTS[client]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": IMPORT_PATH}
    if client == "connect":
        with Cluster(folder) as cluster:
            done = cluster.command(*WITH, *TORCHRUN, "train.py", way, cwd=folder, env=environment).end()
            return Ends((), done.code, done.out, done.err)
    command = [sys.executable, "train.py", way]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


def code_of(done: Ends, client: str) -> int:
    """The exit code of the first trainer that failed; torchrun's report has it."""
    found = re.search(r"exitcode *: (-?\d+)", done.stderr) if client == "connect" else None
    return int(found[1]) if found else done.returncode


def check(folder: Path, client: str, way: str) -> None:
    done = ended(folder, client, way)
    assert code_of(done, client) == CODES[way], done.stderr
    assert "trained" in done.stdout and "terminate called" not in done.stderr and "Exception ignored" not in done.stderr
    assert ("ValueError: the script's own" in done.stderr) == (way == "raise")
    if client == "serve" and way != "raise":
        assert not done.stderr
    if client != "local":
        left = [pid for m in RunFolder(folder / "run").member_list() if psutil.pid_exists(pid := m["pid"])]
        psutil.wait_procs([psutil.Process(pid) for pid in left], timeout=90)
        assert not [pid for pid in left if psutil.pid_exists(pid)]
        if way in ("return", "exit"):
            summary = RunFolder(folder / "run").summary() or {}
            assert (summary["status"], summary["steps"]) == ("completed", 3)


@pytest.mark.parametrize(
    ("client", "way"),
    [
        pytest.param(client, way, marks=pytest.mark.slow if (client, way) == IN_CI else pytest.mark.chaos)
        for client in CLIENTS
        for way in CODES
    ],
)
def test_a_script_that_leaves_its_client_open_ends_in_its_own_way(tmp_path: Path, client: str, way: str) -> None:
    for number in range(int(os.environ.get("LOOP_ENDS", "1"))):
        check(tmp_path / str(number), client, way)

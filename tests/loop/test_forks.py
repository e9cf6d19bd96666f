"""Forks and threads of a process with clients: what works does, and what cannot is one line at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.forked import SCRIPT

pytestmark = pytest.mark.waits_for_processes
ROOT = Path(__file__).resolve().parents[2]
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

"""`shardkeep with`: servers around a command; and the ends of scripts that train with them or serve themselves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from shardkeep.loop.with_command import trainers_of
from shardkeep.run.folder import RunFolder
from tests.support.cases import every
from tests.support.cluster import Cluster, Command, gone
from tests.support.forked_trainers import FORKED
from tests.support.import_path import IMPORT_PATH

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.timeout(600)]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path, cluster: Cluster) -> Start:
    """Starts `shardkeep with ... -- COMMAND` beside a script train.py."""

    def started(script: str, *command: str, options: tuple[str, ...] = (), name: str = "run", **env: str) -> Command:
        (tmp_path / "train.py").write_text(script)
        around = ("with", "--run-dir", str(tmp_path / name), *options, "--")
        return cluster.command(*around, *command, cwd=tmp_path, env={"PYTHONPATH": IMPORT_PATH, **env})

    return started


def summary_of(folder: Path) -> dict[str, object]:
    return RunFolder(folder).summary() or {}


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
user = [shardkeep.TableSpec(name="user", dim=4)]
for refused in (client.declare, lambda tables: shardkeep.EmbeddingClient.serve(tables, quiet=True)):
    try:
        refused(user)
    except shardkeep.UserError as error:
        print(error)
print("step", client.step)
"""


def test_a_plain_process_is_the_only_trainer_and_declares_its_tables_later(tmp_path: Path, start: Start) -> None:
    done = start(PLAIN, sys.executable, "train.py", options=("--servers", "1")).end()
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "trainer 0 of 1",
        "declare: the client has its tables: item",
        "another EmbeddingClient of this process is open (torch has one RPC group a process); allowed: close() it, "
        "or EmbeddingClient.local",
        "step 1",
    ]
    assert summary_of(tmp_path / "run")["status"] == "completed"


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


def test_a_trainer_s_error_ends_the_job_unless_its_caller_says_that_it_starts_again(
    tmp_path: Path, start: Start
) -> None:
    for restarted, end in ((True, (0, "completed")), (False, (1, "failed"))):
        script, name = AGAIN.replace("= True", f"= {restarted}"), f"run-{restarted}"
        done = start(script, sys.executable, "train.py", options=("--servers", "1"), name=name).end()
        assert "ValueError: of one trainer" in done.err
        assert (done.code, summary_of(tmp_path / name)["status"]) == end, done.err


def test_torchruns_own_option_tells_the_number_of_trainers() -> None:
    assert trainers_of(["torchrun", "--nproc-per-node", "4", "t.py"]) == 4
    assert trainers_of(["torchrun", "--nproc_per_node=2", "t.py"]) == 2
    assert trainers_of(["torchrun", "--nproc-per-node=auto", "t.py"]) is None
    assert trainers_of(["python", "t.py"]) is None


# ---- stops and ends ----

SCRIPT = """
import os, signal, torch, torch.distributed as dist
import shardkeep
from shardkeep.nn import EmbeddingBagCollection
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test session in the background ignores it
if asks := "RANK" in os.environ:
    dist.init_process_group("gloo")
with shardkeep.connect(tables=[shardkeep.TableSpec(name="item", dim=4)]) as client:
    bags = EmbeddingBagCollection(client, {"item": "item"})
    start = client.restore(os.environ["FROM"])["step"] if "FROM" in os.environ else 0
    stop = torch.tensor(0)
    while client.step < start + int(os.environ["STEPS"]) and not stop:
        bags({"item": torch.randint(0, 100, (8, 3))})["item"].square().sum().backward()
        if client.step == 5 and client.rank == 0:
            print("five", flush=True)
        if asks:
            stop += client.stopping
            dist.all_reduce(stop)
    if stop:
        client.checkpoint({"step": client.step})
    print(f"from {start} to {client.step}", flush=True)
"""
"""Trainers of a group ask whether the job stops; a single one does not."""


def servers(run: Path) -> list[psutil.Process]:
    return [psutil.Process(m["pid"]) for m in RunFolder(run).member_list() if m["role"] == "server"]


@pytest.mark.slow
def test_a_loop_that_asks_writes_a_checkpoint_when_it_is_stopped_and_another_one_continues(
    tmp_path: Path, start: Start, cluster: Cluster
) -> None:
    trainers, run = (sys.executable, "-m", *FORKED, "torch", "train.py"), tmp_path / "run"
    job = start(SCRIPT, *trainers, STEPS="10000000")
    job.line("five")
    running = servers(run)
    stopped = cluster.command("stop", str(run)).end()
    done = job.end()
    assert done.code == 0, job.printed()
    ends = re.findall(r"from 0 to (\d+)", done.out)
    assert len(ends) == 2 and len({*ends}) == 1, "both trainers stop at one step"
    step = ends[0]
    assert (stopped.code, stopped.err) == (0, "")
    assert stopped.out.replace(",", "").splitlines() == [
        f"stopped at step {step}: shardkeep stop",
        f"checkpoint: step {step}",
        f"to continue from step {step}: client.restore('{run / 'checkpoints'}') before the loop's first step",
    ]
    summary = RunFolder(run).summary() or {}
    assert (summary["status"], summary["steps"]) == ("stopped", int(step))
    assert summary["tables"][0]["rows"] > 0 and len(running) == 2 and not gone(running, limit_s=0)
    again = start(SCRIPT, *trainers, name="again", FROM=str(run / "checkpoints"), STEPS="20").end()
    assert again.code == 0 and f"from {step} to {int(step) + 20}" in again.out, again.err
    assert summary_of(tmp_path / "again")["status"] == "completed"


@pytest.mark.chaos
@pytest.mark.parametrize("how", ["stop", "SIGINT", "SIGTERM"])
def test_a_loop_that_does_not_ask_ends_by_an_error_when_it_is_stopped_or_interrupted(
    tmp_path: Path, start: Start, cluster: Cluster, how: str
) -> None:
    job, run = start(SCRIPT, sys.executable, "train.py", STEPS="10000000"), tmp_path / "run"
    job.line("five")
    running = servers(run)
    if how == "stop":
        stopped = cluster.command("stop", str(run)).end()
        assert (stopped.code, stopped.err) == (0, "")
        assert re.match(r"stopped at step \d+: shardkeep stop\nnothing to resume from: no complete check", stopped.out)
    else:
        job.signal(signal.Signals[how])
    done = job.end()
    assert done.code not in (0, 2) and len(running) == 2 and not gone(running, limit_s=0)
    if how == "stop":
        assert done.err.rstrip().endswith("JobStopped: shardkeep stop"), done.err
        assert summary_of(run)["status"] == "stopped"


@pytest.mark.chaos
@every(
    ("command", "code", "text"),
    [
        ((sys.executable, "-c", "raise SystemExit(3)"), 3, "trainers: 1"),
        (("nowhere",), 2, "error: nowhere: cannot be started (No such file or directory)"),
        ((*TORCHRUN, "train.py"), 1, "WORLD_SIZE is 2 and the job has 3 trainers; allowed:"),
    ],
)
def test_how_a_command_ends_is_how_it_ends(start: Start, command: tuple[str, ...], code: int, text: str) -> None:
    options = ("--trainers", "3") if "train.py" in command else ()
    done = start(SCRIPT, *command, options=options, name=f"run-{code}", STEPS="20").end()
    assert done.code == code and text in done.err and "coordinator 0" not in done.err


LEAVES = """
import os, signal, sys, torch, shardkeep
from shardkeep.nn import EmbeddingBagCollection
way, tables = sys.argv[1], [shardkeep.TableSpec(name="item", dim=4)]
client = CLIENT
if client.rank == 1:
    way = "return"  # its push waits for the other trainer, who must not wait for it
bags = EmbeddingBagCollection(client, {"item": "item"})
for step in range(3):
    bags({"item": torch.randint(0, 100, (8, 3))})["item"].square().sum().backward()
print("trained", flush=True)
if way == "raise":
    raise ValueError("the script's own")
if way == "exit":
    sys.exit(3)
if way == "SIGTERM":
    os.kill(os.getpid(), signal.SIGTERM)
"""
CODES = {"return": 0, "raise": 1, "exit": 3, "SIGTERM": -signal.SIGTERM}
ENDS = [(client, way) for client in ("serve", "connect") for way in CODES]
IN_CI, IN_CHAOS = ("connect", "SIGTERM"), [pytest.mark.chaos, pytest.mark.timeout(3000)]


@pytest.mark.parametrize(
    ("client", "way"),
    [pytest.param(*end, marks=pytest.mark.slow if end == IN_CI else IN_CHAOS) for end in ENDS],
)
def test_a_script_that_leaves_its_client_open_ends_in_its_own_way(
    tmp_path: Path, start: Start, client: str, way: str
) -> None:
    for number in range(int(os.environ.get("LOOP_ENDS", "1"))):
        name = f"run-{number}"
        code, out, err = served(tmp_path, name, way) if client == "serve" else connected(start, name, way)
        assert code == CODES[way], err
        assert "trained" in out and "terminate called" not in err and "Exception ignored" not in err
        assert ("ValueError: the script's own" in err) == (way == "raise")
        run = RunFolder(tmp_path / name)
        left = [psutil.Process(m["pid"]) for m in run.member_list() if psutil.pid_exists(m["pid"])]
        assert not gone(left, limit_s=90)
        if way in ("return", "exit"):
            assert ((run.summary() or {})["status"], (run.summary() or {})["steps"]) == ("completed", 3)


def served(folder: Path, name: str, way: str) -> tuple[int, str, str]:
    """How a script ends that starts its servers itself."""
    client = f"shardkeep.EmbeddingClient.serve(tables, servers=1, run_dir='{name}', quiet=True)"
    (folder / "serve.py").write_text(LEAVES.replace("CLIENT", client))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": IMPORT_PATH}
    command = [sys.executable, "serve.py", way]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200.0)
    assert not done.stderr or way == "raise"
    return done.returncode, done.stdout, done.stderr


def connected(start: Start, name: str, way: str) -> tuple[int, str, str]:
    """How the first of two trainers ends, as torchrun reports it."""
    script, options = LEAVES.replace("CLIENT", "shardkeep.connect(tables=tables)"), ("--servers", "1")
    done = start(script, *TORCHRUN, "train.py", way, options=options, name=name).end()
    found = re.search(r"exitcode *: (-?\d+)", done.err)
    return int(found[1]) if found else done.code, done.out, done.err

"""`shardkeep with`: servers around a command, torchrun's own among others."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from shardkeep.loop.with_command import trainers_of
from shardkeep.run.folder import RunFolder
from tests.support.cluster import Command, Ended, kill
from tests.support.forked_trainers import FORKED
from tests.support.import_path import IMPORT_PATH

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.timeout(300)]

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
Start = Callable[..., Command]
SCRIPT = """
import os, signal, torch, torch.distributed as dist
import shardkeep
from shardkeep import TableSpec
from shardkeep.nn import EmbeddingBagCollection
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test session in the background ignores it
if "RANK" in os.environ:
    dist.init_process_group("gloo")
with shardkeep.connect(index=None if "RANK" in os.environ else 0, tables=[TableSpec(name="item", dim=4)]) as client:
    bags = EmbeddingBagCollection(client, {"item": "item"})
    while client.step < int(os.environ["STEPS"]):
        bags({"item": torch.randint(0, 100, (8, 3))})["item"].square().sum().backward()
        if client.step == 5 and client.rank == 0:
            print("five", flush=True)
    if client.rank == 0:
        print(f"{client.step} steps of {client.num_trainers}, {client.num_servers} servers", flush=True)
"""


ASKING = """
import os, torch, torch.distributed as dist
import shardkeep
from shardkeep import TableSpec
from shardkeep.nn import EmbeddingBagCollection
dist.init_process_group("gloo")
with shardkeep.connect(tables=[TableSpec(name="item", dim=4)]) as client:
    bags = EmbeddingBagCollection(client, {"item": "item"})
    start = client.restore(os.environ["FROM"])["step"] if "FROM" in os.environ else 0
    stop = torch.tensor(0)
    while client.step < start + int(os.environ["STEPS"]) and not stop:
        bags({"item": torch.randint(0, 100, (8, 3))})["item"].square().sum().backward()
        if client.step == 5 and client.rank == 0:
            print("five", flush=True)
        stop += client.stopping
        dist.all_reduce(stop)
    if stop:
        client.checkpoint({"step": client.step})
    print(f"from {start} to {client.step}", flush=True)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `shardkeep with ... -- COMMAND`."""
    commands = []
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "asking.py").write_text(ASKING)

    def started(
        *command: str, steps: int = 20, options: tuple[str, ...] = (), name: str = "run", **env: str
    ) -> Command:
        run = ("--run-dir", str(tmp_path / name))
        commands.append(Command("with", *run, *options, "--", *command, cwd=tmp_path, env={"STEPS": str(steps), **env}))
        return commands[-1]

    yield started
    for command in commands:
        command.kill()


def servers(folder: Path) -> list[psutil.Process]:
    return [psutil.Process(m["pid"]) for m in RunFolder(folder / "run").member_list() if m["role"] == "server"]


@pytest.mark.chaos
def test_torchrun_trains_on_servers_that_start_and_end_with_it(tmp_path: Path, start: Start) -> None:
    job = start(*TORCHRUN, "--nproc-per-node", "2", "train.py", options=("--servers", "2"))
    job.line("five")
    running = servers(tmp_path)
    done = job.end()
    assert done.code == 0 and "20 steps of 2, 2 servers" in done.out
    assert "servers: 2, trainers: 2, run folder: " in done.err
    assert len(running) == 2 and not any(server.is_running() for server in running)
    assert (RunFolder(tmp_path / "run").summary() or {})["status"] == "completed"


@pytest.mark.chaos
def test_without_restarts_a_server_that_dies_ends_the_command_with_its_name(tmp_path: Path, start: Start) -> None:
    options = ("--servers", "1", "--set", "recovery.restarts=0")
    job = start(sys.executable, "train.py", steps=10_000_000, options=options)
    job.line("five")
    (server,) = servers(tmp_path)
    kill([server])
    done = job.end()
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith(f"error: server 0 (pid {server.pid}) ended: killed by SIGKILL; logs: ")


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_command_and_all_processes_end(
    tmp_path: Path, start: Start, number: signal.Signals
) -> None:
    job = start(sys.executable, "train.py", steps=10_000_000)
    job.line("five")
    running = servers(tmp_path)
    job.process.send_signal(number)
    done = job.end()
    assert done.code not in (0, 2) and len(running) == 2
    assert not any(server.is_running() for server in running)


def stop(run: Path) -> Ended:
    command = Command("stop", str(run))
    try:
        return command.end()
    finally:
        command.kill()


@pytest.mark.slow
def test_a_loop_that_asks_writes_a_checkpoint_when_it_is_stopped_and_another_one_continues(
    tmp_path: Path, start: Start
) -> None:
    trainers = (sys.executable, "-m", *FORKED, "torch", "asking.py")
    job = start(*trainers, steps=10_000_000, PYTHONPATH=IMPORT_PATH)
    job.line("five")
    running = servers(tmp_path)
    stopped = stop(tmp_path / "run")
    done = job.end()
    assert done.code == 0, job.printed()
    ends = re.findall(r"from 0 to (\d+)", done.out)
    assert len(ends) == 2 and len({*ends}) == 1, "both trainers stop at one step"
    (step, folder) = (ends[0], tmp_path / "run" / "checkpoints")
    assert (stopped.code, stopped.err) == (0, "")
    assert stopped.out.replace(",", "").splitlines() == [
        f"stopped at step {step}: shardkeep stop",
        f"checkpoint: step {step}",
        f"to continue from step {step}: client.restore('{folder}') before the loop's first step",
    ]
    summary = RunFolder(tmp_path / "run").summary() or {}
    assert (summary["status"], summary["steps"]) == ("stopped", int(step))
    assert summary["tables"][0]["rows"] > 0 and len(running) == 2
    assert not any(server.is_running() for server in running)
    again = start(*trainers, name="again", FROM=str(folder), PYTHONPATH=IMPORT_PATH).end()
    assert again.code == 0 and f"from {step} to {int(step) + 20}" in again.out, again.err
    assert (RunFolder(tmp_path / "again").summary() or {})["status"] == "completed"


@pytest.mark.chaos
def test_a_loop_that_does_not_ask_ends_by_an_error_when_it_is_stopped(tmp_path: Path, start: Start) -> None:
    job = start(sys.executable, "train.py", steps=10_000_000)
    job.line("five")
    running = servers(tmp_path)
    stopped = stop(tmp_path / "run")
    done = job.end()
    assert done.code == 1 and done.err.rstrip().endswith("JobStopped: shardkeep stop"), done.err
    what, no_checkpoint = stopped.out.splitlines()
    assert (stopped.code, stopped.err) == (0, "") and re.fullmatch(r"stopped at step \d+: shardkeep stop", what)
    assert no_checkpoint.startswith("nothing to resume from: no complete checkpoint in ")
    assert (RunFolder(tmp_path / "run").summary() or {})["status"] == "stopped"
    assert len(running) == 2 and not any(server.is_running() for server in running)


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        ((sys.executable, "-c", "raise SystemExit(3)"), 3, "trainers: 1"),
        (("nowhere",), 2, "error: nowhere: cannot be started (No such file or directory)"),
        ((*TORCHRUN, "--nproc-per-node=2", "train.py"), 1, "WORLD_SIZE is 2 and the job has 3 trainers; allowed:"),
    ],
    ids=["exit status", "no command", "other numbers"],
)
def test_how_a_command_ends_is_how_it_ends(start: Start, command: tuple[str, ...], code: int, text: str) -> None:
    options = ("--trainers", "3") if "train.py" in command else ()
    done = start(*command, options=options).end()
    assert done.code == code and text in done.err and "coordinator 0" not in done.err


def test_torchruns_own_option_tells_the_number_of_trainers() -> None:
    assert trainers_of(["torchrun", "--nproc-per-node", "4", "t.py"]) == 4
    assert trainers_of(["torchrun", "--nproc_per_node=2", "t.py"]) == 2
    assert trainers_of(["torchrun", "--nproc-per-node=auto", "t.py"]) is None
    assert trainers_of(["python", "t.py"]) is None

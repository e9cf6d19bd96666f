"""How long until the first trained step? The built-in job, 2 servers and 2 workers, beside what torch alone takes.

Seconds from the command to the first record of a trained step, and the CPU seconds that each role has used by then:
with roles from the fork server, with each role started by exec, and with an empty cache of kernels. Beside it:
`import torch` alone, and two bare processes that form a torch RPC group and exchange one message. `--seconds` has no
effect: a start takes as long as it takes.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
import psutil

from shardkeep.run.reader import RunReader

LIMIT_S = 180.0
POLL_S = 0.01
SHARDKEEP = (sys.executable, "-m", "shardkeep")
ONE_STEP = ("train.report_every_s=0.001", "train.epochs=1000", "eval.every_steps=1000000000")
FORKED, SPAWNED = "shardkeep train, fork server", "shardkeep train, spawn"
COLD = "shardkeep train, no kernels cached"
HELP, IMPORT, PAIR = "shardkeep --help", "import torch", "bare torch RPC pair, one message"

TARGETS_S = {FORKED: 7.0, SPAWNED: 9.0, COLD: 25.0, HELP: 0.3}

RPC_MEMBER = """
import sys, torch
from torch.distributed import rpc
rank = int(sys.argv[1])
options = rpc.TensorPipeRpcBackendOptions(init_method="file://" + sys.argv[2], rpc_timeout=60)
rpc.init_rpc(f"member{rank}", rank=rank, world_size=2, rpc_backend_options=options)
if rank == 0:
    assert rpc.rpc_sync("member1", torch.add, (torch.ones(2), 1)).sum() == 4
rpc.shutdown()
"""


def first_step(_seconds: float, *, start: str = "auto", empty_cache: bool = False) -> harness.Figures:
    """Starts the built-in job, waits for its first step, stops it. `start`: `launch.start`."""
    with tempfile.TemporaryDirectory(prefix="start-up-") as folder:
        run = Path(folder) / "run"
        environment = {**os.environ, **({"XDG_CACHE_HOME": folder} if empty_cache else {})}
        command = [*SHARDKEEP, "train", "demo", "--run-dir", str(run)]
        command += [part for setting in (*ONE_STEP, f"launch.start={start}") for part in ("--set", setting)]
        began = time.time()
        with started(command, environment, Path(folder) / "output.txt") as launcher:
            record = wait_for_step(launcher, run, Path(folder) / "output.txt")
            used = cpu_by_role(launcher, RunReader(run))
            launcher.send_signal(signal.SIGINT)
            launcher.wait(60)
        seconds = datetime.datetime.fromisoformat(record["time"]).timestamp() - began
    return {"seconds": seconds, "cpu_s": sum(used.values())} | {f"{role}_cpu_s": s for role, s in used.items()}


@contextlib.contextmanager
def started(command: Sequence[str], environment: Mapping[str, str], output: Path) -> Iterator[psutil.Popen]:
    """A command under way; it and what it started are gone afterwards."""
    with output.open("wb") as file:
        process = psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=dict(environment))
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        process.wait()


def wait_for_step(launcher: psutil.Popen, run: Path, output: Path) -> dict[str, Any]:
    """The first record of progress."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end and launcher.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
            for line in lines:
                if '"kind": "progress"' in line and line.endswith("\n"):
                    return dict(json.loads(line))
        time.sleep(POLL_S)
    raise RuntimeError(f"no step within {LIMIT_S:g} s:\n{output.read_text(errors='replace')[-2000:]}")


def cpu_by_role(launcher: psutil.Popen, run: RunReader) -> dict[str, float]:
    """CPU seconds so far: of the launcher, the fork server, the coordinator, all servers, all workers."""
    roles = {member["pid"]: member["role"] for member in run.member_list()}
    roles |= dict.fromkeys(run.coordinator_pids(), "coordinator")
    used = dict.fromkeys(("fork-server", "coordinator", "server", "worker"), 0.0)
    for child in launcher.children():
        role = roles.get(child.pid) or next((word for word in child.cmdline() if word == "fork-server"), None)
        if role is not None:
            used[role] += sum(child.cpu_times()[:2])
    return {"launcher": sum(launcher.cpu_times()[:2])} | used


def timed(*commands: Sequence[str]) -> harness.Figures:
    """Commands at once until all have ended; their seconds and CPU seconds."""
    before, began = os.times(), time.perf_counter()
    processes = [subprocess.Popen(c, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for c in commands]
    for process in processes:
        _, said = process.communicate(timeout=LIMIT_S)
        if process.returncode:
            raise RuntimeError(f"{process.args} failed:\n{said[-2000:]}")
    seconds, after = time.perf_counter() - began, os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": seconds, "cpu_s": cpu_s}


def rpc_pair(_seconds: float) -> harness.Figures:
    with tempfile.TemporaryDirectory(prefix="start-up-") as folder:
        place = str(Path(folder) / "store")
        return timed(*([sys.executable, "-c", RPC_MEMBER, str(rank), place] for rank in range(2)))


def show(found: Mapping[str, Sequence[harness.Figures]]) -> None:
    print(f"\n{'seconds, min / median / max':<46} {'target':>24}   CPU seconds (median)")
    for name, rounds in found.items():
        spread = harness.spread([figures["seconds"] for figures in rounds])
        wanted = f"{TARGETS_S[name]:.1f}" if name in TARGETS_S else ""
        cpu = {k: harness.spread([f[k] for f in rounds])["median"] for k in rounds[0] if k.endswith("cpu_s")}
        parts = ", ".join(f"{k.removesuffix('_cpu_s')} {s:.1f}" for k, s in cpu.items() if k != "cpu_s")
        seconds = " / ".join(f"{spread[k]:.2f}" for k in ("min", "median", "max"))
        print(f"{name:<46} {seconds:>20} {wanted:>4}   {cpu['cpu_s']:.2f}{f' ({parts})' if parts else ''}")


def main() -> None:
    parser = harness.arguments(__doc__)
    options = harness.parse(parser)
    contestants: dict[str, harness.Contestant] = {
        FORKED: first_step,
        SPAWNED: lambda seconds: first_step(seconds, start="spawn"),
        COLD: lambda seconds: first_step(seconds, empty_cache=True),
        HELP: lambda _seconds: timed([*SHARDKEEP, "--help"]),
        IMPORT: lambda _seconds: timed([sys.executable, "-c", "import torch"]),
        PAIR: rpc_pair,
    }
    if options.smoke:
        del contestants[COLD]
    else:
        first_step(0.0)  # so that the kernels are there, and the files in the page cache
    found = harness.alternate(contestants, rounds=options.rounds, seconds=options.seconds)
    show(found)
    for ours, other in ((FORKED, SPAWNED), (FORKED, IMPORT), (SPAWNED, PAIR)):
        harness.show_ratio(f"seconds, {ours} / {other}", harness.ratios(found, ours, other, "seconds"))
    harness.write(options.json, "start_up", {"rounds": found, "targets_s": TARGETS_S})


if __name__ == "__main__":
    main()

"""Run folders as a sweep finds them, made by hand; and a stand-in for `shardkeep train` that makes one.

A stand-in's run named in the file `fail` of its sweep fails, one named in `hang` waits until its stdin ends; every
start is a line of `started`, every end of a run one of `ended`.
"""

from __future__ import annotations

import json
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NoReturn

import yaml
from rich.console import Console

from shardkeep.base.errors import ShardkeepError
from shardkeep.config import parse_config
from shardkeep.experiments.plan import SweepPlan, load_sweep
from shardkeep.experiments.results import Results, collect
from shardkeep.experiments.runner import run
from shardkeep.experiments.sweep import Sweep
from shardkeep.launch.processes.children import Child, child_environment
from shardkeep.launch.processes.fork_server import ForkServer
from shardkeep.launch.processes.starter import RoleCommand, Starter
from shardkeep.run.origin.code import code_of
from tests.support.forked import Forked, become, close_all_but, fork_context, redirect, started, waited
from tests.support.import_path import IMPORT_PATH

STAND_IN = "tests.support.trial_runs:script"
BASE: dict[str, Any] = {
    "name": "tiny",
    "servers": 1,
    "workers": 2,
    "data": {"synthetic": {"train_samples": 1000, "eval_samples": 100, "table_sizes": [50], "num_dense": 2}},
    "train": {"batch_size": 50},
}
BYTES = {"fp32": 100_000, "fp16": 50_000}  # values per direction
STEPS, SAMPLES = 10, 1000


def write_sweep(folder: Path, **changes: Any) -> Path:
    """A sweep file of the tiny base with two recipes and two seeds, except `changes`; None leaves a key out."""
    keys = {"base": BASE, "recipes": ["fp32", "fp16"], "seeds": [1, 2], **changes}
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in keys.items() if v is not None}, sort_keys=False))
    return path


def write_run(
    folder: Path,
    config_yaml: str,
    *,
    auc: float,
    value_bytes: int = 100_000,
    status: str = "completed",
    code_folder: Path | None = None,
) -> None:
    """A run folder with two evaluations, 1,000 samples in ten steps, and bytes in every class."""
    folder.mkdir(parents=True)
    digests = code_of(parse_config(config_yaml), code_folder)
    (folder / "code.json").write_text(json.dumps({"digests": digests}))
    (folder / "config.yaml").write_text(config_yaml)
    counts = {
        "push": {"ids": 8000, "values": value_bytes, "framing": 500},
        "pull": {"ids": 8000, "values": value_bytes, "framing": 500},
        "tower": {"values": 20_000},
    }
    train_bytes = {direction: sum(parts.values()) for direction, parts in counts.items()}
    total = sum(train_bytes.values())
    with (folder / "metrics.jsonl").open("w") as file:
        for step, score in ((STEPS // 2, auc - 0.1), (STEPS, auc)):
            share = step / STEPS
            record = {
                "time": f"2026-11-22T10:00:{step:02d}.000",
                "kind": "eval",
                "step": step,
                "auc": score,
                "train_samples": int(share * SAMPLES),
                "train_bytes": {"total": int(share * total)},
            }
            file.write(json.dumps(record) + "\n")
    summary = {
        "status": status,
        "steps": STEPS,
        "samples": SAMPLES,
        "wall_s": 2.0,
        "samples_per_s": 500.0,
        "cpu_ms": {"steps": 8, "worker": 20.0, "server": 5.0},
        "eval": {"auc": auc, "logloss": 0.5, "normalized_entropy": 0.9, "samples": 100},
        "bytes": {
            **counts,
            "read": {"values": 7000},
            "control": 1000,
            "total": total + 8000,
            "per_sample": (total + 1000) / SAMPLES,
        },
        "tables": [{"name": "sparse0", "rows": 50, "bytes": 8192}],
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "machine": {"system": "Linux 6.18", "processor": "A CPU, family 25 model 17", "cores": 2, "memory_gb": 25.3},
        "commit": "0123456789abcdef",
    }
    (folder / "summary.json").write_text(json.dumps(summary))


def sweep(plan: SweepPlan, out: Path, console: Console, jobs: int = 1, starter: Starter | None = None) -> Results:
    """Runs a sweep; its results. `starter`: of its trials; None = of real jobs."""
    run(Sweep(plan, out), console=console, jobs=jobs, starter=starter)
    return collect(plan, out)


class StandIns(Starter):
    """Starts stand-ins, forked from the preloaded process of the tests."""

    def start(self, command: RoleCommand) -> Child:
        with command.log.open("ab") as log:
            return Child(command.role, command.index, PreloadedRun(command, log), log=command.log)  # type: ignore[arg-type]


class PreloadedRun:
    """A stand-in; the part of `subprocess.Popen` that `Child` needs."""

    def __init__(self, command: RoleCommand, output: IO[Any]) -> None:
        reads, writes = os.pipe()
        ends = [Connection(reads), Connection(os.dup(output.fileno()))]
        given = ([command.role, *command.arguments], dict(command.env), ends)
        self._process = fork_context().Process(target=_run, args=given)
        self._process.start()
        for end in ends:
            end.close()
        self.pid: int = self._process.pid
        self.stdin = os.fdopen(writes, "wb", buffering=0)

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        return waited(self._process, timeout)

    def terminate(self) -> None:
        self._process.terminate()


def _run(arguments: list[str], env: dict[str, str], ends: list[Connection]) -> NoReturn:
    stdin, output = (end.fileno() for end in ends)
    redirect(stdin, output, output)
    close_all_but()
    os.setsid()
    become(STAND_IN, arguments, env)


def started_sweep(folder: Path) -> Forked | Any:
    """The sweep of `sweep.yaml` into `out`, in a process of its own, whose stand-ins its fork server forks."""
    return started([str(folder)], env={**os.environ, "PYTHONPATH": IMPORT_PATH}, main=f"{__name__}:run_sweep")


def run_sweep() -> None:
    """The sweep below the folder in `sys.argv`."""
    folder = Path(sys.argv[1])
    starter = Starter(ForkServer(child_environment(os.environ, threads=1), main=STAND_IN))
    try:
        plan = load_sweep(folder / "sweep.yaml")
        sweep(plan, out=folder / "out", console=Console(width=200), jobs=2, starter=starter)
    except ShardkeepError as error:
        print(error)
        sys.exit(error.exit_code)
    finally:
        starter.close()


def script() -> None:
    """A stand-in. `sys.argv`: main file, train, JOB, --run-dir, RUN [--code FOLDER]."""
    job, run = Path(sys.argv[2]), Path(sys.argv[4])
    out = run.parent.parent
    _note(out / "started", run.name)
    if run.name in _lines(out / "fail"):
        print("error: this run fails on purpose", file=sys.stderr)
        sys.exit(1)
    if run.name in _lines(out / "hang"):
        run.mkdir()
        while os.read(0, 1024):
            pass
        _note(out / "ended", run.name)
        sys.exit(1)
    config = yaml.safe_load(job.read_text())
    push = config["compression"]["push"]
    lost = 0.01 if push["values"] == "fp16" else 0.0
    score, size = 0.8 + 0.001 * config["seed"] - lost, BYTES[push["values"]]
    code = Path(sys.argv[sys.argv.index("--code") + 1]) if "--code" in sys.argv else None
    write_run(run, job.read_text(), auc=score, value_bytes=size, code_folder=code)


def _note(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(f"{line}\n")


def _lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []

"""W1 as a real job: `shardkeep train` in processes of its own, measured from outside over a window of its steady state.

Steps are counted by the records of metrics.jsonl, each written within about a millisecond of the end of its step; the
window lies between two of them, and CPU times are read when they appear (looked for every 10 ms; the kernel counts in
ticks of 10 ms). Over 20 s that is off by 0.2 % at most.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import psutil
import w1_data
import workload

from shardkeep.base.machine.topology import usable_cores
from shardkeep.base.yaml_text import write_yaml

HERE = Path(__file__).resolve().parent
WARM_UP_S = 8.0  # two workers pass over their 64 batches once in 6-8 s: tables have stopped growing
START_LIMIT_S = 180.0
END_LIMIT_S = 30.0
POLL_S = 0.01

Cores = list[list[int]]


@dataclass(frozen=True)
class Moment:
    """The step that had just ended, when, and the CPU seconds of each process until then."""

    step: int
    time_s: float
    cpu_s: dict[str, float]


def shardkeep_job(
    *,
    dim: int,
    servers: int,
    workers: int,
    mode: str = "bounded",
    staleness: int = 2,
    seconds: float,
    warm_up_s: float = WARM_UP_S,
    batch: int = workload.BATCH,
    cores: tuple[Cores, Cores] | None = None,
    device: str = "cpu",
    overrides: Sequence[str] = (),
) -> harness.Figures:
    """Runs the job, measures for `seconds` after `warm_up_s`, ends it.

    Args:
        staleness: of `bounded` and `async`.
        batch: samples per worker and step.
        cores: for each worker, then for each server, the cores it may use (`launch.affinity` of the config).
            Left out: worker i on core i; one server beside one worker on core 1, other servers on any.
        overrides: `a.b=value`, as of `--set`.

    Returns:
        samples_per_s, steps_per_s, and CPU microseconds per sample: cpu_us_per_sample = server_cpu_us +
        worker_cpu_us + other_cpu_us (coordinator and launcher).
    """
    consistency = {"mode": mode} if mode == "sync" else {"mode": mode, "staleness": staleness}
    config = job_config(
        dim=dim, servers=servers, workers=workers, consistency=consistency, batch=batch, device=device,
        cores=cores or default_cores(servers, workers), report_every_s=min(2.0, seconds / 8),
    )  # fmt: skip
    return measured(config, batch * workers, seconds=seconds, warm_up_s=warm_up_s, overrides=overrides)


def measured(
    config: dict[str, Any],
    samples_per_step: int,
    *,
    seconds: float,
    warm_up_s: float = WARM_UP_S,
    overrides: Sequence[str] = (),
) -> harness.Figures:
    """The figures of `shardkeep_job` of any job without an end."""
    with running(config, overrides) as job:
        job.wait()
        before, after = job.window(warm_up_s, seconds)
        job.end()
    return figures(before, after, samples_per_step)


def job_config(
    *,
    dim: int,
    servers: int,
    workers: int,
    consistency: dict[str, Any],
    batch: int,
    device: str,
    cores: tuple[Cores, Cores] | None,
    report_every_s: float,
) -> dict[str, Any]:
    """W1 as a config of shardkeep's; it has no end. Its data are ready."""
    w1_data.drawn(w1_data.NUM_BATCHES * workers, seed=1)
    return {
        "name": "w1",
        "seed": 1,
        "servers": servers,
        "workers": workers,
        "threads": 1,
        "launch": {
            "affinity": {"workers": cores[0], "servers": cores[1]} if cores and sys.platform == "linux" else "none"
        },
        "data": {
            "source": "w1_data:ready",
            "root": str(HERE),
            "options": {"num_batches": w1_data.NUM_BATCHES * workers},
        },
        "model": {"name": "dlrm", "bottom": [512, 256], "hidden": [512, 256]},
        "tables": {"default": {"dim": dim, "optimizer": {"name": "rowwise_adagrad", "lr": 0.01, "eps": 1e-8}}},
        "tower": {"optimizer": {"name": "sgd", "lr": 0.01}, "compile": "off", "amp": "off", "device": device},
        "train": {"batch_size": batch, "epochs": 1_000_000, "order": "stored", "report_every_s": report_every_s},
        "consistency": consistency,
        "checkpoint": {"every_steps": "off"},
    }


def default_cores(servers: int, workers: int) -> tuple[Cores, Cores]:
    every = list(usable_cores())
    apart = servers == workers == 1 and len(every) > 1
    return [[every[i % len(every)]] for i in range(workers)], [every[1:2] if apart else every for _ in range(servers)]


@contextlib.contextmanager
def running(config: dict[str, Any], overrides: Sequence[str] = ()) -> Iterator[Job]:
    """The job under way, its folder below a temporary one; nothing of it is left afterwards."""
    with tempfile.TemporaryDirectory(prefix="w1-job-") as folder:
        job = Job(Path(folder), config, overrides)
        try:
            yield job
        finally:
            job.kill()


class Job:
    """One `shardkeep train` in its own session, seen from outside."""

    def __init__(self, folder: Path, config: dict[str, Any], overrides: Sequence[str]) -> None:
        (folder / "w1.yaml").write_text(write_yaml(config), encoding="utf-8")
        self.run = folder / "run"
        self._output = folder / "output.txt"
        self._read, self._rest = 0, b""
        command = [sys.executable, "-m", "shardkeep", "train", str(folder / "w1.yaml"), "--run-dir", str(self.run)]
        command += [part for override in overrides for part in ("--set", override)]
        path = os.pathsep.join(filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH")]))
        with self._output.open("wb") as output:
            self._launcher = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self._in_process = config["servers"] == 0
        self.processes: dict[str, psutil.Process] = {}

    def wait(self) -> None:
        """Waits for the first steps."""
        self._next_record(START_LIMIT_S)
        launcher = psutil.Process(self._launcher.pid)
        self.processes = {"worker 0" if self._in_process else "launcher 0": launcher}
        if not self._in_process:
            members = json.loads((self.run / "members.json").read_text(encoding="utf-8"))["members"]
            self.processes |= {f"{m['role']} {m['index']}": psutil.Process(m["pid"]) for m in members}

    def window(self, warm_up_s: float, seconds: float) -> tuple[Moment, Moment]:
        """The moments at both ends of the measured window."""
        self._after(time.monotonic() + warm_up_s)
        before = self._moment()
        self._after(time.monotonic() + seconds)
        return before, self._moment()

    def end(self) -> None:
        """Ctrl-C; fails unless the job stops in order and in time."""
        self._launcher.send_signal(signal.SIGINT)
        try:
            self._launcher.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise self._failed(f"still runs {END_LIMIT_S:g} s after Ctrl-C") from None
        status = json.loads((self.run / "summary.json").read_text(encoding="utf-8"))["status"]
        left = [name for name, p in self.processes.items() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if status != "stopped" or left:
            raise self._failed(f"ended as {status}, left running: {', '.join(left) or 'nothing'}")

    def kill(self) -> None:
        """Ends every process that still runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self._launcher.pid)
            for process in [*launcher.children(recursive=True), launcher]:
                process.kill()
        self._launcher.wait()
        for process in self.processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _after(self, instant: float) -> None:
        """Returns when the first record after `instant` has just come."""
        time.sleep(max(0.0, instant - time.monotonic()))
        self._records()
        self._record = self._next_record(START_LIMIT_S)

    def _moment(self) -> Moment:
        cpu = {name: sum(process.cpu_times()[:2]) for name, process in self.processes.items()}
        when = datetime.datetime.fromisoformat(self._record["time"]).timestamp()
        return Moment(int(self._record["step"]), when, cpu)

    def _next_record(self, limit_s: float) -> dict[str, Any]:
        end = time.monotonic() + limit_s
        while not (records := self._records()):
            if self._launcher.poll() is not None:
                raise self._failed(f"ended too early, exit code {self._launcher.returncode}")
            if time.monotonic() > end:
                raise self._failed(f"no step within {limit_s:g} s")
            time.sleep(POLL_S)
        return records[-1]

    def _records(self) -> list[dict[str, Any]]:
        """The progress records since the last call."""
        try:
            with (self.run / "metrics.jsonl").open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:
            return []
        self._read += len(text)
        *lines, self._rest = (self._rest + text).split(b"\n")
        return [r for line in lines if (r := json.loads(line))["kind"] == "progress"]

    def _failed(self, text: str) -> RuntimeError:
        logs = [self._output, *sorted((self.run / "logs").glob("*.log"))]
        tails = "\n".join(f"---- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)
        return RuntimeError(f"the job {text}\n{tails}")


def figures(before: Moment, after: Moment, samples_per_step: int) -> harness.Figures:
    steps, seconds = after.step - before.step, after.time_s - before.time_s
    samples = steps * samples_per_step
    used = {name: after.cpu_s[name] - before.cpu_s[name] for name in after.cpu_s}

    def us(*roles: str) -> float:
        return sum(s for name, s in used.items() if name.split()[0] in roles) / samples * 1e6

    return {
        "samples_per_s": samples / seconds,
        "steps_per_s": steps / seconds,
        "cpu_us_per_sample": sum(used.values()) / samples * 1e6,
        "worker_cpu_us": us("worker"),
        "server_cpu_us": us("server"),
        "other_cpu_us": us("launcher", "coordinator"),
    }


def once() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--mode", default="bounded", choices=["sync", "bounded", "async"])
    parser.add_argument("--batch", type=int, default=workload.BATCH)
    parser.add_argument("--set", action="append", default=[], dest="overrides", help="a.b=value of the config")
    options = harness.parse(parser)

    def job(seconds: float) -> harness.Figures:
        return shardkeep_job(
            dim=options.dim, servers=options.servers, workers=options.workers, mode=options.mode, seconds=seconds,
            warm_up_s=1.0 if options.smoke else WARM_UP_S, batch=options.batch, device=options.device,
            overrides=options.overrides,
        )  # fmt: skip

    found = harness.alternate({"shardkeep": job}, rounds=options.rounds, seconds=options.seconds)
    harness.write(options.json, "w1_job", {"arguments": vars(options) | {"json": None}, "rounds": found})


if __name__ == "__main__":
    once()

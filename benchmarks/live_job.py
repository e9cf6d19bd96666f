"""A job that trains while a benchmark looks at it: steps by its records of progress, CPU of processes and threads."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

LASTING: dict[str, Any] = {
    "servers": 1,
    "workers": 1,
    "data": {"synthetic": {"train_samples": 2_000_000, "eval_samples": 1000}},
    "tower": {"amp": "off", "compile": "off"},
    "train": {"batch_size": 1024, "epochs": 100_000, "report_every_s": 0.5},
    "eval": {"every_steps": 100_000_000},
    "checkpoint": {"every_steps": "off"},
}
"""Trains until it is stopped."""
START_S, END_S = 240.0, 60.0
FIRST_STEPS = 50
NAMING = """
import threading
inner = threading.Thread._bootstrap_inner
def named(self):
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as file:
        file.write(self.name[:15])
    inner(self)
threading.Thread._bootstrap_inner = named
"""
"""Tells the kernel the names of Python's threads, as Python 3.14 does itself."""


class LiveJob:
    """`shardkeep train` of a config in a folder, from its first steps to the end of the `with`.

    Args:
        folder: Where its files go.
        config: The job.
        ready: Whether the measured time may begin, once the first steps are done.
        named_threads: Let `thread_cpu_s` find threads.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        *,
        ready: Callable[[LiveJob], bool] = lambda _job: True,
        named_threads: bool = False,
    ) -> None:
        from shardkeep.base.yaml_text import write_yaml

        self.run = folder / "run"
        (folder / "job.yaml").write_text(write_yaml(dict(config)))
        paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
        if named_threads:
            (folder / "sitecustomize.py").write_text(NAMING)
            paths.insert(0, str(folder))
        self._lines: list[str] = []
        self._child = subprocess.Popen(
            [sys.executable, "-m", "shardkeep", "train", str(folder / "job.yaml"), "--run-dir", str(self.run)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()
        try:
            deadline = time.monotonic() + START_S
            while self.steps() < FIRST_STEPS or not ready(self):
                if self._child.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the job is not ready after {START_S} s:\n{self.printed()[-2000:]}")
                time.sleep(0.5)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LiveJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._child.send_signal(signal.SIGINT)
        try:
            self._child.wait(END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def printed(self) -> str:
        return "".join(self._lines)

    def pids(self) -> dict[str, int]:
        """The process of each role, by `role index`."""
        members = json.loads((self.run / "members.json").read_text())["members"]
        return {f"{member['role']} {member['index']}": member["pid"] for member in members}

    def steps(self) -> int:
        """Steps that are done, by the last record."""
        reported = self.reported()
        return reported[-1][1] if reported else 0

    def reported(self) -> list[tuple[float, int]]:
        """Time and step of each record of progress."""
        with contextlib.suppress(FileNotFoundError):
            lines = [line for line in (self.run / "metrics.jsonl").read_text().splitlines() if '"progress"' in line]
            records = [json.loads(line) for line in lines if line.endswith("}")]
            return [(datetime.fromisoformat(r["time"]).timestamp(), r["step"]) for r in records if "total_steps" in r]
        return []

    def steps_between(self, began: float, ended: float) -> tuple[int, float]:
        """Steps between the first and the last record in that time, and their seconds."""
        inside = [(at, step) for at, step in self.reported() if began <= at <= ended]
        (first, before), (last, after) = inside[0], inside[-1]
        return after - before, last - first

    def _read(self) -> None:
        assert self._child.stdout is not None
        self._lines.extend(self._child.stdout)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    import psutil

    return float(sum(psutil.Process(pid).cpu_times()[:2]))


def thread_cpu_s(pid: int, name: str) -> float:
    """CPU seconds so far of the threads of a process with this name, by the kernel's clock of each thread."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if (task / "comm").read_text().strip() == name:
                total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9

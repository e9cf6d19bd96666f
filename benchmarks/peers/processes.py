"""The processes of an opponent's run: pinned, spawned, watched, their CPU read at both edges of the window, ended."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from measurement import Options, Step, Window, changed, report

START_S = 180.0
"""Limit for start and end together, on top of warm-up and window."""


def pin(cores: list[int]) -> None:
    """Binds this process to the cores, with one thread for torch's arithmetic."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def alone(options: Options, step: Step, rows: Callable[[], torch.Tensor] | None = None) -> None:
    """Runs an opponent of one process, here, already pinned. `rows` gives a copy of rows that training changes."""
    before = rows() if rows else None
    cpu: list[float] = []
    window = Window(options, begin=lambda: cpu.append(cpu_seconds()), end=lambda: cpu.append(cpu_seconds()))
    figures = window.run(step)
    share = changed(before, rows()) if rows else None
    report(options, figures, cpu_s=cpu[1] - cpu[0], rows_changed=share)


@dataclass(frozen=True)
class Link:
    """What a process of a run knows of the others."""

    folder: str
    """For files by which groups form; gone after the run."""
    events: Any

    def window(self, options: Options, rank: int) -> Window:
        """The window of worker `rank`; with several, the default process group must be there."""
        tell = self.events.put if rank == 0 else (lambda event: None)
        agree = None if options.workers == 1 else _rank_0_decides
        return Window(options, begin=lambda: tell(("begin", None)), end=lambda: tell(("end", None)), agree=agree)

    def done(self, figures: dict[str, float], rows_changed: float | None) -> None:
        self.events.put(("done", (figures, rows_changed)))


def _rank_0_decides(over: bool) -> bool:
    answer = torch.tensor([over])
    torch.distributed.broadcast(answer, 0)
    return bool(answer)


def together(options: Options, roles: dict[str, tuple[Callable[..., None], tuple[Any, ...], list[int]]]) -> None:
    """Runs an opponent of several processes: name -> (function, its arguments after options and link, its cores).

    Rank 0 of the workers must call `Link.done`; the first failure ends the run with exit status 1.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    context = mp.get_context("spawn")
    events = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        link = Link(folder, events)
        processes = {
            name: context.Process(target=_role, args=(name, main, cores, options, link, arguments), daemon=True)
            for name, (main, arguments, cores) in roles.items()
        }
        for process in processes.values():
            process.start()
        try:
            figures, rows_changed, cpu_s = _watch(processes, events, START_S + options.warm_up + options.seconds)
        finally:
            _end(list(processes.values()))
    report(options, figures, cpu_s=cpu_s, rows_changed=rows_changed)


def _role(name: str, main: Callable[..., None], cores: list[int], options: Options, link: Link, arguments: Any) -> None:
    try:
        pin(cores)
        main(options, link, *arguments)
    except BaseException as error:
        traceback.print_exc()
        first = next(iter(str(error).splitlines()), "")
        link.events.put(("failed", f"{name}: {type(error).__name__}: {first}"))
        raise SystemExit(1) from None


def _watch(processes: dict[str, Any], events: Any, limit_s: float) -> tuple[dict[str, float], float | None, float]:
    """Waits for rank 0's figures; gives them, the share of changed rows, and the CPU seconds of all in the window."""
    stop_at = time.monotonic() + limit_s
    edges: list[float] = []
    while time.monotonic() < stop_at:
        try:
            kind, value = events.get(timeout=1.0)
        except queue.Empty:
            for name, process in processes.items():
                if process.exitcode not in (None, 0):
                    sys.exit(f"error: {name} ended with exit status {process.exitcode}")
            continue
        if kind in ("begin", "end"):
            edges.append(sum(_cpu(process.pid) for process in processes.values()))
        elif kind == "done":
            return *value, edges[1] - edges[0]
        else:
            sys.exit(f"error: {value}")
    sys.exit(f"error: not done after {limit_s:.0f} s")


def _cpu(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _end(processes: list[Any]) -> None:
    stop_at = time.monotonic() + 15.0
    for process in processes:
        process.join(max(0.0, stop_at - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()

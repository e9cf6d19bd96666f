"""One opponent's run: its command line, the warm-up, the measured window, the line of JSON. Knows no opponent.

A window's CPU is that of all processes of the run; the parent's, which only waits, is left out where there are several.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

Step = Callable[[int], "torch.Tensor | None"]
"""Trains on the batch of this number; gives the loss, W2 none."""

CHECKED = 5  # losses at each end
STRIDE = 4  # steps between two looks at rank 0's clock


@dataclass(frozen=True)
class Options:
    workload: str
    dim: int
    workers: int
    batch: int
    seconds: float
    warm_up: float
    cores: list[int]
    device: str
    seed: int


def options(description: str | None, *, workloads: tuple[str, ...] = ("w1", "w2"), max_workers: int = 1) -> Options:
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--workload", choices=workloads, default=workloads[0], help="w1 = with the tower, w2 = without")
    parser.add_argument("--dim", type=int, default=16, help="width of a row")
    parser.add_argument("--workers", type=int, default=1, help="processes that train")
    parser.add_argument("--batch", type=int, default=2048, help="samples of a worker's step")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured window")
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds before it")
    parser.add_argument("--cores", default="0,1", help="cores to use, by commas")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the tower trains")
    parser.add_argument("--seed", type=int, default=1, help="of data and start values")
    given = vars(parser.parse_args())
    if given["workers"] not in range(1, max_workers + 1):
        parser.error(f"--workers {given['workers']}: this opponent runs with 1 to {max_workers}")
    if given["device"] == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this torch sees no GPU")
    return Options(**(given | {"cores": [int(core) for core in given["cores"].split(",")]}))


@dataclass
class Window:
    """Runs steps through warm-up and window, and says what came of it.

    Args:
        begin, end: called at the window's edges.
        agree: gives every worker rank 0's answer, so that all do the same number of steps.
    """

    options: Options
    begin: Callable[[], None] = lambda: None
    end: Callable[[], None] = lambda: None
    agree: Callable[[bool], bool] | None = None
    losses: list[torch.Tensor] = field(default_factory=list)

    def run(self, step: Step) -> dict[str, float]:
        first = self._repeat(step, 0, self.options.warm_up)
        self._synchronize()
        self.begin()
        started = time.perf_counter()
        steps = self._repeat(step, first, self.options.seconds) - first
        self._synchronize()
        elapsed = time.perf_counter() - started
        self.end()
        return {"steps": steps, "elapsed_s": elapsed} | self._loss_figures()

    def _repeat(self, step: Step, number: int, seconds: float) -> int:
        stop_at = time.perf_counter() + seconds
        while True:
            loss = step(number)
            number += 1
            if loss is not None:
                self.losses.append(loss.detach())
                del self.losses[CHECKED:-CHECKED]
            if self.agree is None:
                if time.perf_counter() >= stop_at:
                    return number
            elif number % STRIDE == 0 and self.agree(time.perf_counter() >= stop_at):
                return number

    def _synchronize(self) -> None:
        if self.options.device == "cuda":
            torch.cuda.synchronize()

    def _loss_figures(self) -> dict[str, float]:
        half = min(CHECKED, len(self.losses) // 2)
        if not half:
            return {}
        values = torch.stack(self.losses).cpu()
        return {"loss_first": values[:half].mean().item(), "loss_last": values[-half:].mean().item()}


def changed(before: torch.Tensor, after: torch.Tensor) -> float:
    """The share of rows that are not what they were."""
    return (before != after).any(1).double().mean().item()


def report(options: Options, figures: dict[str, float], *, cpu_s: float, rows_changed: float | None) -> None:
    """Prints the run's figures as the last line of its output."""
    samples = figures["steps"] * options.batch * options.workers
    found = {
        "samples_per_s": samples / figures["elapsed_s"],
        "steps_per_s": figures["steps"] / figures["elapsed_s"],
        "cpu_us_per_sample": cpu_s / samples * 1e6,
    }
    if options.workload == "w2":
        from data import NUM_FEATURES

        found["m_ids_per_s"] = found["samples_per_s"] * NUM_FEATURES / 1e6
        found["cpu_ns_per_id"] = found["cpu_us_per_sample"] * 1e3 / NUM_FEATURES
    found |= {key: figures[key] for key in ("loss_first", "loss_last") if key in figures}
    if rows_changed is not None:
        found["rows_changed"] = rows_changed
    print(json.dumps(found), flush=True)

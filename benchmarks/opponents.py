"""Opponents as contestants: runs a script of peers/ in the opponents' own virtual environment and reads its figures.

Knows no opponent's code. An opponent that is not installed or fails is left out of a benchmark, with one line.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import harness

PEERS = Path(__file__).resolve().parent / "peers"
ROOT = PEERS.parents[1]
VENV = ".venv-peers"
LIMIT_S = 240.0
"""On start and end of an opponent together, on top of what it measures."""


def contestant(name: str, **options: Any) -> harness.Contestant:
    """The opponent `peers/NAME.py`, run with its options (workload, dim, workers, batch, warm_up, cores, device).

    The contestant gives samples_per_s, steps_per_s, cpu_us_per_sample and, for W2, m_ids_per_s and cpu_ns_per_id; each
    run takes another seed. It raises harness.CannotRun when the opponent is missing, fails or does not train.
    """
    seeds = itertools.count(1)

    def run(seconds: float) -> harness.Figures:
        python = ROOT / VENV / "bin" / "python"
        if not python.exists():
            raise harness.CannotRun(f"{VENV} is missing; benchmarks/peers/install makes it")
        given = {**options, "seconds": seconds, "seed": next(seeds)}
        arguments = [part for key, value in given.items() for part in (f"--{key.replace('_', '-')}", _text(value))]
        output = _output([str(python), str(PEERS / f"{name}.py"), *arguments], LIMIT_S + seconds)
        return _checked(json.loads(output.splitlines()[-1]))

    return run


def _text(value: Any) -> str:
    return ",".join(str(part) for part in value) if isinstance(value, (list, tuple)) else str(value)


def _output(command: list[str], limit_s: float) -> str:
    """What the command prints; its whole session is gone afterwards."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        try:
            output, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise harness.CannotRun(f"not done after {limit_s:.0f} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode or not output.strip():
        raise harness.CannotRun(f"exit status {process.returncode}: {_cause(errors)}")
    return output


def _cause(errors: str) -> str:
    """The line that says `error: ...`, else the last."""
    lines = errors.strip().splitlines() or ["no word of why"]
    return next((line.partition("error: ")[2] for line in reversed(lines) if "error: " in line), lines[-1])


def _checked(figures: harness.Figures) -> harness.Figures:
    """The figures without those that only show that the opponent trains."""
    first, last = figures.pop("loss_first", None), figures.pop("loss_last", None)
    changed = figures.pop("rows_changed", None)
    if first is not None and last is not None and not last < first:
        raise harness.CannotRun(f"it does not train: its loss went from {first:.4f} to {last:.4f}")
    if changed is not None and changed < 0.9:
        raise harness.CannotRun(f"it does not train: only {changed:.0%} of the rows changed")
    return figures

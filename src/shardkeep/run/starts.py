"""The starts of a job: each resume and scale is one. What each did, and what the job did over all of them.

starts.json holds a list, oldest first; the last entry is the running start's, and its clock. A summary has the list as
`starts` and the totals as `job`; every other figure of a summary is the last start's, except its steps, samples,
recoveries and tables, which are the job's."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from shardkeep.base.files import atomic_write
from shardkeep.records.lines import newest
from shardkeep.records.record import added
from shardkeep.records.training import Progress

Record = Mapping[str, Any]
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_DONE = ("samples_per_s", "step_ms", "bytes")
_KEYS = {"began", "from_step", "from_samples"}


class Starts:
    """The starts of the run in one folder. Several processes may read; the owner of the folder writes."""

    def __init__(self, run: Path) -> None:
        self._path, self._metrics = run / "starts.json", run / "metrics.jsonl"

    def begin(self, *, step: int = 0, samples: int = 0, summary: Record | None = None) -> None:
        """Another start begins at a step of the job, after `samples` samples. `summary`: of the start before; None =
        there was none. Raises OSError."""
        known = self._read()
        if known and summary is not None:
            known[-1] = _ended(known[-1], summary)
        now = {"boot": _boot(), "monotonic": time.monotonic()}
        known.append({"began": _time(), "from_step": step, "from_samples": samples, "clock": now})
        atomic_write(self._path, json.dumps(known, indent=1) + "\n")

    def running(self) -> tuple[int, int]:
        """The number of the running start, from 1, and the step where it began."""
        known = self._read()
        return (len(known), int(known[-1]["from_step"])) if known else (1, 0)

    def wall_s(self) -> float | None:
        """Seconds since the running start began, in any process; None = unknown."""
        known = self._read()
        if not known or "clock" not in known[-1]:
            return None
        clock = known[-1]["clock"]
        elapsed_s = time.monotonic() - float(clock["monotonic"])
        if clock["boot"] == _boot() and elapsed_s >= 0.0:  # a clock that another process can read, too
            return elapsed_s
        return max(0.0, _seconds(known[-1]["began"], _time()))

    def reached(self) -> dict[str, int]:
        """Steps and samples of the job, as far as its records tell."""
        known = self._read()
        first: Record = known[-1] if known else {"from_step": 0, "from_samples": 0, "began": ""}
        last = self._last(first)
        return {
            "steps": int(first["from_step"]) if last.step is None else last.step,
            "samples": int(first["from_samples"]) if last.samples is None else last.samples,
        }

    def totals(self, summary: Record) -> dict[str, Any]:
        """`starts` and `job` of the summary of the last start."""
        known = self._read() or [{"began": None, "from_step": 0, "from_samples": 0}]
        starts = [*known[:-1], _ended(known[-1], summary)]
        shown = [
            {key: value for key, value in start.items() if key not in ("clock", "from_samples")} for start in starts
        ]
        return {"starts": shown, "job": _job(summary, starts)}

    def killed(self) -> dict[str, Any] | None:
        """What a summary would say of the last start, which ended without one; None = there was no start."""
        if not (known := self._read()):
            return None
        last = self._last(known[-1])
        told: dict[str, Any] = {key: last.to_dict()[key] for key in ("samples_per_s", "step_ms") if key in last.keys}
        wall_s = max(0.0, _seconds(known[-1]["began"], last.time)) if last.time else 0.0
        return {**self.reached(), "wall_s": wall_s, **told}

    def _last(self, start: Record) -> Progress:
        """The last record of progress since a start; empty = none."""
        last = newest(self._metrics, Progress)
        return last if last is not None and (last.time or "") >= str(start["began"] or "") else Progress()

    def _read(self) -> list[dict[str, Any]]:
        """[] where the file is missing or damaged: only figures depend on it."""
        with contextlib.suppress(FileNotFoundError, ValueError, RecursionError):
            found = json.loads(self._path.read_text(encoding="utf-8"))
            if isinstance(found, list) and all(isinstance(start, dict) and start.keys() >= _KEYS for start in found):
                return found
        return []


def _ended(start: Record, summary: Record) -> dict[str, Any]:
    """The entry of a start that is over."""
    done = {key: summary.get(key) or None for key in _DONE}
    if not (done["bytes"] or {}).get("total"):
        done["bytes"] = None  # nobody counted them
    return {key: value for key, value in start.items() if key != "clock"} | {
        "to_step": summary.get("steps", start["from_step"]),
        "status": summary.get("status"),
        **({"message": summary.get("message")} if summary.get("status") == "failed" else {}),
        "samples": max(0, int(summary.get("samples") or 0) - int(start["from_samples"])),
        "wall_s": summary.get("wall_s", 0.0),
        **done,
    }


def _job(summary: Record, starts: Sequence[Record]) -> dict[str, Any]:
    """Totals over all starts. Rates are means over the starts that have one, by their samples or steps."""
    rated = [start for start in starts if start.get("samples_per_s") and start["samples"]]
    seconds = sum(start["samples"] / start["samples_per_s"] for start in rated)
    timed = [start for start in starts if start.get("step_ms") and start["to_step"] > start["from_step"]]
    counted = [start for start in starts if start.get("bytes")]
    return {
        "starts": len(starts),
        "steps": summary.get("steps", 0),
        "samples": summary.get("samples", 0),
        "wall_s": sum(start["wall_s"] for start in starts),
        "samples_per_s": sum(start["samples"] for start in rated) / seconds if seconds else 0.0,
        "step_ms": _mean([(start["step_ms"], start["to_step"] - start["from_step"]) for start in timed]),
        "bytes": _bytes(counted),
        "bytes_unknown_of_starts": len(starts) - len(counted),
        "recoveries": len(summary.get("recoveries") or ()),
    }


def _mean(parts: Sequence[tuple[Record, int]]) -> dict[str, float]:
    """The mean of step times, part by part, by numbers of steps."""
    weight = sum(steps for _, steps in parts)
    names = dict.fromkeys(name for times, _ in parts for name in times)
    return {name: round(sum(times.get(name, 0.0) * steps for times, steps in parts) / weight, 4) for name in names}


def _bytes(starts: Sequence[Record]) -> dict[str, Any]:
    """The sums of the starts' bytes, with `per_sample` as a summary has it: without evaluations' reads. `fp32` is there
    if all starts have it."""
    total: dict[str, Any] = functools.reduce(added, (start["bytes"] for start in starts), {})
    if not total:
        return {}
    if not all(start["bytes"].get("fp32") for start in starts):
        total.pop("fp32", None)
    read, samples = total.get("read") or {}, sum(start["samples"] for start in starts)
    training = total["total"] - (sum(read.values()) if isinstance(read, Mapping) else read)
    return total | {"per_sample": training / samples if samples else 0.0}


def _boot() -> str:
    """Names the time since the machine was started; empty where the system does not tell."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _time() -> str:
    return datetime.now().isoformat(timespec="milliseconds")


def _seconds(begin: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()

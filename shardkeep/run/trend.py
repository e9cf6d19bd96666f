"""The figures of a running job that need earlier records: how its quality changes, and the time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

Record = Mapping[str, Any]


class Trend:
    """The last evaluation and its change: `AUC 0.7812 (+0.0031)`.

    Shows one metric: the first of `names` that evaluations have, of the first label if there are several. A job
    without evaluation shows that of progressive validation.

    Args:
        names: How metrics are called, in order of preference.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._key = ""
        self._evaluates = False
        self._values: tuple[float, ...] = ()

    def hear(self, record: Record) -> None:
        """Takes one record of metrics.jsonl of any kind."""
        evaluation = record.get("kind") == "eval"
        if not evaluation and (self._evaluates or record.get("phase") != "progressive"):
            return
        if evaluation and not self._evaluates:
            self._evaluates, self._key, self._values = True, "", ()
        self._key = self._key if self._key in record else next(self._keys(record), "")
        if isinstance(value := record.get(self._key), float | int):  # an AUC of one class has no value
            self._values = (*self._values[-1:], float(value))

    @property
    def text(self) -> str:
        """Empty before the first evaluation; without a change after it."""
        if not self._values:
            return ""
        metric, slash, label = self._key.partition("/")
        change = f" ({self._values[1] - self._values[0]:+.4f})" if len(self._values) > 1 else ""
        return f"{self._names[metric]}{slash}{label} {self._values[-1]:.4f}{change}"

    def _keys(self, record: Record) -> Iterator[str]:
        """Yields the keys of metrics, the preferred one first."""
        for name in self._names:
            yield from (key for key in record if key.partition("/")[0] == name)


class TimeLeft:
    """The seconds until the last step, by the mean step since the first record.

    Evaluations and checkpoints count, because the next steps have them, too. Early stopping may end a job sooner.

    Args:
        clock: Returns seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[int, float] | None = None

    def seconds(self, step: int, total: int) -> float | None:
        """Takes note that `step` of `total` steps are done. None = not known yet."""
        now = self._clock()
        if self._first is None or step < self._first[0]:  # the job went back behind it
            self._first = step, now
        steps, elapsed_s = step - self._first[0], now - self._first[1]
        return None if not (steps and total) else max(0, total - step) * elapsed_s / steps


def time_left_s(progress: Record, step_s: float | None = None) -> float | None:
    """Seconds until the last step after a record of progress.

    `step_s`: mean seconds of a step; None = as the record's samples a second say, without evaluations."""
    step, total = int(progress.get("step") or 0), int(progress.get("total_steps") or 0)
    samples, rate = progress.get("samples"), progress.get("samples_per_s")
    if step_s is None and step and samples and rate:
        step_s = samples / step / rate
    return float(max(0, total - step) * step_s) if step_s and step and total else None


def step_text(progress: Record) -> str:
    """`1,200/5,000`; only the first number where nobody knows the last step, as in a loop of the user's own."""
    total = progress.get("total_steps")
    return f"{int(progress.get('step') or 0):,}" + ("" if total is None else f"/{int(total):,}")


def speed_text(progress: Record) -> str | None:
    """`2,133 samples/s`, or steps a second where nobody knows the samples; None = neither is known."""
    if (rate := progress.get("samples_per_s")) is not None or "total_steps" in progress:
        return f"{rate or 0:,.0f} samples/s"
    total_ms = (progress.get("step_ms") or {}).get("total")
    return f"{1e3 / total_ms:,.1f} steps/s" if total_ms else None


def clock_text(seconds: float) -> str:
    """`0:01:02`."""
    return str(timedelta(seconds=round(seconds)))

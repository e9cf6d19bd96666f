"""Merging of telemetry records: two records of one process that follow each other become one that covers both.

Counts so far and figures of now are those of the second. Means over the time since the last record are weighted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Record = dict[str, Any]
Pair = tuple[Any, Any]


def requests_of(record: Mapping[str, Any]) -> float:
    """Pulls and pushes so far, in the record of a server; 0 in others."""
    return number(record.get("pulls")) + number(record.get("pushes"))


def merged(first: Record, second: Record, *, requests_before: float = 0.0) -> Record:
    """One record with the time and the counts of `second`, and with means over the time of both.

    `requests_before`: `requests_of` the record before `first`; 0 = the process began after it."""
    steps = number(first.get("steps")), number(second.get("steps"))
    seconds = steps[0] * _step_ms(first), steps[1] * _step_ms(second)
    requests = requests_of(first) - requests_before, requests_of(second) - requests_of(first)
    found = dict(second)

    def take(key: str, value: Any) -> None:
        if key in second:
            found[key] = value

    take("every_s", round(number(first.get("every_s")) + number(second.get("every_s")), 3))
    take("steps", int(sum(steps)))
    take("loss", _loss((first.get("loss"), second.get("loss")), steps))
    take("samples_per_s", _mean((first.get("samples_per_s"), second.get("samples_per_s")), seconds, digits=3))
    take("step_ms", _means((first.get("step_ms"), second.get("step_ms")), steps))
    take("wait_ms", _means((first.get("wait_ms"), second.get("wait_ms")), steps))
    take("request_ms", _mean((first.get("request_ms"), second.get("request_ms")), requests, digits=4))
    return found


def number(value: Any) -> float:
    """`value` where it is a number, else 0."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def _step_ms(record: Mapping[str, Any]) -> float:
    parts = record.get("step_ms")
    return number(parts.get("total")) if isinstance(parts, Mapping) else 0.0


def _loss(losses: Pair, steps: Sequence[float]) -> float | None:
    """None = there was no step, or a loss of one of the records was not finite."""
    if any(done and loss is None for loss, done in zip(losses, steps, strict=True)):
        return None
    return _mean(losses, steps, digits=6)


def _mean(values: Pair, weights: Sequence[float], *, digits: int) -> float | None:
    """The weighted mean of the values that are there; without a weight the second one."""
    known = [(value, max(weight, 0.0)) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = sum(weight for _, weight in known)
    if not total:
        return None if values[1] is None else number(values[1])
    return round(sum(number(value) * weight for value, weight in known) / total, digits)


def _means(parts: Pair, weights: Sequence[float]) -> dict[str, float | None]:
    """Weighted means by name. A name that one side lacks is 0 there."""
    one, other = (part if isinstance(part, Mapping) else {} for part in parts)
    names = dict.fromkeys([*one, *other])
    return {name: _mean((one.get(name, 0.0), other.get(name, 0.0)), weights, digits=4) for name in names}

"""`--over KEY=VALUES`: the keys of a job that an experiment varies, and their values, in the language of `--set`."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardkeep.base.errors import ConfigError
from shardkeep.base.yaml_text import YamlError, read_yaml

_RANGE = re.compile(r"(log:)?([^\s,\[\]]+?)\.\.([^\s,\[\]]+)")


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`: whole numbers if both are whole. `log`: drawn by their logarithm."""

    low: float
    high: float
    log: bool = False

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def __str__(self) -> str:
        return f"{'log:' if self.log else ''}{self.low}..{self.high}"


Values = tuple[str, ...] | Range
"""The values of a key: a range, or texts of YAML as a shell has them."""
Space = Mapping[str, Values]


def read_over(over: Sequence[str], *, lists: str = "") -> dict[str, Values]:
    """The values of each key. Raises ConfigError: a text is wrong, names a key twice, or has no end of values where an
    option `lists` allows lists alone."""
    space: dict[str, Values] = {}
    for text in over:
        key, values = _parsed(text)
        if space.setdefault(key, values) != values:
            raise ConfigError(f"--over {text}: names a key twice")
        if lists and isinstance(values, Range):
            raise ConfigError(f"--over {text}: has no end of values for {lists}; allowed: KEY=A,B,C")
    return space


def combinations(space: Space) -> Iterator[dict[str, Any]]:
    """Every combination of values; none if a range has fractions."""
    lists: list[Any] = [
        values if isinstance(values, tuple) else range(int(values.low), int(values.high) + 1) if values.whole else ()
        for values in space.values()
    ]
    return (dict(zip(space, point, strict=True)) for point in itertools.product(*lists))


def text_of(value: Any) -> str:
    """A value as a shell has it."""
    whole = isinstance(value, float) and value.is_integer()
    return value if isinstance(value, str) else json.dumps(int(value) if whole else value)


def _parsed(text: str) -> tuple[str, Values]:
    """The key and the values of KEY=VALUES. Raises ConfigError."""
    key, _, values = text.partition("=")
    try:
        if not (key and values):
            raise ValueError("is not of the form KEY=A,B,C, KEY=LOW..HIGH or KEY=log:LOW..HIGH")
        if (found := _RANGE.fullmatch(values)) is None:
            return key, tuple(dict.fromkeys(map(text_of, read_yaml(f"[{values}]"))))
        log, *ends = found.groups()
        number = int if all(end.lstrip("+-").isdecimal() for end in ends) else float
        low, high = map(number, ends)
        if low > high or (log and low <= 0):
            raise ValueError("allowed: LOW up to HIGH, and with log: above 0")
        return key, Range(low, high, bool(log))
    except (ValueError, YamlError) as error:
        raise ConfigError(f"--over {text}: {error}") from error

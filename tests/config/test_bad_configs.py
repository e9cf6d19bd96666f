"""Wrong configs: a list of hand-written ones, and some hundreds that are made from the models' schema, so that a new
setting is covered from its first day."""

from __future__ import annotations

import itertools
import random
import re
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from shardkeep.base.errors import ConfigError
from shardkeep.config import JobConfig, parse_config
from shardkeep.config.schema import Schema, branches, schema_of
from tests.support.bad_configs import BAD, MULTIPLY
from tests.support.cases import every

FOREIGN = re.compile(
    r"Traceback|<class|Input should be|discriminator|pydantic|yaml\.|object at 0x|function-|validator|\[key\]|\$defs"
    r"|\b(None|NoneType|True|False|dict|str|int|float|bool|[A-Za-z]*Error)\b"
)
"""Words of Python, pydantic and PyYAML."""
LIMIT_S = 5.0
MOST_BYTES = 100_000_000
ODD: tuple[Any, ...] = (
    None, True, "no-such-word", "", "a\0b", "\u202e\U0001f600\u00e9 \n", "x" * 5_000, -1, 0.5, float("nan"),
    float("-inf"), 2**64, 1e-320, [], [[[None]], {"a": 1}], {}, {"no_such_key": {"name": "adam"}}, {1: 2}, ["x"] * 60,
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """One setting: its keys, and the kind of its group, where that has one."""

    keys: tuple[str | int, ...]
    kind: str | None
    known: bool = True
    """False: no model has this key."""

    def text(self, value: Any) -> str:
        """The YAML of a job that has `value` here."""
        *above, last = self.keys
        raw: Any = {last: value} if self.kind is None else {"name": self.kind, last: value}
        if isinstance(last, int):
            raw = [value]
        for key in reversed(above):
            raw = [raw] if isinstance(key, int) else {key: raw}
        return yaml.safe_dump(raw, allow_unicode=True, sort_keys=False)


def inputs(values_per_place: int) -> Iterator[tuple[Place, str]]:
    """Configs with odd values at every setting of a job and at an unknown one in each group, all values in turn."""
    values, schema = itertools.cycle(ODD), schema_of(JobConfig)
    for place in _below(schema, schema["$defs"], ()):
        for value in itertools.islice(values, values_per_place if place.known else 1):
            yield place, place.text(value)


def _below(schema: Schema, definitions: Schema, keys: tuple[str | int, ...]) -> Iterator[Place]:
    for branch in branches(schema, definitions):
        properties = branch.get("properties", {})
        kind = properties.get("name", {}).get("const")
        for key, below in properties.items():
            if kind is None or key != "name":
                yield Place((*keys, key), kind)
                yield from _below(below, definitions, (*keys, key))
        if properties:
            yield Place((*keys, f"{next(iter(properties))}_x"), kind, known=False)
        if isinstance(branch.get("additionalProperties"), Mapping):
            yield from _below(branch["additionalProperties"], definitions, (*keys, "some"))
        if isinstance(branch.get("items"), Mapping):
            yield Place((*keys, 0), None)
            yield from _below(branch["items"], definitions, (*keys, 0))


def refused(text: str, *settings: str) -> str | None:
    """The error that a user gets; None if the config is accepted. Fails if it is no plain lines, or takes long."""
    began = time.process_time()
    try:
        config = parse_config(text, settings)
    except ConfigError as error:
        assert error.exit_code == 2
        message = str(error)
    else:
        assert parse_config(config.to_yaml()) == config, "what is accepted can be written and read again"
        return None
    assert time.process_time() - began < LIMIT_S
    lines = message.splitlines()
    assert 0 < len(lines) <= 21
    for line in lines:
        assert line.isprintable() and 20 < len(line) < 500, line
        assert not FOREIGN.search(re.sub(r"'[^']*'", "", line)), line
    return message


@every("bad", BAD)
def test_a_wrong_config_is_told_in_plain_lines(bad: tuple[str, ...]) -> None:
    text, says, *settings = bad
    message = refused(text, *settings)
    assert message is not None and says in message


@pytest.mark.parametrize(("values_per_place", "stride"), [(1, 3), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_odd_values_of_every_setting_are_refused_in_plain_lines_or_accepted(values_per_place: int, stride: int) -> None:
    """By default one value of every third setting, else three of each."""
    cases = list(inputs(values_per_place))[::stride]
    assert len(cases) > 200
    wrong = 0
    for place, text in cases:
        message = refused(text)
        if message is not None:
            wrong += 1
            assert any(key in message for key in place.keys if isinstance(key, str)), f"{text:.200}: {message}"
        else:
            assert place.known, f"{text}: an unknown key is accepted"
    assert wrong > len(cases) / 2


def test_several_odd_settings_at_once_are_told_at_once_and_cut_to_a_screen() -> None:
    texts = [text for place, text in inputs(1) if len(place.keys) > 1 and not place.known]
    chosen = {text.split(":")[0]: text for text in random.Random(7).sample(texts, len(texts))}
    message = refused("".join(chosen.values()))
    assert message is not None and len(message.splitlines()) >= min(len(chosen), 20)
    message = refused("".join(f"unknown{k}: 1\n" for k in range(50)))
    assert message is not None and message.splitlines()[-1] == "config: and 30 more problems"


def test_a_config_that_would_multiply_costs_little_memory() -> None:
    tracemalloc.start()
    try:
        for text, says in MULTIPLY:
            with pytest.raises(ConfigError, match=re.escape(says)):
                parse_config(text)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()

"""Wrong configs: a list of hand-written ones, and some hundreds that are made from the models."""

from __future__ import annotations

import random
import re
import time
import tracemalloc

import pytest

from shardkeep.base.errors import ConfigError, UserError
from shardkeep.config import parse_config
from tests.support.bad_configs import BAD, Bad
from tests.support.cases import every
from tests.support.config_inputs import inputs

FOREIGN = re.compile(
    r"Traceback|<class|Input should be|discriminator|pydantic|yaml\.|object at 0x|function-|validator|\[key\]|\$defs"
    r"|\b(None|NoneType|True|False|dict|str|int|float|bool|[A-Za-z]*Error)\b"
)
"""Words of Python, pydantic and PyYAML."""
LIMIT_S = 5.0
MOST_BYTES = 100_000_000
MULTIPLIES = re.compile(r"laughs|alias|deep|merge|10-|2-64|65537")


def refused(text: str, settings: tuple[str, ...] = ()) -> str | None:
    """The error that a user gets; None if the config is accepted. Fails if it is no plain lines, or takes long."""
    began = time.process_time()
    try:
        config = parse_config(text, settings)
    except ConfigError as error:
        assert isinstance(error, UserError) and error.exit_code == 2
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


@every("bad", BAD, ids=lambda bad: bad.name)
def test_a_wrong_config_is_told_in_plain_lines(bad: Bad) -> None:
    message = refused(bad.text, bad.settings)
    assert message is not None and bad.says in message


@pytest.mark.parametrize(("values_per_place", "stride"), [(1, 2), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_odd_values_of_every_setting_are_refused_in_plain_lines_or_accepted(values_per_place: int, stride: int) -> None:
    """By default one value of every second setting, else three of each."""
    cases = list(inputs(values_per_place))[::stride]
    assert len(cases) > 400
    names = set()
    for name, place, text in cases:
        message = refused(text)
        if message is not None:
            names.add(name)
            assert any(key in message for key in place.keys if isinstance(key, str)), f"{name}: {message}"
        else:
            assert place.known, f"{name}: an unknown key is accepted"
    assert len(names) > len(cases) / 2, "most of them are wrong"


def test_several_odd_settings_at_once_are_told_at_once() -> None:
    draw = random.Random(7)
    texts = [text for _, place, text in inputs(1) if len(place.keys) > 1 and not place.known]
    chosen = {text.split(":")[0]: text for text in draw.sample(texts, len(texts))}
    message = refused("".join(chosen.values()))
    assert message is not None
    assert len(message.splitlines()) >= min(len(chosen), 20)


def test_a_config_that_would_multiply_costs_little_memory() -> None:
    tracemalloc.start()
    try:
        for bad in (bad for bad in BAD if MULTIPLIES.search(bad.name)):
            with pytest.raises(ConfigError):
                parse_config(bad.text, bad.settings)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def test_what_is_wrong_twenty_times_is_cut_to_a_screen() -> None:
    message = refused("".join(f"unknown{k}: 1\n" for k in range(50)))
    assert message is not None and message.splitlines()[-1] == "config: and 30 more problems"

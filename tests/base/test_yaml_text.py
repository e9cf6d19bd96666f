"""Scalars of the YAML reader: the core schema of YAML 1.2; what YAML 1.1 reads as another number is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shardkeep.base.yaml_text import YamlError, read_yaml, write_yaml
from shardkeep.config import parse_config
from tests.support.cases import every

VALUES: dict[str, Any] = {
    "yes": "yes", "No": "No", "on": "on", "OFF": "OFF", "y": "y", "n": "n",
    "true": True, "True": True, "FALSE": False, "~": None, "": None, "null": None, "none": "none",
    "0": 0, "-7": -7, "+7": 7, "0o10": 8, "0x1F": 31,
    "1e3": 1000.0, "1E-3": 0.001, "-1e+2": -100.0, "1.": 1.0, ".5": 0.5, "01.5": 1.5, ".inf": float("inf"),
    "2026-01-02": "2026-01-02", "127.0.0.1:80": "127.0.0.1:80", "1:2:x": "1:2:x", "1e": "1e", "=": "=", "_1": "_1",
    "'010'": "010", '"1:30"': "1:30", "'1e3'": "1e3",
}  # fmt: skip
AMBIGUOUS = {
    "010": "010 is 8 in YAML 1.1 and 10 in YAML 1.2; write 8 or 10, or '010' in quotes for a text",
    "-010": "-010 is -8 in YAML 1.1 and -10 in YAML 1.2; write -8 or -10, or '-010' in quotes for a text",
    "08": "08 is text in YAML 1.1 and 8 in YAML 1.2; write 8, or '08' in quotes for a text",
    "1_000": "1_000 is 1000 in YAML 1.1 and text in YAML 1.2; write 1000, or '1_000' in quotes for a text",
    "1_0.5": "1_0.5 is 10.5 in YAML 1.1 and text in YAML 1.2; write 10.5, or '1_0.5' in quotes for a text",
    "0b11": "0b11 is 3 in YAML 1.1 and text in YAML 1.2; write 3, or '0b11' in quotes for a text",
    "1:30": "1:30 is 90 in YAML 1.1 and text in YAML 1.2; write 90, or '1:30' in quotes for a text",
    "1:30.5": "1:30.5 is 90.5 in YAML 1.1 and text in YAML 1.2; write 90.5, or '1:30.5' in quotes for a text",
}


@every(("text", "value"), VALUES.items(), ids=lambda value: repr(value))
def test_a_scalar_is_what_yaml_1_2_says(text: str, value: Any) -> None:
    for found in (read_yaml(text), read_yaml(f"[{text or '~'}]")[0], next(iter(read_yaml(f"{text or '~'}: 1")))):
        assert (type(found), found) == (type(value), value)


@every(("text", "says"), AMBIGUOUS.items(), ids=AMBIGUOUS)
def test_a_number_that_versions_read_differently_is_refused_by_name(text: str, says: str) -> None:
    for line, document in ((1, text), (2, f"\n- {text}"), (1, f"{{a: {text}}}"), (1, f"{{{text} : 1}}")):
        with pytest.raises(YamlError) as caught:
            read_yaml(document)
        assert str(caught.value) == f"line {line}: {says}"


@every("text", ["!!bool yes", "!!int 1_000", "!!str 010", "! 1", "!mine {a: 1}", "&a 1", "[&a {}]", "*a", "{<<: *a}"])
def test_tags_anchors_and_aliases_are_refused(text: str) -> None:
    with pytest.raises(YamlError, match=r"^line 1: .*not allowed; "):
        read_yaml(text)


@every("text", [text for text in (*VALUES, *AMBIGUOUS) if not text.startswith(("'", '"'))])
def test_every_text_is_written_so_that_both_versions_read_it_as_text(text: str) -> None:
    once = [text]
    assert read_yaml(write_yaml({text: once, "again": once})) == {text: once, "again": once}, "no alias is written"


def test_exponents_and_bare_words_are_what_they_look_like() -> None:
    text = "{train: {batch_size: 1e3, clip_norm: 1e-2}, recovery: {journal: off}, tower: {compile: on, amp: off}}"
    config = parse_config(text)
    assert (config.train.batch_size, config.train.clip_norm) == (1000, 0.01)
    assert (config.recovery.journal, config.tower.compile, config.tower.amp) == ("off", "on", "off")
    assert parse_config(config.to_yaml()) == config


MARKS = [
    "a", "1", "012", "yes", "~", ": ", ":", "- ", "-", "\n", "\n  ", " ", ",", "[", "]", "{", "}", "'", '"', "# ", " #",
    "=", "*", "&", "!", "%", "?", "'?'", "...", "---", "\\n", "<<", "|", ">", "|-", ">+", "2", "\u00e9", "\U0001f600",
]  # fmt: skip


def value_of(text: str) -> str:
    try:
        return repr(read_yaml(text))
    except YamlError:
        return "refused"


def test_libyaml_reads_what_pyyaml_reads() -> None:
    """A tab, in a comment behind the text, keeps libyaml out."""
    chance = random.Random(1)
    for _ in range(2_000):
        text = "".join(chance.choices(MARKS, k=chance.randint(1, 12))) + "\n"
        assert value_of(text) == value_of(f"{text}#\t\n"), text

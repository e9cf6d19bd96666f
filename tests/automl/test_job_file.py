"""The YAML that `init` writes: it reads back as the settings, with comments behind their keys."""

from __future__ import annotations

from typing import Any

from shardkeep.automl.job_file import yaml_with_notes
from shardkeep.base.yaml_text import read_yaml
from tests.support.cases import every


@every(
    "settings",
    [
        {"name": "a: b", "data": {"sparse": [f"column {n}" for n in range(30)], "missing": ["", "?", "NaN", "0x1"]}},
        {
            "data": {
                "dense": [{"column": "yes", "width": 3}, "#x", "a: b"] * 20,
                "label": {"column": "y", "positive": ["1"]},
            }
        },
        {"tables": {"default": {}, "a" * 90: {"dim": 4}}, "train": {}},
    ],
    ids=lambda settings: ", ".join(settings),
)
def test_the_text_reads_back_as_the_settings(settings: dict[str, Any]) -> None:
    assert read_yaml(yaml_with_notes(settings, {})) == settings


def test_comments_stand_behind_their_keys() -> None:
    text = yaml_with_notes(
        {"data": {"dense": ["a", "b"], "time": "t"}}, {("data", "dense", "b"): "why", ("data",): "all"}
    )
    assert [line.split("# ")[-1] for line in text.splitlines() if "#" in line] == ["all", "why"]
    assert read_yaml(text) == {"data": {"dense": ["a", "b"], "time": "t"}}

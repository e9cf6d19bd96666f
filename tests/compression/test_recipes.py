"""The shipped recipes: that they are settings a job takes, and say what their names promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from shardkeep.compression.recipes import BASELINES, RECIPES
from shardkeep.config import JobConfig
from shardkeep.config.overrides import flat


def test_the_recipes_that_the_documents_name_are_jobs_and_say_the_whole_of_compression() -> None:
    assert list(RECIPES) == ["fp32", "fp16", "safe", "balanced", "extreme", "topk-naive", "dgc"]
    assert BASELINES == ("fp32", "fp16")
    for name, recipe in RECIPES.items():
        assert name == recipe.name and recipe.purpose
        others = {"dgc": {"tables"}}.get(name, set())  # plain sgd, which it is defined for
        assert set(recipe.settings) == {"compression"} | others, name
        job = JobConfig.model_validate(recipe.settings)
        assert (job == JobConfig()) == (name == "fp32"), "the baseline compresses nothing"


def settings_table() -> str:
    """A line for each key that a recipe sets, a column for each recipe, as docs/guide/compression.md has it."""
    named = {name: flat(recipe.settings) for name, recipe in RECIPES.items() if name != "fp32"}
    keys = sorted({key for settings in named.values() for key in settings})
    rows = [("key", *(f"`{name}`" for name in named)), ("---",) * (len(named) + 1)]
    for key in keys:
        values = [str(value).lower() if (value := s.get(key, "")) is True else str(value) for s in named.values()]
        rows.append((f"`{key.removeprefix('compression.')}`", *values))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def test_the_page_shows_every_recipe_s_settings_and_purpose() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "guide" / "compression.md").read_text(encoding="utf-8")
    assert settings_table() in page
    assert not [recipe.name for recipe in RECIPES.values() if f"\n| `{recipe.name}` | {recipe.purpose} |\n" not in page]


def test_recipes_load_no_torch_and_the_config_neither_torch_nor_numba() -> None:
    code = """
import sys, shardkeep.compression.recipes
assert not {"torch", "numba", "numpy"} & set(sys.modules)
import shardkeep.compression.config
assert not {"torch", "numba"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)

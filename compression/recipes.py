"""Recipes: named settings that trade bytes for AUC. Data only; knows no codec and loads no torch.

A recipe is all of `compression` and any other setting of a job that it needs. docs/guide/compression.md gives reasons
for the settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BASELINES = ("fp32", "fp16")
"""In every comparison: AUC losses and byte ratios are against the first."""

_POOL_ROWS = 200_000
_WARMUP_STEPS = 5


@dataclass(frozen=True)
class Recipe:
    """One recipe."""

    name: str
    purpose: str
    """One line for a person: what it does, not what it costs, which depends on data and model."""
    settings: Mapping[str, Any]
    """Nested settings of a job; `compression` is always among them."""


_PULL = {"values": "int4", "scale": "fp16", "cache_rows": _POOL_ROWS, "lease": 16, "drift": 0.05}
_TOPK_TOWER = {"name": "topk", "keep": 0.01, "warmup_steps": _WARMUP_STEPS}


def _push(values: str, **others: Any) -> dict[str, Any]:
    """Rounded rows whose error is sent later."""
    return {"values": values, "scale": "pow2", "pool_rows": _POOL_ROWS, "second_moment": True, **others}


def _powersgd(rank: int, warmup_steps: int = _WARMUP_STEPS) -> dict[str, Any]:
    return {"name": "powersgd", "rank": rank, "values": "fp16", "warmup_steps": warmup_steps}


def _recipe(name: str, purpose: str, *, tables: Mapping[str, Any] | None = None, **compression: Any) -> Recipe:
    return Recipe(name, purpose, {"compression": compression} | ({} if tables is None else {"tables": tables}))


_TOP_K = {"select": "top_k", "keep": 0.01, "warmup_steps": _WARMUP_STEPS, "pool_rows": _POOL_ROWS}
_DGC = {"name": "shardkeep.examples.compression.dgc:Dgc", "options": {"momentum": 0.9}}

RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _recipe("fp32", "values in 32 bits, ids in 64; the baseline"),
        _recipe(
            "fp16",
            "values in half precision; the second baseline",
            push={"values": "fp16"},
            pull={"values": "fp16"},
            tower={"name": "fp16"},
        ),
        _recipe(
            "safe",
            "pushes in 4 bits whose rounding errors are sent later, pulls in 8 bits, PowerSGD of rank 6",
            ids="coded",
            push=_push("int4"),
            pull={"values": "int8", "scale": "pow2"},
            tower=_powersgd(6),
        ),
        _recipe(
            "balanced",
            "a quarter of a step's rows in 2 bits, the rest later; pulls in 4 bits, cached; PowerSGD of rank 4",
            ids="coded",
            push=_push("int2", keep=0.25, warmup_steps=2 * _WARMUP_STEPS),
            pull=_PULL,
            tower=_powersgd(4),
        ),
        _recipe(
            "extreme",
            "7 % of a step's rows in 2 bits, the rest later; pulls in 4 bits, cached for longer; PowerSGD of rank 1",
            ids="coded",
            push=_push("int2", keep=0.07, warmup_steps=_WARMUP_STEPS),
            pull={**_PULL, "lease": 64, "drift": 0.1},
            tower=_powersgd(1, warmup_steps=1),
        ),
        _recipe(
            "topk-naive",
            "opponent: element top-k with a residual, as GRACE does it; pulls as in balanced",
            ids="coded",
            push=_TOP_K,
            pull=_PULL,
            tower=_TOPK_TOWER,
        ),
        _recipe(
            "dgc",
            "opponent: deep gradient compression, which needs sgd on the servers; pulls as in balanced",
            ids="coded",
            push={**_TOP_K, "select": _DGC},
            pull=_PULL,
            tower=_TOPK_TOWER,
            tables={"default": {"optimizer": {"name": "sgd", "lr": 10.0}}},
        ),
    )
}
"""Every shipped recipe by name."""
LEFT = {
    "lossless": "make it one of your own with compression: "
    "{ids: coded, tower: shardkeep.examples.compression.lossless:Lossless}"
}
"""Recipes that were removed, and the way out."""

"""Settings of a table's policies: which new ids become rows, and which rows go."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from shardkeep.base.settings import Settings

BUCKETS = 4096
"""Of placement (ps/placement.py)."""
LEAST_PER_BUCKET = 64
"""Rows of a bucket below which a table's capacity is refused: buckets get more and less than their share."""


class AdmitConfig(Settings):
    """Which new ids become rows. The others read their initial value, and their gradients are dropped and counted."""

    min_count: int = Field(ge=2, le=1_000_000)
    """Applied pushes with an id that make it a row; the last of them trains it."""
    window_steps: int = Field(100_000, ge=1, le=1_000_000_000)
    """Steps after which the count of an id that no push has had is forgotten, when its bucket is looked at."""
    max_candidates: int | None = Field(None, ge=LEAST_PER_BUCKET * BUCKETS, le=1 << 40)
    """Ids that are counted on all servers together, 27 bytes each; beyond it those with the lowest counts are
    forgotten, so that an id may need more pushes. Left out = no limit but window_steps."""


class EvictConfig(Settings):
    """Which rows go. A row's score is the number of applied pushes that had its id, each decayed since its step."""

    ttl_steps: int | None = Field(None, ge=1, le=1_000_000_000)
    """Steps without a push after which a row goes, when its bucket is looked at."""
    ttl_s: float | None = Field(None, ge=1.0, le=1e9)
    """Seconds without a push after which a row goes; not in sync, where no clock decides."""
    max_rows: int | None = Field(None, ge=LEAST_PER_BUCKET * BUCKETS, le=1 << 40)
    """Rows of the table on all servers together. A placement bucket, of 4096, that exceeds its share loses an eighth
    of it, those first that `policy` ranks lowest."""
    policy: Literal["lfu", "lru"] = "lfu"
    """What ranks rows where there are too many: lfu = their score, then their last push; lru = their last push."""
    decay: float = Field(1.0, gt=0.0, le=1.0)
    """Factor of a score for each `decay_steps` steps."""
    decay_steps: int = Field(1000, ge=1, le=1_000_000_000)
    """Steps after which a score has decayed by `decay`."""
    sweep_steps: int = Field(1024, ge=1, le=BUCKETS)
    """Steps in which all buckets are looked at once, an equal share in each step."""

    @model_validator(mode="after")
    def _evicts_something(self) -> EvictConfig:
        if self.ttl_steps is None and self.ttl_s is None and self.max_rows is None:
            raise ValueError("no rule; allowed: ttl_steps, ttl_s or max_rows set")
        if self.ttl_steps is not None and self.ttl_s is not None:
            raise ValueError(f"ttl_steps: {self.ttl_steps} with ttl_s: {self.ttl_s:g}; allowed: one of them")
        if self.ttl_s is not None and (self.decay < 1.0):
            raise ValueError(f"ttl_s: {self.ttl_s:g} with decay: {self.decay:g}; allowed: decay 1, or ttl_steps")
        return self

    @model_validator(mode="after")
    def _uses_what_is_set(self) -> EvictConfig:
        has_capacity = self.max_rows is not None
        users = {
            "policy": (has_capacity, "max_rows"),
            "decay": (has_capacity and self.policy == "lfu", "max_rows with policy: lfu"),
            "decay_steps": (self.decay < 1.0, "decay below 1"),
            "sweep_steps": (self.ttl_steps is not None or self.ttl_s is not None, "ttl_steps or ttl_s"),
        }
        for key, (used, by) in users.items():
            if not used and (value := getattr(self, key)) != type(self).model_fields[key].default:
                raise ValueError(f"{key}: {value} changes nothing here; allowed: {by} beside it, or no {key}")
        return self

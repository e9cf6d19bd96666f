"""Settings of initial values, and the registry of initializers: what a row is before its first gradient.

Imports neither torch nor numba, nor any kernel before it is used.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from shardkeep.base.plugging.plugs import Plug, by_name
from shardkeep.base.settings import FilePath, Named

_KERNELS = "shardkeep.ps.server.table.initializers.initial_kernels"
INITIALIZERS: dict[str, Plug[tuple[set[str], ...], int]] = by_name(
    Plug("uniform", (set(), {"scale"}, {"low", "high"}), f"{_KERNELS}:UNIFORM", (_KERNELS,)),
    Plug("normal", (set(), {"scale"}, {"std"}, {"mean", "std"}), f"{_KERNELS}:NORMAL", (_KERNELS,)),
    Plug("constant", ({"value"},), f"{_KERNELS}:CONSTANT", (_KERNELS,)),
    Plug("file", ({"path"}, {"path", "scale"}, {"path", "low", "high"}), f"{_KERNELS}:UNIFORM", (_KERNELS,)),
    Plug("zeros", (set(),), f"{_KERNELS}:CONSTANT", (_KERNELS,)),
)
"""The `config` of an initializer: the keys that may be set together. The code is its number in the kernel."""


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return (value if value.isprintable() else repr(value))[:100]
    return f"{value:g}"


class InitConfig(Named):
    """Initial value of a row: a counter-based hash of (seed, table, id, column), or a row of a file."""

    name: Literal["uniform", "normal", "constant", "zeros", "file"] = "uniform"
    """uniform from low to high, normal with mean and std, constant, zeros, or file: the rows of a file, and uniform for
    ids that it does not have (docs/guide/tables.md)."""
    scale: float | None = Field(None, gt=0.0, le=1e6)
    """uniform and file: short for low: -scale, high: scale. normal: short for std: scale. Left out = 0.05, unless the
    other keys are set."""
    low: float | None = Field(None, ge=-1e6, le=1e6)
    """uniform and file: the least value."""
    high: float | None = Field(None, ge=-1e6, le=1e6)
    """uniform and file: above every value, up to float32 rounding."""
    mean: float | None = Field(None, ge=-1e6, le=1e6)
    """normal: the mean; left out = 0."""
    std: float | None = Field(None, gt=0.0, le=1e6)
    """normal: the standard deviation."""
    value: float | None = Field(None, ge=-1e6, le=1e6)
    """constant: the value of every element."""
    path: FilePath | None = Field(None, min_length=1)
    """file: a .parquet or .npy file of ids and rows, as `shardkeep tables export` writes it; relative to
    this file."""

    @model_validator(mode="after")
    def _keys_fit_the_name(self) -> InitConfig:
        set_keys = {key: value for key in type(self).model_fields if (value := getattr(self, key)) is not None}
        name, keys = set_keys.pop("name"), INITIALIZERS[self.name].config
        if set_keys.keys() not in keys:
            texts = (f"{key}: {_shown(value)}" for key, value in set_keys.items())
            shown = ", ".join(texts) or "no other key"
            allowed = ", or ".join(" and ".join(sorted(some)) for some in keys if some) or "no other key"
            raise ValueError(f"{shown} with name: {name}; allowed: {allowed}")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low: {self.low:g}, high: {self.high:g}; allowed: low below high")
        return self

    @property
    def parameters(self) -> tuple[float, float]:
        """low and high of uniform, mean and standard deviation of normal; the value of every element, then 0."""
        if self.name in ("constant", "zeros"):
            return self.value or 0.0, 0.0
        scale = 0.05 if self.scale is None else self.scale
        if self.name == "normal":
            return self.mean or 0.0, scale if self.std is None else self.std
        if self.low is None or self.high is None:
            return -scale, scale
        return self.low, self.high

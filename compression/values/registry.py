"""The registry of built-in number formats: their names in the config, their tags on the wire, where their codecs are.

Imports neither torch nor numba, nor any codec before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from shardkeep.base.plugging.own import OwnConfig, built_in_or_own
from shardkeep.base.plugging.plugs import Plug, by_name

if TYPE_CHECKING:
    from shardkeep.compression.values.codec import RowCodec

Scale = Literal["pow2", "fp16"]
Tags = Mapping[Scale | None, int]
"""Tag by kind of row scale, None where a format has no scale. The first kind is the default."""
_SCALED = ("shardkeep.compression.values.scaled_kernels",)

# A tag is never reused; 2 to 8, 15 and 16 are those of formats that left. Built-in tags are below 64: the next bit of
# the byte on the wire has another meaning. The code makes the codec: `make()`, or `make("pow2")` if it has a scale.
FORMATS: dict[str, Plug[Tags, Callable[..., RowCodec]]] = by_name(
    Plug("fp32", {None: 0}, "shardkeep.compression.values.floats:Fp32"),
    Plug("fp16", {None: 1}, "shardkeep.compression.values.floats:Half"),
    Plug("int8", {"pow2": 9, "fp16": 10}, "shardkeep.compression.values.scaled:int8", _SCALED),
    Plug("int4", {"pow2": 11, "fp16": 12}, "shardkeep.compression.values.scaled:int4", _SCALED),
    Plug("int2", {"pow2": 13, "fp16": 14}, "shardkeep.compression.values.scaled:int2", _SCALED),
)
ELEMENTS: Plug[Tags, Callable[..., RowCodec]] = Plug(
    "elements", {None: 17}, "shardkeep.compression.values.elements:Elements"
)
"""Single values of fp32 rows, where a selector sends these."""
PUSH_TAG, PULL_TAG = 128, 129
"""Tags of a job's own codecs, by direction: another plug shifts none. The job's config says which these are."""
_DRAWS = ("shardkeep.compression.values.rounding_kernels",)

if TYPE_CHECKING:
    Values = str | OwnConfig
else:
    Values = built_in_or_own(*FORMATS)
"""A number format in the config."""


def kernels_of(values: Values) -> tuple[str, ...]:
    """The modules of kernels that a format's codec imports."""
    return _DRAWS if isinstance(values, OwnConfig) else FORMATS[values].kernels


def tag_of(values: Values, scale: Scale | None, *, plug: int) -> int:
    """The tag of a format with a kind of row scale, None = its default. `plug`: the tag of a format of the user's own.

    Raises KeyError for a scale that the format does not take."""
    if isinstance(values, OwnConfig):
        return plug
    tags: Any = FORMATS[values].config
    return int(tags[scale or next(iter(tags))])

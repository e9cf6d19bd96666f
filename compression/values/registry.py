"""The registry of number formats: their names in the config, their tags on the wire, and where their codecs are.

To add a format, write a module with a function that makes its codec and add a plug to `FORMATS`: the config takes the
name, and both ends know the tags. Imports neither torch nor numba, nor any codec before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardkeep.base.plugging.plugs import Plug, by_name

if TYPE_CHECKING:
    from shardkeep.compression.values.codec import ValueCodec

Scale = Literal["pow2", "fp16"]


@dataclass(frozen=True, slots=True)
class Format:
    """What is known of a format. It has one tag if it has no row scale, else one for each kind of scale that it takes.
    Raises ValueError for other tags."""

    plain: int | None = None
    """Tag of a format without a row scale."""
    pow2: int | None = None
    """Tag with a scale of one byte."""
    fp16: int | None = None
    """Tag with a scale of two bytes."""

    def __post_init__(self) -> None:
        tags = [tag for tag in (self.plain, self.pow2, self.fp16) if tag is not None]
        both = self.plain is not None and len(tags) > 1
        if not tags or both or len(set(tags)) < len(tags) or not all(0 <= tag < 128 for tag in tags):
            raise ValueError(
                f"plain={self.plain}, pow2={self.pow2}, fp16={self.fp16}; allowed: plain, or one or both "
                "of pow2 and fp16, each a number of its own from 0 to 127"
            )

    @property
    def scaled(self) -> bool:
        return self.plain is None

    @property
    def scales(self) -> tuple[Scale, ...]:
        """Kinds of row scale that it takes; the first is the default."""
        return tuple(scale for scale in self.tags().values() if scale is not None)

    def tags(self) -> dict[int, Scale | None]:
        """Kind of scale by tag."""
        pairs: list[tuple[int | None, Scale | None]] = [(self.plain, None), (self.pow2, "pow2"), (self.fp16, "fp16")]
        return {tag: scale for tag, scale in pairs if tag is not None}


_SCALED = ("shardkeep.compression.values.scaled_kernels",)

# A tag is never reused, and 2 to 8 are those of formats that left. Tags are below 128: the highest bit of the byte on
# the wire has another meaning.
# The code makes the codec: `make(tag=7)`, or `make(tag=7, scale="pow2")` if it has a scale.
FORMATS: dict[str, Plug[Format, Callable[..., ValueCodec]]] = by_name(
    Plug("fp32", Format(plain=0), "shardkeep.compression.values.floats:fp32"),
    Plug("fp16", Format(plain=1), "shardkeep.compression.values.floats:fp16"),
    Plug("int8", Format(pow2=9, fp16=10), "shardkeep.compression.values.scaled:int8", _SCALED),
    Plug("int4", Format(pow2=11, fp16=12), "shardkeep.compression.values.scaled:int4", _SCALED),
    Plug("int2", Format(pow2=13, fp16=14), "shardkeep.compression.values.scaled:int2", _SCALED),
    Plug("sign", Format(pow2=15, fp16=16), "shardkeep.compression.values.scaled:sign", _SCALED),
)

if TYPE_CHECKING:
    ValueFormat = str
else:
    ValueFormat = Literal[tuple(FORMATS)]  # what the config takes

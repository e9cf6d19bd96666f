"""Codecs: the codecs of a job by their tags on the wire, those of `registry` and those of the user's own."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardkeep.base.errors import CorruptMessage
from shardkeep.base.plugging.own import OwnConfig, load_own
from shardkeep.compression.values.checked import CheckedCodec
from shardkeep.compression.values.codec import RowCodec
from shardkeep.compression.values.registry import ELEMENTS, FORMATS, PULL_TAG, PUSH_TAG

if TYPE_CHECKING:
    from shardkeep.compression.config import CompressionConfig


class NamedCodec(NamedTuple):
    name: str
    codec: RowCodec
    packs: bool
    """Whether its packets have a length of their own."""


class Codecs:
    """The codecs of a job, by tag.

    Args:
        compression: Of the job.
        import_from: Folder that is searched last for the module of a plug.

    Raises ConfigError for a plug that cannot be loaded."""

    def __init__(self, compression: CompressionConfig, import_from: Path | None = None) -> None:
        self._own: dict[int, NamedCodec] = {}
        for tag, way, values in (
            (PUSH_TAG, "push", compression.push.values),
            (PULL_TAG, "pull", compression.pull.values),
        ):
            if isinstance(values, OwnConfig):
                own = load_own(values, RowCodec, setting=f"compression.{way}.values", import_from=import_from)
                self._own[tag] = NamedCodec(values.name, CheckedCodec(own), packs(own.plug))

    def __getitem__(self, tag: int) -> NamedCodec:
        """Raises CorruptMessage for an unknown tag."""
        return self._own[tag] if tag in self._own else built_in(tag)


@functools.cache
def built_in(tag: int) -> NamedCodec:
    """The built-in codec of a tag. Raises CorruptMessage for an unknown one."""
    for plug in (*FORMATS.values(), ELEMENTS):
        for scale, own in plug.config.items():
            if own == tag:
                codec = plug.load()(*([] if scale is None else [scale]))
                return NamedCodec(plug.name, codec, packs(codec))
    raise CorruptMessage(f"unknown value format {tag}")


def packs(codec: RowCodec) -> bool:
    """Whether a codec has a `pack` of its own."""
    return getattr(type(codec), "pack", None) is not RowCodec.pack

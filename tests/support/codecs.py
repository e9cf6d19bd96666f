"""Built-in codecs by name, and rows through them."""

from __future__ import annotations

import numpy as np

from shardkeep.compression.values.codec import RowCodec
from shardkeep.compression.values.codecs import built_in
from shardkeep.compression.values.draws import Draws
from shardkeep.compression.values.registry import Scale, tag_of

NONE = np.empty(0, np.int64)


def codec_of(name: str, scale: Scale | None = None) -> RowCodec:
    return built_in(tag_of(name, scale, plug=0)).codec


def draws_of(ids: np.ndarray = NONE, *, table: int = 7, step: int = 3, sender: int = 0) -> Draws:
    return Draws(np.array([table], np.uint64), np.array([ids.size]), ids, step=step, sender=sender)


def encoded(codec: RowCodec, rows_KD: np.ndarray) -> np.ndarray:
    """Encoded rows of a codec that draws nothing."""
    return codec.encode(rows_KD, draws_of())


def there_and_back(codec: RowCodec, rows_KD: np.ndarray) -> np.ndarray:
    return codec.decode(encoded(codec, rows_KD), rows_KD.shape[1])

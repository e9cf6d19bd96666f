"""Texts to ids: XXH3 64-bit of the bytes, seen as int64. The same text is the same id in every table and run.

N = texts, V = distinct texts of the chunk
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import xxhash
from numpy.typing import NDArray


def hash_text(text: bytes) -> int:
    """The id of one text: xxh3_64 with seed 0 (Yann Collet's xxHash), as a signed number."""
    value = xxhash.xxh3_64_intdigest(text)
    return value - 2**64 if value >= 2**63 else value


MISSING_ID = hash_text(b"")
"""The id of a missing value in a single-valued column: one more category."""


def hash_texts(texts_N: pa.Array) -> NDArray[np.int64]:
    """The ids of an Arrow array of texts or bytes; null becomes MISSING_ID. Each distinct text is hashed once."""
    coded = pc.dictionary_encode(texts_N, null_encoding="mask")
    if isinstance(coded, pa.ChunkedArray):
        coded = coded.combine_chunks()
    distinct = coded.dictionary.cast(pa.binary()).to_pylist()
    ids_V = np.array(list(map(xxhash.xxh3_64_intdigest, distinct)), np.uint64).view(np.int64)
    codes_N = pc.fill_null(coded.indices, len(distinct)).to_numpy(zero_copy_only=False)
    ids_N: NDArray[np.int64] = np.append(ids_V, np.int64(MISSING_ID))[codes_N]
    return ids_N

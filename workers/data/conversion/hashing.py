"""Texts to ids: XXH3 64-bit of the bytes, seen as int64. The same text is the same id in every table and run.

N = texts, V = distinct texts of the chunk
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import xxhash
from numpy.typing import NDArray

Digest = Callable[[bytes], int]
"""The unsigned 64 bits of a text."""
_WHOLE_FLOAT = re.compile(rb"(0|-?[1-9][0-9]*)\.0+")

spelled: Digest = xxhash.xxh3_64_intdigest
"""xxh3_64 with seed 0 (Yann Collet's xxHash) of the text as it is written."""


def category(text: bytes) -> int:
    """The digest of a category: `1322.0`, as pandas writes a column of whole numbers with gaps, is the text `1322`."""
    whole = _WHOLE_FLOAT.fullmatch(text) if text.endswith(b"0") else None
    return spelled(text if whole is None else whole[1])


def hash_text(text: bytes, digest: Digest = category) -> int:
    """The id of one text, as a signed number."""
    value = digest(text)
    return value - 2**64 if value >= 2**63 else value


MISSING_ID = hash_text(b"")
"""The id of a missing value in a single-valued column: one more category."""


def hash_texts(texts_N: pa.Array, digest: Digest = category) -> NDArray[np.int64]:
    """The ids of an Arrow array of texts or bytes; null becomes MISSING_ID. Each distinct text is hashed once."""
    coded = pc.dictionary_encode(texts_N, null_encoding="mask")
    if isinstance(coded, pa.ChunkedArray):
        coded = coded.combine_chunks()
    distinct = coded.dictionary.cast(pa.binary()).to_pylist()
    ids_V = np.array(list(map(digest, distinct)), np.uint64).view(np.int64)
    codes_N = pc.fill_null(coded.indices, len(distinct)).to_numpy(zero_copy_only=False)
    ids_N: NDArray[np.int64] = np.append(ids_V, np.int64(MISSING_ID))[codes_N]
    return ids_N


class Spellings:
    """The digests of a column's categories, and whether two of the first 100,000 look like one in two spellings."""

    MOST = 100_000

    def __init__(self) -> None:
        self._first: dict[int, bytes] = {}
        self.pair: tuple[bytes, bytes] | None = None

    def digest(self, text: bytes) -> int:
        """As `category`."""
        found = category(text)
        if self.pair is None and len(self._first) < self.MOST:
            other = self._first.setdefault(spelled(text.lower().lstrip(b"0+") or b"0"), text)
            if other != text and category(other) != found:
                self.pair = (other, text)
                self._first.clear()
        return found

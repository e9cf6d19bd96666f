"""Texts to ids: XXH3 64-bit of the canonical text, seen as int64. A text is the same id in every table and run.

N = texts, V = distinct texts
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import xxhash
from numpy.typing import NDArray

from shardkeep.base.arrays import Ints
from shardkeep.workers.data.conversion.rules import canonical, canonical_texts


def hash_text(text: bytes) -> int:
    """The id of one text, by its canonical form: xxh3_64 with seed 0 (Yann Collet's xxHash), as a signed number."""
    value = xxhash.xxh3_64_intdigest(canonical(text))
    return value - 2**64 if value >= 2**63 else value


MISSING_ID = hash_text(b"")
"""The id of a missing value in a single-valued column: one more category."""


def hash_texts(texts_N: pa.Array, *, spellings: Spellings | None = None) -> Ints:
    """The ids of texts without spaces around them, as of `hash_text`; null becomes MISSING_ID. Each distinct text is
    hashed once, and shown to `spellings`."""
    coded = pc.dictionary_encode(texts_N, null_encoding="mask")
    distinct = canonical_texts(coded.dictionary)
    if spellings is not None:
        spellings.add(distinct)
    ids_V = _digests(distinct).view(np.int64)
    codes_N = pc.fill_null(coded.indices, len(distinct)).to_numpy(zero_copy_only=False)
    ids_N: Ints = np.append(ids_V, np.int64(MISSING_ID))[codes_N]
    return ids_N


def _digests(texts_V: pa.Array) -> NDArray[np.uint64]:
    return np.array(list(map(xxhash.xxh3_64_intdigest, texts_V.cast(pa.binary()).to_pylist())), np.uint64)


class Spellings:
    """Whether two of a column's first 100,000 categories look like one in two spellings."""

    MOST = 100_000

    def __init__(self) -> None:
        self._texts_V: pa.Array | None = None
        self._folded_V = np.empty(0, np.uint64)
        self.pair: tuple[bytes, bytes] | None = None

    def add(self, texts_V: pa.Array) -> None:
        """Takes in texts."""
        if self.pair is not None or len(self._folded_V) >= self.MOST:
            return
        known = self._texts_V if self._texts_V is not None else texts_V.slice(0, 0)
        fresh = pc.unique(texts_V)
        fresh = fresh.filter(pc.invert(pc.is_in(fresh, value_set=known)))
        folded = pc.ascii_ltrim(pc.ascii_lower(fresh), characters="0+")
        self._folded_V = np.concatenate([self._folded_V, _digests(pc.if_else(pc.equal(folded, ""), "0", folded))])
        self._texts_V = pa.concat_arrays([known, fresh])
        order_V = np.argsort(self._folded_V, kind="stable")
        sorted_V = self._folded_V[order_V]
        if (twice := np.flatnonzero(sorted_V[1:] == sorted_V[:-1])).size:
            one, other = (self._texts_V[int(i)].as_buffer().to_pybytes() for i in order_V[twice[0] : twice[0] + 2])
            self.pair = (one, other)

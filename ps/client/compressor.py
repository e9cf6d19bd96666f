"""Compressor: from a step's gradients to the encoded rows that are sent: selection, residuals, number format.

Acts on a worker's sorted unique rows, before they are split among servers, so that the result does not depend on how
many there are. Knows no message and no server.
"""
# V = ids of all tables in a step, K = rows to send, T = tables

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardkeep.base.arrays import Bytes, Floats
from shardkeep.compression.config import PushConfig
from shardkeep.compression.per_table import TablePush, push_of
from shardkeep.compression.values.registry import ELEMENTS, PUSH_TAG, tag_of
from shardkeep.ps.client.row_memory import RowMemory
from shardkeep.ps.jagged import JaggedIds, JaggedRows
from shardkeep.ps.wire.rows import MOMENTS, RowFormats, RowReader


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """The rows that a step sends, encoded one after the other, table after table."""

    ids: JaggedIds
    """The object of the step's ids, if all are sent."""
    encoded: Bytes


@dataclass(slots=True)
class CompressedValues:
    """Counts the values of gradients that a worker has compressed so far."""

    selected_from: int = 0
    """Values of all gradients of steps with selection."""
    selected: int = 0
    """Those of them that were sent."""
    saturated: int = 0
    """Values beyond the range of a 16-bit format, sent as its largest number."""

    @property
    def unsent_share(self) -> float | None:
        """The share of all gradients, by the number of values, that selection has sent in no step; None = nothing is
        selected."""
        return max(0.0, 1.0 - self.selected / self.selected_from) if self.selected_from else None


class Compressor:
    """Packs one worker's gradients, step by step."""

    def __init__(
        self,
        reader: RowReader,
        config: PushConfig,
        memory: RowMemory,
        *,
        pushes_T: Sequence[TablePush] = (),
        seed: int = 0,
        rank: int = 0,
    ) -> None:
        """`pushes_T`: how each table's gradients are sent; empty = all as `config` says. `seed`: of the job."""
        pushes_T = pushes_T or [push_of(None, config)] * len(reader.catalog)
        self.fp32 = all(push.values == "fp32" for push in pushes_T)
        """Whether all tables' gradients are sent as float32."""
        self._by_values = memory.selector is not None and memory.selector.sends == "values"
        if self._by_values and self.fp32 and not config.second_moment:
            tags_T = [ELEMENTS.config[None]] * len(pushes_T)
        else:
            tags_T = [tag_of(push.values, push.scale, plug=PUSH_TAG) for push in pushes_T]
        formats_T = [tag | MOMENTS * push.second_moment for tag, push in zip(tags_T, pushes_T, strict=True)]
        self.formats = RowFormats(reader, formats_T, seed=seed, sender=rank + 1)
        self.counts = CompressedValues()
        self._memory = memory

    @property
    def sends_later(self) -> bool:
        """Whether unsent gradients are kept for later steps."""
        return self._memory.sends_later

    @property
    def plain(self) -> bool:
        """Whether gradients are sent unchanged."""
        return not self._memory.sends_later and self.formats.plain

    def compress(self, step: int, ids: JaggedIds, grads: JaggedRows, *, last: bool = False) -> EncodedRows:
        """Returns the rows that `step` sends; `last`: also all unsent gradients."""
        if not self._memory.sends_later:
            return EncodedRows(ids, self._encode(step, ids, grads.flat))
        out = self._memory.select(step, ids, grads.flat, last=last)
        counts_T = np.diff(out.ids.layout.starts_T1)
        encoded = self._encode(step, out.ids, self.formats.with_moments(out.flat, out.squares_K, counts_T))
        self._memory.commit(out, self.formats.decode(encoded, counts_T))
        self.counts.selected_from += ids.layout.num_values
        self.counts.selected += int(np.count_nonzero(out.flat)) if self._by_values else out.flat.size
        return EncodedRows(out.ids, encoded)

    def _encode(self, step: int, ids: JaggedIds, flat: Floats) -> Bytes:
        counts_T = np.diff(ids.layout.starts_T1)
        encoded = self.formats.encode(flat, counts_T, ids.ids_V, step)
        self.counts.saturated += self.formats.saturated_values(encoded, counts_T)
        return encoded

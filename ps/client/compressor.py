"""Compressor: from a step's gradients to the encoded rows that are sent: selection, residuals, number format.

Acts on a worker's sorted unique rows, before they are split among servers, so that the result does not depend on how
many there are. Knows no message and no server.
"""
# V = ids of all tables in a step, K = rows to send, T = tables

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardkeep.base.arrays import Bytes, Floats, Ints
from shardkeep.compression.config import PushConfig
from shardkeep.compression.per_table import TablePush, push_of
from shardkeep.compression.selection.registry import Choose, selector
from shardkeep.compression.selection.shares import keep_at, nth_key
from shardkeep.ps.client.row_memory import RowMemory
from shardkeep.ps.jagged import Catalog, JaggedIds, JaggedLayout, JaggedRows
from shardkeep.ps.wire.rows import RowFormats, format_of


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """The rows that a step sends, encoded one after the other, table after table."""

    ids: JaggedIds
    encoded: Bytes
    positions_K: Ints | None
    """The position of each id among those of the step, -1 = not there; None = they are the same ids."""


@dataclass(slots=True)
class Dropped:
    """Gradients that selection drops because no pool keeps them. Squares are sums over all values, float64."""

    rows: int = 0
    squares: float = 0.0
    of_squares: float = 0.0
    """The same of all rows of the steps that selected."""

    def add(self, grads: Floats, sent: Floats, num_rows: int) -> None:
        """Counts one step: all gradients, those that are sent, and the number of rows that are not."""
        before, after = (float(np.dot(part.astype(np.float64), part)) for part in (grads, sent))
        self.rows += num_rows
        self.squares += max(0.0, before - after)
        self.of_squares += before


@dataclass(slots=True)
class CompressedValues:
    """Counts the values of gradients that a worker has compressed so far."""

    selected_from: int = 0
    """Values of all gradients of steps with selection."""
    selected: int = 0
    """Those of them that were sent."""
    saturated: int = 0
    """Values beyond the range of a 16-bit format, sent as its largest number."""
    dropped: Dropped = field(default_factory=Dropped)
    """Rows that selection without a residual pool has dropped."""

    @property
    def unsent_share(self) -> float | None:
        """The share of all gradients, by the number of values, that selection has sent in no step; None = nothing is
        selected."""
        return max(0.0, 1.0 - self.selected / self.selected_from) if self.selected_from else None


class Compressor:
    """Packs one worker's gradients, step by step."""

    def __init__(
        self,
        catalog: Catalog,
        config: PushConfig,
        memory: RowMemory,
        *,
        seed: int,
        rank: int,
        pushes_T: Sequence[TablePush] = (),
    ) -> None:
        """`pushes_T`: how each table's gradients are sent; empty = all as `config` says."""
        pushes_T = pushes_T or [push_of(None, config)] * len(catalog)
        formats_T = [
            format_of(push.numbers.values, push.numbers.scale, moments=push.second_moment) for push in pushes_T
        ]
        self.formats = RowFormats(catalog, formats_T)
        self.counts = CompressedValues()
        self._catalog = catalog
        self._config = config
        self._memory = memory
        self.fp32 = all(push.numbers.values == "fp32" for push in pushes_T)
        """Whether all tables' gradients are sent as float32."""
        self._keep_T = [push.keep for push in pushes_T]
        self._sends_all = all(keep == 1.0 for keep in self._keep_T)
        chosen = selector(config.select)
        pool_chooses = memory.sends_later and chosen.config.pool_chooses
        self._choose = None if self._sends_all or pool_chooses else chosen.load()
        self._key = (seed & 2**64 - 1) << 64 | rank << 48

    @property
    def sends_later(self) -> bool:
        """Whether unsent gradients are kept for later steps."""
        return self._memory.sends_later

    @property
    def plain(self) -> bool:
        """Whether gradients are sent unchanged."""
        return not self._memory.sends_later and self._sends_all and self.formats.plain

    def compress(self, step: int, ids: JaggedIds, grads: JaggedRows, *, last: bool = False) -> EncodedRows:
        """Returns the rows that `step` sends; `last`: also all unsent gradients."""

        def keep_now(keep: float) -> float:
            return 1.0 if last else keep_at(step, keep, self._config.warmup_steps)

        choose, key = None if last else self._choose, self._key + step
        if self._memory.sends_later:
            return self._remembering(step, ids, grads, keep_now, choose, key, last)
        keep_T = [keep_now(keep) for keep in self._keep_T]
        if choose is None or all(keep == 1.0 for keep in keep_T):
            return EncodedRows(ids, self._encode(ids.layout, grads.flat, None), None)
        kept = {
            name: choose(grad_UD, keep_T[t], nth_key(key, t)) if keep_T[t] < 1.0 else np.arange(len(grad_UD))
            for name, grad_UD in grads.items()
            for t in (self._catalog.index[name],)
        }
        chosen = JaggedIds.of_arrays(self._catalog, {name: ids[name][kept_K] for name, kept_K in kept.items()})
        rows = JaggedRows.of_arrays(chosen, {name: grads[name][kept_K] for name, kept_K in kept.items()})
        starts_T1, names = ids.layout.starts_T1, [name for name in self._catalog.names if name in kept]
        positions = [starts_T1[self._catalog.index[name]] + kept[name] for name in names]
        self.counts.dropped.add(grads.flat, rows.flat, ids.ids_V.size - chosen.ids_V.size)
        self._count(ids.layout, rows.flat.size)
        encoded = self._encode(chosen.layout, rows.flat, None)
        return EncodedRows(chosen, encoded, np.concatenate(positions) if positions else np.empty(0, np.int64))

    def _remembering(
        self,
        step: int,
        ids: JaggedIds,
        grads: JaggedRows,
        keep_now: Callable[[float], float],
        choose: Choose | None,
        key: int,
        last: bool,
    ) -> EncodedRows:
        encoded = np.empty(0, dtype=np.uint8)

        def encode(layout: JaggedLayout, flat: Floats, squares_K: Floats) -> Floats:
            nonlocal encoded
            encoded = self._encode(layout, flat, squares_K)
            return self.formats.decode(encoded, np.diff(layout.starts_T1))

        out = self._memory.select(
            step, ids, grads.flat, keep_now=keep_now, choose=choose, key=key, last=last, encode=encode
        )
        by_elements = self._config.keep_values is not None
        self._count(ids.layout, int(np.count_nonzero(out.flat)) if by_elements else out.layout.num_values)
        return EncodedRows(JaggedIds(out.layout, out.ids_K), encoded, out.positions_K)

    def _count(self, step: JaggedLayout, sent_values: int) -> None:
        self.counts.selected_from += step.num_values
        self.counts.selected += sent_values

    def _encode(self, layout: JaggedLayout, flat: Floats, squares_K: Floats | None) -> Bytes:
        counts_T = np.diff(layout.starts_T1)
        if squares_K is not None:
            flat = self.formats.with_moments(flat, squares_K, counts_T)
        encoded = self.formats.encode(flat, counts_T)
        self.counts.saturated += self.formats.saturated_values(encoded, counts_T)
        return encoded

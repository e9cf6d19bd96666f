"""Compressor: from a step's gradients to the encoded rows that are sent: selection, residuals, number format.

Acts on a worker's sorted unique rows, before they are split among servers, so that the result does not depend on how
many there are. Knows no message and no server.
"""
# V = ids of all tables in a step, K = rows to send, T = tables

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardkeep.base.arrays import Bytes, Floats, Ints
from shardkeep.compression.config import PushConfig
from shardkeep.compression.selection.registry import Choose, selector
from shardkeep.compression.selection.shares import keep_at, nth_key
from shardkeep.compression.values.codec import value_codec
from shardkeep.compression.values.rounding import WorkerKeys
from shardkeep.ps.client.row_memory import RowMemory
from shardkeep.ps.jagged import Catalog, JaggedIds, JaggedRows, Layout
from shardkeep.ps.wire import rows as values


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """The rows that a step sends, encoded one after the other, table after table."""

    ids: JaggedIds
    encoded: Bytes
    positions_K: Ints | None
    """Where each id stands among those of the step, -1 = it is not one of them; None = they are the same ids."""


class Compressor:
    """Packs one worker's gradients, step by step."""

    def __init__(self, catalog: Catalog, config: PushConfig, memory: RowMemory, *, seed: int, rank: int) -> None:
        self.format = values.RowFormat(value_codec(config.values, config.scale), moments=config.second_moment)
        self.saturated_values = 0
        """Values sent as the largest number of a 16-bit format, because they were beyond its range."""
        self._catalog = catalog
        self._config = config
        self._memory = memory
        stochastic = config.rounding == "stochastic"
        chosen = selector(config.select)
        pool_chooses = memory.sends_later and chosen.pool_chooses
        self._choose = None if config.keep == 1.0 or pool_chooses else chosen.choose()
        self._key = (seed & 2**64 - 1) << 64 | rank << 48
        self._keys = WorkerKeys(seed, rank, catalog.names) if stochastic else None

    @property
    def sends_later(self) -> bool:
        """Whether gradients that are not sent are kept for later steps."""
        return self._memory.sends_later

    @property
    def plain(self) -> bool:
        """Whether gradients are sent just as they are."""
        return not self._memory.sends_later and self._config.keep == 1.0 and self.format.plain

    def compress(self, step: int, ids: JaggedIds, grads: JaggedRows, *, last: bool = False) -> EncodedRows:
        """What of the gradients of `ids` is sent in `step`; `last` = with all gradients left for later."""
        keep = 1.0 if last else keep_at(step, self._config.keep, self._config.warmup_steps)
        choose, key = None if keep == 1.0 else self._choose, self._key + step
        if self._memory.sends_later:
            return self._remembering(step, ids, grads, keep, choose, key, last)
        if choose is None:
            return EncodedRows(ids, self._encode(step, ids.layout, ids.ids_V, grads.flat, None), None)
        tables = self._catalog.index
        kept = {name: choose(grad_UD, keep, nth_key(key, tables[name])) for name, grad_UD in grads.items()}
        chosen = JaggedIds.of_arrays(self._catalog, {name: ids[name][kept_K] for name, kept_K in kept.items()})
        rows = JaggedRows.of_arrays(chosen, {name: grads[name][kept_K] for name, kept_K in kept.items()})
        starts_T1, names = ids.layout.starts_T1, [name for name in self._catalog.names if name in kept]
        positions = [starts_T1[self._catalog.index[name]] + kept[name] for name in names]
        encoded = self._encode(step, chosen.layout, chosen.ids_V, rows.flat, None)
        return EncodedRows(chosen, encoded, np.concatenate(positions) if positions else np.empty(0, np.int64))

    def _remembering(
        self, step: int, ids: JaggedIds, grads: JaggedRows, keep: float, choose: Choose | None, key: int, last: bool
    ) -> EncodedRows:
        encoded = np.empty(0, dtype=np.uint8)

        def encode(layout: Layout, ids_K: Ints, flat: Floats, squares_K: Floats) -> Floats:
            nonlocal encoded
            encoded = self._encode(step, layout, ids_K, flat, squares_K)
            return self.format.decode(encoded, np.diff(layout.starts_T1), None, self._catalog)[0]

        out = self._memory.select(step, ids, grads.flat, keep=keep, choose=choose, key=key, last=last, encode=encode)
        return EncodedRows(JaggedIds(out.layout, out.ids_K), encoded, out.positions_K)

    def _encode(self, step: int, layout: Layout, ids_K: Ints, flat: Floats, squares_K: Floats | None) -> Bytes:
        counts_T = np.diff(layout.starts_T1)
        keys_K = None if self._keys is None else self._keys.of_step(step, layout.starts_T1, ids_K)
        encoded = self.format.encode(flat, counts_T, None, self._catalog, squares_K=squares_K, keys_K=keys_K)
        self.saturated_values += self.format.saturated_values(encoded, counts_T, self._catalog)
        return encoded

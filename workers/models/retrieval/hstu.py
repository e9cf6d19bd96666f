"""HSTU as a model of what comes next."""

from __future__ import annotations

from dataclasses import replace

from shardkeep.workers.models.encoders.attention import check_heads
from shardkeep.workers.models.encoders.hstu import HstuLayer
from shardkeep.workers.models.layers.hidden import HiddenOptions
from shardkeep.workers.models.retrieval.next_item import ItemList, NextItem


class Hstu(NextItem):
    """Hierarchical Sequential Transduction Units (Zhai et al., arXiv:2402.17152), with places and without times."""

    def __init__(
        self, *, entries: ItemList, layers: int, heads: int, options: HiddenOptions, cosine: bool, temperature: float
    ) -> None:
        width, options = entries.width, replace(options, init="xavier_normal")
        check_heads(width, heads, setting="model.heads")
        units = [HstuLayer(width, heads, entries.shape.max_length, options.dropout, options) for _ in range(layers)]
        super().__init__(entries, units, options, cosine=cosine, temperature=temperature)

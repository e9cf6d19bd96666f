"""Embedding modules whose tables are on parameter servers. They take and give what TorchRec's modules do."""

from shardkeep.nn.collections import EmbeddingBagCollection, EmbeddingCollection
from shardkeep.nn.jagged import Jagged

__all__ = ["EmbeddingBagCollection", "EmbeddingCollection", "Jagged"]

"""ServedModel: the model that a server answers with, and its replacement while requests run."""

# N = rows, T = labels, K = items of a row

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardkeep.base.errors import DataError, UserError
from shardkeep.inference.predictor import Predictor
from shardkeep.inference.protocol.status import Refusal, Status, invalid
from shardkeep.inference.server.item_names import ItemNames
from shardkeep.inference.server.request_ids import Conversion
from shardkeep.inference.server.signature import Answer, Rows, Signature
from shardkeep.inference.small_blocks import SmallBlocks
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.embeddings.unseen import Unseen
from shardkeep.workers.retrieval.ranking import Best

MOST_TOP = 100


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory.

    `made_at`: `time.time()` at which its checkpoint was made, or else at which it was loaded."""

    predictor: Predictor
    signature: Signature
    conversion: Conversion
    blocks: SmallBlocks
    made_at: float
    unseen: Unseen
    """Counts the values of all requests, also of those that an earlier model answered."""

    @classmethod
    def of(
        cls,
        predictor: Predictor,
        made_at: float | None = None,
        unseen: Unseen | None = None,
        *,
        most_top: int = MOST_TOP,
    ) -> Loaded:
        """Blocks while the vectors of a retrieval model's items are computed."""
        unseen = unseen or Unseen(predictor.inputs.layout.schema)
        made_at = time.time() if made_at is None else made_at
        blocks = SmallBlocks(predictor.trained, unseen)
        values = blocks.item_values
        names = None if values is None else ItemNames(values, most_top)
        signature = Signature(predictor.inputs, predictor.outputs, names)
        conversion = Conversion(predictor.inputs)
        conversion.warm()
        blocks.warm()
        return cls(predictor, signature, conversion, blocks, made_at, unseen)

    @property
    def version(self) -> str:
        """The training step."""
        return str(self.predictor.step)

    def answers(self, requests: Sequence[Rows]) -> list[Answer | Refusal]:
        """Scores float32 (N, T) or the best items (N, K) of each request, or why it has none. One thread at a time."""
        if len(requests) > 1:
            with contextlib.suppress(Exception):  # one of them is at fault: each for itself
                ends = np.cumsum([rows.count for rows in requests]).tolist()
                if (batch := self.conversion.direct(requests, self.blocks.padded(ends[-1]))) is not None:
                    whole = self._answer(batch, ends[-1], max(rows.top for rows in requests))
                    parts = zip([0, *ends], ends, requests, strict=False)
                    return [
                        whole.part(a, b, rows.top) if isinstance(whole, Best) else whole[a:b] for a, b, rows in parts
                    ]
        return [self._alone(rows) for rows in requests]

    def _answer(self, batch: Batch, count: int, top: int) -> Answer:
        return self.blocks.top(batch, count, top) if top else self.blocks.scores(batch, count)

    def _alone(self, rows: Rows) -> Answer | Refusal:
        try:
            batches = self.conversion.batches(rows, self.blocks.padded)
            parts = [self._answer(batch, count, rows.top) for batch, count in batches]
        except DataError as error:
            return invalid(str(error).removeprefix("the data, ").removeprefix("the data: "))
        except Exception as error:  # a model of the user's own: this request fails, the server does not
            return Refusal(Status.INTERNAL, f"scoring failed: {type(error).__name__}: {error}".splitlines()[0])
        if rows.top:
            return Best.joined([part for part in parts if isinstance(part, Best)], rows.top)
        none_0T = np.empty((0, len(self.predictor.outputs)), np.float32)
        return np.concatenate([none_0T, *(part for part in parts if not isinstance(part, Best))])


class ServedModel:
    """Holds the model. A batch takes it once and keeps it to its end, so a replacement disturbs no batch."""

    def __init__(self, predictor: Predictor, made_at: float | None = None, *, most_top: int = MOST_TOP) -> None:
        """`most_top`: the most items of a row that a request may ask for."""
        self._most_top = most_top
        self.current = Loaded.of(predictor, made_at, most_top=most_top)
        """The model of the next batch."""
        self.num_missed = 0
        """Times that a newer model could not be served."""

    def missed(self) -> None:
        """Counts a newer model that cannot be served. One thread."""
        self.num_missed += 1

    def replace(self, predictor: Predictor, made_at: float | None = None) -> None:
        """Serves another model from the next batch on. Any thread may call.

        Raises UserError: the model reads or predicts other columns."""
        other = Loaded.of(predictor, made_at, self.current.unseen, most_top=self._most_top)
        if not other.signature.same(self.current.signature):
            raise UserError(
                f"the model of step {predictor.step} reads {', '.join(predictor.columns)}; "
                f"the server began with one that reads {', '.join(self.current.signature.columns)}"
            )
        self.current = other

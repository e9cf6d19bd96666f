"""OpenEmbedding as its own TensorFlow layer drives it: each pull asks for rows with all updates before it.

Pulls still go out a step ahead; the server holds them back until the update of the step before has been made.
"""

# N = ids of a step, D = embedding dim

from __future__ import annotations

import openembedding
import torch
from measurement import options


class InOrder(openembedding.Worker):
    def _next(self, i: int) -> torch.Tensor:
        rows_ND = self.rows.take(self.ahead)
        self.ahead = self.rows.ask(self.batches[(i + 1) % len(self.batches)].merged_N, after=1)
        return rows_ND

    def _push(self, i: int, grad_ND: torch.Tensor) -> None:
        self.rows.apply(self.rows.push(self.batches[i % len(self.batches)].merged_N, grad_ND))


if __name__ == "__main__":
    openembedding.main(options(__doc__, max_workers=8), InOrder)

"""W1's samples as a data source of shardkeep's (`data.source: w1_data:ready`): batches ready in memory.

Drawn once per machine into a temporary folder. With `order: stored` a step's samples lie side by side, so that
`gather` hands out views and costs next to nothing, as the ready-made batches of the opponents do.
"""
# S = samples, B = batch, F = features, I = dense inputs

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import workload

from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.schema import Feature, Schema

NUM_BATCHES = 64
"""Of 2,048 samples, for each worker; then they come again."""
ARRAYS = ("ids_FS", "dense_SI", "label_S1")


def ready(*, split: str, num_batches: int = NUM_BATCHES, seed: int = 1) -> Ready | None:
    """The contract of docs/guide/data.md; there is nothing to evaluate on."""
    return Ready(drawn(num_batches, seed)) if split == "train" else None


class Ready:
    """Samples in memory, feature by feature."""

    def __init__(self, folder: Path) -> None:
        self._ids_FS, self._dense_SI, self._label_S1 = (np.load(folder / f"{name}.npy") for name in ARRAYS)
        self.names = tuple(f"C{f + 1}" for f in range(len(self._ids_FS)))
        dense = tuple(f"I{i + 1}" for i in range(self._dense_SI.shape[1]))
        self.schema = Schema(dense, tuple(Feature(name, name) for name in self.names))

    def __len__(self) -> int:
        return len(self._label_S1)

    def gather(self, rows_B: Any) -> Batch:
        """Consecutive samples, as views that nobody writes to."""
        part = slice(int(rows_B[0]), int(rows_B[-1]) + 1)
        if part.stop - part.start != len(rows_B):
            raise ValueError("w1_data: samples of a step must be consecutive: train.order: stored")
        ids = {name: Ragged(ids_S[part]) for name, ids_S in zip(self.names, self._ids_FS, strict=True)}
        return Batch(self._dense_SI[part], ids, self._label_S1[part])


def drawn(num_batches: int, seed: int) -> Path:
    """The folder of the arrays; draws them where no earlier run has."""
    law = f"{workload.TABLE_SIZES} {workload.ZIPF} {workload.BATCH} {workload.NUM_DENSE} {num_batches} {seed}"
    folder = Path(tempfile.gettempdir()) / f"shardkeep-w1-{hashlib.sha256(law.encode()).hexdigest()[:16]}"
    if not folder.exists():
        made = Path(tempfile.mkdtemp(prefix="shardkeep-w1-"))
        ids_NFB = workload.draw_ids(num_batches, seed=seed)
        dense_NBI, label_NB1 = workload.draw_dense(num_batches, seed=seed)
        np.save(made / "ids_FS.npy", np.ascontiguousarray(ids_NFB.transpose(1, 0, 2)).reshape(ids_NFB.shape[1], -1))
        np.save(made / "dense_SI.npy", dense_NBI.reshape(-1, workload.NUM_DENSE))
        np.save(made / "label_S1.npy", label_NB1.reshape(-1, 1))
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            if not folder.exists():
                raise
    return folder

"""Weights that are no weights: a column of ages makes pooled rows forty times as long. A look at some samples."""

from __future__ import annotations

import numpy as np

from shardkeep.workers.data.samples import Dataset

LARGEST_RMS = 10.0
"""Root mean square of a feature's weights above which there is a warning: so many times as long are its pooled rows, as
those of different ids are nearly orthogonal. Ratings of 1 to 5 have 3.3."""
_SAMPLES = 1024


def doubtful_weights(dataset: Dataset) -> list[str]:
    """A warning for each feature whose weights are large, by samples from all over the data set; reads them."""
    weighted = [feature.name for feature in dataset.schema.features if feature.pooling == "weighted"]
    if not weighted or not len(dataset):
        return []
    rows_B = np.linspace(0, len(dataset) - 1, min(len(dataset), _SAMPLES)).astype(np.int64)
    bags = dataset.gather(rows_B).ids
    warnings = []
    for name in weighted:
        weights_N = bags[name].weights_N
        if weights_N is None or not weights_N.size:
            continue
        rms = float(np.sqrt(np.mean(np.square(weights_N, dtype=np.float64))))
        if rms > LARGEST_RMS:
            warnings.append(
                f"feature {name}: its weights have a root mean square of {rms:.3g}, so its pooled rows are about that "
                "many times too long; scale the weights to about 1, or use pooling: mean"
            )
    return warnings

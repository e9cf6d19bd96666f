"""Samples of your own for a job: a function that returns arrays."""

from typing import Any

import numpy as np


def sessions(split: str, rows: int = 60_000, items: int = 500) -> dict[str, Any]:
    """Sessions of a shop: is the item bought that was looked at last?

    A job calls it with `split`, "train" and "eval", and the keys of `data.options`.
    """
    random = np.random.default_rng(1 if split == "train" else 2)  # every worker must get the same samples
    count = rows if split == "train" else rows // 4
    kind = np.arange(items) % 7
    seen = random.integers(0, items, size=(count, 5))
    item = random.integers(0, items, size=count)
    price = random.lognormal(3.0, 1.0, size=count)
    interest = (kind[seen] == kind[item][:, None]).sum(axis=1)
    chance = 1.0 / (1.0 + np.exp(2.0 - 2.0 * interest + 0.8 * (np.log(price) - 3.0)))
    return {
        "label": (random.random(count) < chance).astype(np.int64),
        "dense": {"price": price},
        "sparse": {"item": item, "seen": seen},  # five ids per sample: a multi-valued feature
    }

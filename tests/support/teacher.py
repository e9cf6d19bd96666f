"""A csv whose labels a planted teacher drew, so that a test knows the best AUC there is. Made from a seed."""

# N = samples, F = features

from __future__ import annotations

from pathlib import Path

import numpy as np

from shardkeep.workers.metrics.quality import auc

SIZES = {"shop": 12, "colour": 8, "city": 60}
YAML = """
name: planted
seed: 3
servers: 0
workers: 1
data:
  source: csv
  train: [train.csv]
  eval: [eval.csv]
  label: {column: bought, positive: ["yes"]}
  dense: [age, {column: price, scale: log_standard}]
  sparse: [shop, colour, city]
model: {name: dlrm, bottom: [16], hidden: [32]}
tables:
  default: {dim: 8, optimizer: {name: rowwise_adagrad, lr: 0.1}}
tower: {optimizer: {name: adam, lr: 0.01}, compile: "off"}
train: {batch_size: 128, epochs: 6}
consistency: {mode: sync}
"""


def write_planted_csv(folder: Path, *, train: int = 12_000, held_out: int = 6_000, seed: int = 11) -> float:
    """Writes train.csv and eval.csv; returns the teacher's own AUC on eval.csv."""
    rng = np.random.default_rng(seed)
    effects = {name: rng.normal(0.0, 0.6, size) for name, size in SIZES.items()}
    pairs = rng.normal(0.0, 1.4, (SIZES["shop"], SIZES["colour"]))  # a linear model cannot express these
    _write(folder / "train.csv", rng, train, effects, pairs)
    return _write(folder / "eval.csv", rng, held_out, effects, pairs)


def _write(
    path: Path, rng: np.random.Generator, count: int, effects: dict[str, np.ndarray], pairs: np.ndarray
) -> float:
    ids = {name: rng.integers(0, size, count) for name, size in SIZES.items()}
    age, price = rng.integers(18, 80, count), np.exp(rng.normal(3.0, 1.0, count)).round(2)
    logit_N = 0.03 * (age - 49) - 0.6 * (np.log(price) - 3.0) - 0.5 + pairs[ids["shop"], ids["colour"]]
    logit_N += sum(effects[name][ids[name]] for name in SIZES)
    label_N = rng.random(count) < 1.0 / (1.0 + np.exp(-logit_N))
    with path.open("w", encoding="utf-8") as file:
        file.write("age,price,shop,colour,city,bought\n")
        for row in range(count):
            names = ",".join(f"{name}-{ids[name][row]}" for name in SIZES)
            file.write(f"{age[row]},{price[row]:.2f},{names},{'yes' if label_N[row] else 'no'}\n")
    return auc(logit_N, label_N.astype(np.float64))

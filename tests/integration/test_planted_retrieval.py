"""What retrieval models learn of the planted stream, whose best possible recall is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep import train
from shardkeep.config import JobConfig
from shardkeep.workers.data.catalogue import Catalogue
from shardkeep.workers.data.sources.registry import open_data

TOWERS = {
    "name": "two_tower",
    "item": ["item"],
    "hidden": [64],
    "dim": 32,
    "encoder": {"name": "transformer", "layers": 1, "heads": 1},
}


def job(model: dict[str, Any], samples: int, **training: Any) -> JobConfig:
    """A job in one process."""
    return JobConfig.model_validate(
        {
            "servers": 0,
            "seed": 3,
            "data": {"synthetic": {"task": "retrieval", "train_samples": samples, "eval_samples": 5000}},
            "model": model,
            "tables": {"default": {"dim": 32, "optimizer": {"name": "rowwise_adagrad", "lr": 0.05}}},
            "tower": {"optimizer": {"lr": 0.003}, "amp": "off"},
            "train": {"batch_size": 256} | training,
            "eval": {"metrics": ["recall@1", "recall@50"]},
        }
    )


def reached(config: JobConfig, folder: Path, metric: str) -> float:
    """A recall of the trained model, divided by the best possible one."""
    found = train(config, run_dir=folder, quiet=True).to_dict()["eval"]
    return float(found[metric] / found[f"best_{metric}"])


@pytest.mark.chaos
def test_a_run_keeps_its_catalogue_and_tells_the_best_possible_recall(tmp_path: Path) -> None:
    config = job(TOWERS, 2000, max_steps=1)
    summary = train(config, run_dir=tmp_path / "run", quiet=True).to_dict()
    kept = Catalogue.read(tmp_path / "run" / "catalogue.arrow")
    data = open_data(config.data, seed=config.seed, items=config.items)
    assert data.catalogue is not None and data.best_ranks is not None
    assert (kept.ids_M == data.catalogue.ids_M).all() and (kept.counts_M == data.catalogue.counts_M).all()
    assert summary["eval"]["best_recall@50"] == pytest.approx((data.best_ranks(5000) <= 50).mean())
    assert summary["eval"]["best_recall@1"] == pytest.approx((data.best_ranks(5000) == 1).mean())
    assert np.isfinite(summary["eval"]["recall@50"])


@pytest.mark.chaos
@pytest.mark.timeout(1200)
def test_the_correction_finds_popular_items_that_the_loss_without_it_ranks_too_low(tmp_path: Path) -> None:
    losses = {name: {"name": "sampled_softmax", "correction": name} for name in ("log_q", "none")}
    found = {
        name: reached(job(TOWERS, 80_000, loss=loss), tmp_path / name, "recall@50") for name, loss in losses.items()
    }
    assert found["log_q"] > 0.95 and found["none"] < 0.9, found

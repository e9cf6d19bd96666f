"""What retrieval models learn of the planted stream, whose best possible recall is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardkeep import train
from shardkeep.config import JobConfig

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
@pytest.mark.timeout(1200)
def test_the_correction_finds_popular_items_that_the_loss_without_it_ranks_too_low(tmp_path: Path) -> None:
    losses = {name: {"name": "sampled_softmax", "correction": name} for name in ("log_q", "none")}
    found = {
        name: reached(job(TOWERS, 80_000, loss=loss), tmp_path / name, "recall@50") for name, loss in losses.items()
    }
    assert found["log_q"] > 0.95 and found["none"] < 0.9, found

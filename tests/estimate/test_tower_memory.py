"""The memory of a tower with ddp and fsdp, as the estimate tells it: by hand, as measured, as shown."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from shardkeep.config import JobConfig
from shardkeep.estimate.estimate import estimate
from shardkeep.estimate.tower import MATTERS_FROM, PAYS_FROM, sharded_bytes, tower_memory
from shardkeep.estimate.view import show_estimate
from tests.support.cases import every

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "2026-11-27-fsdp-memory.json"
PROCESS_MB = 330
"""Of a process with torch loaded."""


def job(**more: Any) -> JobConfig:
    data = {"synthetic": {"train_samples": 400, "eval_samples": 10, "num_dense": 3, "table_sizes": [50]}}
    return JobConfig.model_validate({"data": data, "model": {"bottom": [8], "hidden": [8]}, **more})


def test_shards_take_a_workers_share_and_the_blocks_that_are_gathered() -> None:
    model = nn.Sequential(nn.Linear(300, 300, bias=False), nn.Linear(300, 5, bias=False))
    memory = tower_memory(job(workers=4, tower={"optimizer": {"name": "sgd", "momentum": 0.9}}), model)
    whole, part = 300 * 305, 75 * 300 + 2 * 300  # one rank has two of five rows
    assert memory["ddp"]["parameters"] == memory["ddp"]["gradients"] == memory["ddp"]["optimizer"] == 4 * whole
    assert memory["fsdp"]["parameters"] == memory["fsdp"]["optimizer"] == 4 * part
    assert memory["fsdp"]["exchanged"] == 4 * (2 * 300 * 5 + 4 * 300 * 300)
    assert memory["fsdp"]["peak"] == 4 * (3 * part) + memory["fsdp"]["exchanged"]
    assert memory["ddp"]["kept"] > 0 == memory["fsdp"]["kept"]
    alone = tower_memory(job(workers=1), model)
    assert alone["ddp"]["peak"] == alone["fsdp"]["peak"] == 4 * 4 * whole


def test_the_estimate_of_a_large_tower_agrees_with_what_was_measured() -> None:
    rounds = json.loads(RESULTS.read_text(encoding="utf-8"))["results"]["towers"]["8 x 25 M"]["rounds"]
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(13, 5000), *(nn.Linear(5000, 5000) for _ in range(8)), nn.Linear(5000, 1))
    memory = tower_memory(job(workers=2), model)
    for kind in ("ddp", "fsdp"):
        measured = rounds[kind][0]["trained_mb"]
        assert memory[kind]["peak"] / 1e6 + PROCESS_MB == pytest.approx(measured, rel=0.1)


def test_the_table_says_from_which_size_on_shards_pay() -> None:
    found = estimate(job(tower={"parallel": "fsdp"}, consistency={"mode": "bounded"}), gbit_per_s=10.0)
    text = io.StringIO()
    show_estimate(found, Console(file=text, width=100))
    assert "of the tower in a worker" in text.getvalue() and "at most at once" in text.getvalue()
    assert "fsdp pays from some 50 million parameters on; this tower has fewer" in text.getvalue()
    assert found["tower"]["fsdp_pays_from"] == PAYS_FROM == 50_000_000


@every(("least", "workers", "there"), [(1, 2, True), (1, 1, False), (MATTERS_FROM, 2, False)])
def test_only_a_large_tower_of_several_workers_has_the_table(
    least: int, workers: int, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkeep.estimate.estimate.MATTERS_FROM", least)
    found, text = estimate(job(workers=workers), gbit_per_s=10.0), io.StringIO()
    show_estimate(found, Console(file=text, width=100))
    assert ("of the tower in a worker" in text.getvalue()) == ("memory" in found["tower"]) == there


def test_each_pass_over_shards_is_sent() -> None:
    block = 300 * 300
    model = nn.Sequential(nn.Linear(300, 300, bias=False), nn.Linear(300, 2, bias=False))
    sent = sharded_bytes(model, 2, 3)
    assert sent == pytest.approx(3 * 4 * (3 * block / 2 + 2 * 600 / 2), rel=0.01)
    assert sharded_bytes(model, 1, 3) == 0

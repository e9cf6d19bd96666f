"""The tower in the estimate: its memory with ddp and fsdp, and what padded widths would gain."""

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
from shardkeep.estimate.padding import padding_gain, timed
from shardkeep.estimate.tower import MATTERS_FROM, PAYS_FROM, sharded_bytes, tower_memory
from shardkeep.estimate.view import show_estimate
from shardkeep.workers.dense.amp import MixedPrecision
from shardkeep.workers.dense.products import Products
from tests.support.cases import every

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "2026-11-27-fsdp-memory.json"
PROCESS_MB = 330
"""Of a process with torch loaded."""


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardkeep.estimate.padding.LIMIT_S", 0.0)


def job(**more: Any) -> JobConfig:
    data = {"synthetic": {"train_samples": 400, "eval_samples": 10, "num_dense": 3, "table_sizes": [50]}}
    return JobConfig.model_validate({"data": data, "model": {"bottom": [8], "hidden": [8]}, **more})


def shown(found: dict[str, Any]) -> str:
    text = io.StringIO()
    show_estimate(found, Console(file=text, width=100))
    return text.getvalue()


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
    text = shown(found)
    assert "of the tower in a worker" in text and "at most at once" in text
    assert "fsdp pays from some 50 million parameters on; this tower has fewer" in text
    assert found["tower"]["fsdp_pays_from"] == PAYS_FROM == 50_000_000


@every(("least", "workers", "there"), [(1, 2, True), (1, 1, False), (MATTERS_FROM, 2, False)])
def test_only_a_large_tower_of_several_workers_has_the_table(
    least: int, workers: int, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkeep.estimate.estimate.MATTERS_FROM", least)
    found = estimate(job(workers=workers), gbit_per_s=10.0)
    assert ("of the tower in a worker" in shown(found)) == ("memory" in found["tower"]) == there


def test_each_pass_over_shards_is_sent() -> None:
    block = 300 * 300
    model = nn.Sequential(nn.Linear(300, 300, bias=False), nn.Linear(300, 2, bias=False))
    sent = sharded_bytes(model, 2, 3)
    assert sent == pytest.approx(3 * 4 * (3 * block / 2 + 2 * 600 / 2), rel=0.01)
    assert sharded_bytes(model, 1, 3) == 0


# Padded widths


def padded(**tower: Any) -> JobConfig:
    return job(train={"batch_size": 2048}, tower={"amp": "off", **tower})


def of_products(seconds: dict[int, float]) -> Any:
    """Seconds of a layer by the values that its weights have in a product."""

    def seconds_of(layer: nn.Linear, batch_size: int, precision: MixedPrecision) -> float:
        assert (batch_size, precision.chosen.dtype) == (2048, None)
        products = Products(torch.device("cpu"))
        with products.counted(1):
            layer(torch.zeros(1, layer.in_features))
        return seconds[int(products.per_sample) // 2]

    return seconds_of


@every(
    ("padded_s", "wide_s", "gain"),
    [(0.8, 0.9, {"multiple": 8, "gain": 2.0 / 1.8}), (0.98, 0.7, {"multiple": 32, "gain": 2.0 / 1.7}), (0.98, 2.0, {})],
)
def test_the_multiple_with_the_least_time_is_told(padded_s: float, wide_s: float, gain: dict[str, float]) -> None:
    model = nn.Sequential(nn.Linear(367, 128), nn.Linear(128, 128), nn.Linear(128, 3))
    seconds = {367 * 128: 1.0, 368 * 128: padded_s, 384 * 128: wide_s, 128 * 128: 1.0}
    found = padding_gain(padded(), model, of_products(seconds))
    assert found == (pytest.approx(gain) if gain else {})
    if gain.get("multiple") == 8:  # a layer counts as often as the model has it
        more = nn.Sequential(nn.Linear(367, 128), *(nn.Linear(128, 128) for _ in range(3)))
        assert padding_gain(padded(), more, of_products(seconds))["gain"] == pytest.approx(4.0 / 3.8)


def test_nothing_is_timed_where_the_answer_is_known() -> None:
    def never(*_: Any) -> float:
        raise AssertionError("timed")

    large, small = nn.Sequential(nn.Linear(367, 128)), nn.Sequential(nn.Linear(37, 8))
    assert padding_gain(padded(), small, never) == {}
    if not torch.cuda.is_available():
        assert padding_gain(padded(device="cuda"), large, never) == {}
    with pytest.raises(AssertionError, match="timed"):
        padding_gain(padded(), large, never)


def test_a_layer_is_timed_forward_and_backward() -> None:
    layer = nn.Linear(40, 30)
    seen: list[str] = []
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    assert 0.0 < timed(layer, 16, MixedPrecision("off", torch.device("cpu"))) < 5.0
    assert seen == ["forward", "backward"] and layer.weight.grad is None


def test_a_gain_is_one_line() -> None:
    found = estimate(job(), gbit_per_s=10.0)
    assert found["tower"]["padding"] == {}
    gain = {"tower": {**found["tower"], "padding": {"multiple": 16, "gain": 1.178}}}
    line = "tower.pad_widths: 16 makes the tower's linear layers 1.18 times as fast here\n"
    text = shown({**found, **gain})
    assert line in text and text.replace(line, "") == shown(found)

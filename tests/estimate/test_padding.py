"""What padded widths would gain, as the estimate tells it."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from shardkeep.config import JobConfig
from shardkeep.estimate.estimate import estimate
from shardkeep.estimate.padding import padding_gain, timed
from shardkeep.estimate.view import show_estimate
from shardkeep.workers.dense.amp import MixedPrecision
from shardkeep.workers.dense.products import Products
from tests.support.cases import every

DATA = {"synthetic": {"train_samples": 4000, "eval_samples": 10, "num_dense": 3, "table_sizes": [50]}}


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardkeep.estimate.padding.LIMIT_S", 0.0)


def job(**more: Any) -> JobConfig:
    return JobConfig.model_validate({"data": DATA, "train": {"batch_size": 2048}, "tower": {"amp": "off"}, **more})


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
    ("padded_s", "wide_s", "told"),
    [(0.8, 0.9, {"multiple": 8, "gain": 2.0 / 1.8}), (0.98, 0.7, {"multiple": 32, "gain": 2.0 / 1.7}), (0.98, 2.0, {})],
    ids=["8", "32", "less than 3 %"],
)
def test_the_multiple_with_the_least_time_is_told(padded_s: float, wide_s: float, told: dict[str, float]) -> None:
    model = nn.Sequential(nn.Linear(367, 128), nn.Linear(128, 128), nn.Linear(128, 3))
    seconds = {367 * 128: 1.0, 368 * 128: padded_s, 384 * 128: wide_s, 128 * 128: 1.0}
    found = padding_gain(job(), model, of_products(seconds))
    assert found == (pytest.approx(told) if told else {})


def test_a_layer_counts_as_often_as_the_model_has_it() -> None:
    model = nn.Sequential(nn.Linear(367, 128), *(nn.Linear(128, 128) for _ in range(3)))
    seconds = {367 * 128: 1.0, 368 * 128: 0.8, 384 * 128: 1.0, 128 * 128: 1.0}
    assert padding_gain(job(), model, of_products(seconds))["gain"] == pytest.approx(4.0 / 3.8)


def never(*_: Any) -> float:
    raise AssertionError("timed")


def test_nothing_is_timed_where_the_answer_is_known() -> None:
    large, small = nn.Sequential(nn.Linear(367, 128)), nn.Sequential(nn.Linear(37, 8))
    assert padding_gain(job(), small, never) == {}
    if not torch.cuda.is_available():
        assert padding_gain(job(tower={"device": "cuda"}), large, never) == {}
    with pytest.raises(AssertionError, match="timed"):
        padding_gain(job(), large, never)


def test_a_layer_is_timed_forward_and_backward() -> None:
    layer = nn.Linear(40, 30)
    seen: list[str] = []
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    assert 0.0 < timed(layer, 16, MixedPrecision("off", torch.device("cpu"))) < 5.0
    assert seen == ["forward", "backward"] and layer.weight.grad is None


def test_a_gain_is_one_line() -> None:
    found = estimate(job(model={"bottom": [8], "hidden": [8]}), gbit_per_s=10.0)
    assert found["tower"]["padding"] == {}
    shown = []
    for gain in ({}, {"multiple": 16, "gain": 1.178}):
        text = io.StringIO()
        show_estimate({**found, "tower": {**found["tower"], "padding": gain}}, Console(file=text, width=100))
        shown.append(text.getvalue())
    line = "tower.pad_widths: 16 makes the tower's linear layers 1.18 times as fast here\n"
    assert line in shown[1] and shown[1].replace(line, "") == shown[0]

"""The dense model for a few rows: the scores of the model itself, from the same parameters."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from shardkeep.workers.config import TowerConfig
from shardkeep.workers.dense import onednn
from shardkeep.workers.dense.scorer import FewRows, Scorer
from shardkeep.workers.model_config import keys_of
from shardkeep.workers.models.registry import build_model, row_dim
from tests.support.cases import every
from tests.support.towers import CPU, RANKING, model_config

FEATURES = ("user", "item", "tag")


def scorer_of(name: str, amp: str = "off") -> tuple[Scorer, torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    settings = {"hidden": [48, 16]} if "hidden" in keys_of(name) else {}
    dims = {feature: row_dim(name, 16) for feature in FEATURES}
    model = build_model(model_config(name=name, **settings), num_dense=5, features=dims, default_dim=16)
    leaves = {feature: torch.randn(7, dim).requires_grad_() for feature, dim in dims.items()}
    return Scorer(model, TowerConfig(amp=amp), CPU), torch.randn(7, 5), leaves


@every("name", RANKING)
def test_scores_are_those_of_the_model_and_the_model_keeps_its_bits(name: str) -> None:
    scorer, dense, leaves = scorer_of(name)
    before = scorer.predict(dense, leaves)
    few = scorer.for_few_rows()
    assert few is not None
    found = few.predict(dense, leaves)
    assert found.shape == before.shape and (found.sigmoid() - before.sigmoid()).abs().max() < 1e-6
    assert torch.equal(scorer.predict(dense, leaves), before)


def test_no_parameter_is_copied_and_onednn_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, dense, leaves = scorer_of("dlrm")
    few = scorer.for_few_rows()
    assert few is not None
    expected = few.predict(dense, leaves)
    monkeypatch.setattr(onednn, "multiply", lambda *_: pytest.fail("multiplied by oneDNN"))
    assert torch.equal(few.predict(dense, leaves), expected)
    with torch.no_grad():
        for parameter in scorer.model.parameters():
            parameter.zero_()
    assert not few.predict(dense, leaves).any()


def test_a_model_that_cannot_be_copied_and_one_in_mixed_precision_have_no_such_form() -> None:
    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    with pytest.raises(TypeError):
        FewRows(Locked())
    assert Scorer(Locked(), TowerConfig(), CPU).for_few_rows() is None
    assert scorer_of("dlrm", amp="bf16")[0].for_few_rows() is None

"""`model:` is one of several models by its name: each has its own keys, and `--set model.name` works from any base."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from shardkeep.base.errors import ConfigError
from shardkeep.base.yaml_text import write_yaml
from shardkeep.config import JobConfig, parse_config
from shardkeep.workers.label_config import NegativesConfig
from shardkeep.workers.model_config import MODELS, TwoTowerConfig, keys_of

CHANGED: dict[str, Any] = {
    "cin": [4], "bottom": [5], "hidden": [7], "structure": "parallel", "cross_layers": 2, "cross_rank": 3,
    "attention": {"dim": 8}, "bilinear": "all", "reduction": 2, "mask": {"ratio": 2.0}, "second_hidden": [6],
    "fusion_heads": 2, "gates": {"hidden": [3]}, "dropout": 0.2, "norm": "layer", "activation": "gelu",
    "init": "xavier_normal", "activation_checkpointing": True,
    "encoder": {"name": "transformer"}, "task_hidden": [5], "experts": 3, "levels": 1, "shared_experts": 3,
    "task_experts": 3, "similarity": "dot", "item": ["item"], "dim": 5, "layers": 3, "heads": 2,
}  # fmt: skip


MODELS_OF_ALL = [*MODELS, "own:Net"]


@pytest.mark.parametrize("distances", [(1, 6), pytest.param(range(len(MODELS_OF_ALL)), marks=pytest.mark.slow)])
def test_the_name_of_a_model_may_change_from_any_base(distances: Sequence[int]) -> None:
    """Of the pairs of models, those that are so far apart in the list, or all."""
    for number, before in enumerate(MODELS_OF_ALL):
        for distance in distances:
            check_change(before, MODELS_OF_ALL[(number + distance) % len(MODELS_OF_ALL)].replace("Net", "Other"))


def check_change(before: str, name: str) -> None:
    changed = CHANGED | ({"encoder": {}} if before in ("din", "bst") else {})
    changed |= {"hidden": 7} if before == "sasrec" else {}
    base = {key: changed.get(key, {}) for key in keys_of(before)}
    text = write_yaml({"model": {"name": before, **base}, "tables": {"default": {"dim": 1 if before == "lr" else 8}}})
    model = parse_config(text, [f"model.name={name}"]).model
    assert model.name == name, before
    kept = {key for key in base if keys_of(name).get(key) == keys_of(before)[key]}
    assert {key for key in kept if getattr(model, key) != parse_config(text).model.model_dump()[key]} <= {
        "attention", "mask", "gates", "encoder",
    }, (before, name)  # fmt: skip


def test_what_a_model_lacks_is_dropped_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    text = "model: {bottom: [4], hidden: [5]}\ntables: {default: {dim: 4}, a: {dim: 3}}"
    with caplog.at_level(logging.WARNING):
        config = parse_config(text, ["model.name=lr"])
    assert config.tables["a"].dim is None
    said = "model.name: lr goes without these keys: model.hidden, model.bottom, tables.default.dim, tables.a.dim"
    assert caplog.messages == [said]


def test_a_key_that_was_given_beside_the_name_is_refused() -> None:
    overrides = ["model.cross_layers=2", "model.name=deepfm"]
    for given in (overrides, overrides[::-1]):
        with pytest.raises(ConfigError) as refused:
            parse_config("model: {bottom: [4]}", given)
        said = "--set model.cross_layers=2: model.cross_layers: unknown key with name: deepfm"
        assert str(refused.value).startswith(said) and "\n" not in str(refused.value)


def test_a_retrieval_model_has_its_loss_without_a_word_and_may_be_given_as_its_class() -> None:
    config = JobConfig(model=TwoTowerConfig(item=["item"]))
    assert config.train.loss.name == "sampled_softmax" and parse_config(config.to_yaml()) == config
    loss = parse_config("model: sasrec\ntrain: {loss: {negatives: {uniform: 3}}}").train.loss
    assert (loss.name, loss.negatives) == ("sampled_softmax", NegativesConfig(uniform=3))


def test_another_model_goes_without_the_loss_of_the_first(caplog: pytest.LogCaptureFixture) -> None:
    text = parse_config("model: sasrec\ntrain: {loss: {temperature: 2}}").to_yaml()
    with caplog.at_level(logging.WARNING):
        assert parse_config(text, ["model.name=dnn"]).train.loss.name == "bce"
        assert parse_config(text, ["model.name=hstu"]).train.loss.temperature == 2
        assert parse_config("train: {loss: bce}", ["model.name=sasrec"]).train.loss.name == "sampled_softmax"
    assert [message.endswith("train.loss") for message in caplog.messages] == [True, True]

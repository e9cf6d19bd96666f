"""Which features an encoder compares a history with, and encoders that do not fit the data or the model."""

from __future__ import annotations

from typing import Any

import pytest

from shardkeep.base.errors import ConfigError
from shardkeep.base.yaml_text import write_yaml
from shardkeep.config import parse_config
from shardkeep.workers.data.schema import Feature, Schema, SequenceColumns
from shardkeep.workers.encoder_config import targets_of
from shardkeep.workers.model_config import DlrmConfig
from tests.support.cases import every
from tests.support.sequences import schema_of
from tests.support.towers import model_config


def schema(*features: Feature, columns: str = "item") -> Schema:
    group = SequenceColumns("seen", tuple(Feature(f"seen_{t}", t, "none") for t in columns.split()), (), 5)
    return Schema((), features, sequences=(group,))


def test_a_column_is_compared_with_the_feature_of_its_table_or_the_one_that_is_named() -> None:
    found = targets_of(model_config("din"), schema_of())
    assert found == {"seen": {"seen_item": "item", "seen_category": "category"}}
    assert targets_of(model_config("dnn"), schema_of()) == {"seen": {}}
    assert targets_of(model_config("dnn", encoder="hstu"), schema_of(features=["user"])) == {"seen": {}}
    assert targets_of(model_config("lr"), schema_of()) == {"seen": {}}
    beside = schema(Feature("item", "item"), columns="item action")
    assert targets_of(model_config("din"), beside) == {"seen": {"seen_item": "item"}}, "action has no target"
    several = schema(Feature("item", "item"), Feature("basket", "item"))
    encoder = {"name": "din", "target": {"seen_item": "basket"}}
    assert targets_of(model_config("dnn", encoder=encoder), several) == {"seen": {"seen_item": "basket"}}
    weighted = schema(Feature("item", "item"), Feature("basket", "item", "weighted"))
    assert targets_of(model_config("din"), weighted) == {"seen": {"seen_item": "item"}}


@every(
    ("settings", "data", "said"),
    [
        (
            {"name": "din"},
            schema(Feature("item", "item"), Feature("basket", "item")),
            "model.encoder.target: features item, basket share table item with seen_item; name one of them: "
            "target: {seen_item: item}",
        ),
        (
            {"name": "din"},
            schema(Feature("user", "user")),
            "model.encoder: din compares the entries of seen with a feature, and no feature has table item; "
            "encoders that need none: mean, transformer, hstu",
        ),
        (
            {"name": "dnn", "encoder": {"name": "hstu", "target": {"seen_itm": "item"}}},
            schema(Feature("item", "item")),
            "model.encoder.target: seen_itm is no column of a sequence; allowed: seen_item",
        ),
        (
            {"name": "dnn", "encoder": {"name": "din", "target": {"seen_item": "user"}}},
            schema(Feature("item", "item"), Feature("user", "user")),
            "model.encoder.target: seen_item: user is no feature of table item; allowed: item",
        ),
        (
            {"name": "dlrm", "encoder": {"name": "mean"}},
            Schema((), (Feature("item", "item"),)),
            "model.encoder: mean has no effect: the data has no sequences (data.sequences)",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(settings: dict[str, Any], data: Schema, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        targets_of(model_config(**settings), data)
    assert str(refused.value) == said


@every(
    ("settings", "said"),
    [
        ({"name": "lr", "encoder": "din"}, "model.encoder: unknown key with name: lr; known keys: name"),
        ({"name": "fm", "encoder": "mean"}, "model.encoder: unknown key with name: fm"),
        ({"name": "own:Own", "encoder": "din"}, "model.encoder: unknown key with name: module:Class"),
        ({"name": "dnn", "encoder": {}}, "model.encoder.name: is missing; allowed: din, hstu, mean or transformer"),
        ({"name": "dnn", "encoder": "dinn"}, "allowed: din, hstu, mean or transformer"),
        ({"name": "dnn", "encoder": {"name": "mean", "heads": 2}}, "model.encoder.heads: unknown key"),
        ({"name": "din", "encoder": {"name": "hstu"}}, "'hstu' is not allowed; allowed: din"),
        ({"name": "dnn", "sync_norm": True, "encoder": "hstu"}, "sync_norm: has no effect"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setting_that_no_encoder_takes_is_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(write_yaml({"model": settings}))
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_config_without_an_encoder_is_written_as_before_there_were_encoders() -> None:
    assert "encoder" not in DlrmConfig().model_dump() and "encoder" not in parse_config("model: dnn").to_yaml()
    config = parse_config("model: {name: dnn, encoder: {name: din, hidden: [3]}}")
    assert parse_config(config.to_yaml()) == config and "hidden: [3]" in config.to_yaml().replace("\n    - 3", " [3]")
    assert model_config("dnn", sync_norm=True, encoder="din").syncs_norm


@every(
    ("before", "change", "encoder"),
    [
        ("{name: dnn, hidden: [4], encoder: {name: hstu, layers: 1}}", "name=dlrm", "hstu"),
        ("{name: dnn, hidden: [4], encoder: {name: hstu, layers: 1}}", "name=din", "din"),
        ("{name: dnn}", "encoder=din", "din"),
    ],
)
def test_the_name_of_a_model_may_change_to_one_with_another_encoder(before: str, change: str, encoder: str) -> None:
    assert parse_config(f"model: {before}", [f"model.{change}"]).model.model_dump()["encoder"]["name"] == encoder

"""How many values a row has: the table's dim, and what the model adds."""

from __future__ import annotations

import pytest

from shardkeep.assembly.model import row_spec
from shardkeep.base.errors import ConfigError
from shardkeep.config import JobConfig, parse_config
from tests.support.cases import every


def config_of(model: str, tables: str = "{default: {dim: 8}, item: {dim: 4}}") -> JobConfig:
    return parse_config(f"{{data: {{source: synthetic}}, model: {model}, tables: {tables}}}")


@every("model", ["fm", "wide_deep", "deepfm", "xdeepfm", "fibinet"])
def test_a_first_order_weight_is_one_more_column_of_every_row(model: str) -> None:
    config = config_of(model)
    assert [row_spec(config, name).dim for name in ("item", "user")] == [5, 9]


@every("model", ["dnn", "dlrm", "dcn_v2", "autoint", "masknet", "finalmlp", "own_model:Own"])
def test_a_model_without_first_order_weights_has_rows_of_the_table_s_dim(model: str) -> None:
    config = config_of(model)
    assert [row_spec(config, name).dim for name in ("item", "user")] == [4, 8]


def test_a_row_of_lr_is_one_weight_and_another_dim_is_refused() -> None:
    config = config_of("lr", "{default: {optimizer: sgd}}")
    assert row_spec(config, "user").dim == 1 and row_spec(config, "user").optimizer.name == "sgd"
    assert row_spec(config_of("lr", "{item: {dim: 1}}"), "item").dim == 1
    with pytest.raises(ConfigError, match=r"tables\.item\.dim: 4 has no effect with model\.name: lr"):
        config_of("lr", "{item: {dim: 4}}")

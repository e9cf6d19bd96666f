"""Settings of tables: frozen ones, compression of their own, admission and eviction. What does not go together, or
changes nothing, is one line that names it."""

from __future__ import annotations

import pytest

from shardkeep import EmbeddingClient
from shardkeep.base.errors import ConfigError
from shardkeep.compression.per_table import TablePush, pull_of, push_of
from shardkeep.config import CompressionConfig, parse_config
from shardkeep.ps.config import TableSpec
from tests.support.cases import every

ROWS = 262_144
DECAY = "optimizer: {name: sgd, weight_decay: 0.1, weight_decay_on: table}"


@every(
    ("table", "says"),
    [
        ("freeze: true, admit: {min_count: 2}", "tables.t: admit: with freeze: true"),
        ("freeze: true, evict: {ttl_steps: 5}", "tables.t: evict: with freeze: true"),
        (f"freeze: true, {DECAY}", "tables.t: optimizer.weight_decay_on: table with freeze: true"),
        ("compression: {push: {values: int8}}", "allowed: none, fp32, fp16, safe, balanced or extreme"),
        ("compression: dgc", "tables.t.compression: 'dgc' is not allowed; allowed: none, fp32"),
        (
            f"compression: balanced, {DECAY}",
            "tables.t.optimizer.weight_decay_on: table with tables.t.compression: balanced",
        ),
        ("evict: {ttl_steps: 9, policy: lru}", "policy: lru changes nothing"),
        ("evict: {ttl_steps: 9, decay: 0.5}", "decay: 0.5 changes nothing"),
        (f"evict: {{max_rows: {ROWS}, policy: lru, decay: 0.5}}", "decay: 0.5 changes nothing"),
        ("evict: {ttl_steps: 9, decay_steps: 5}", "decay_steps: 5 changes nothing"),
        (f"evict: {{max_rows: {ROWS}, sweep_steps: 5}}", "sweep_steps: 5 changes nothing"),
        (f"evict: {{max_rows: {ROWS - 1}}}", "evict.max_rows"),
        ("evict: {policy: lru}", "no rule"),
        ("evict: {}", "no rule"),
        ("admit: {}", "tables.t.admit.min_count"),
    ],
)
def test_what_does_not_go_together_or_changes_nothing_is_one_line_with_its_name(table: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(f"{{compression: {{push: {{values: fp16, pool_rows: 9}}}}, tables: {{t: {{{table}}}}}}}")
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_table_is_checked_against_the_compression_of_its_job_or_client() -> None:
    text = "{compression: {push: {select: top_k, keep: 0.1, pool_rows: 9}}, tables: {t: {compression: fp16}}}"
    with pytest.raises(ConfigError, match=r"tables.t.compression: fp16 with compression.push.select: top_k, which"):
        parse_config(text)
    own = TableSpec(name="t", compression="balanced")
    with pytest.raises(
        ConfigError, match=r"tables.t.compression: balanced sends 0.25 of the rows and needs compression"
    ):
        EmbeddingClient.local([own])
    job = CompressionConfig.model_validate({"push": {"values": "int8", "pool_rows": 9}})
    EmbeddingClient.local([own], compression=job).close()


def test_a_table_takes_formats_and_share_of_its_recipe_and_all_else_of_the_job() -> None:
    config = parse_config(
        """
        compression:
          push: {values: int8, scale: fp16, keep: 0.1, pool_rows: 9, second_moment: true}
          pull: {values: fp16}
        tables:
          none: {compression: none}
          share: {compression: balanced}
          safe: {compression: safe, freeze: true}
        """
    )
    compression = config.compression
    push = {name: push_of(config.table(name).compression, compression.push) for name in (*config.tables, "job")}
    assert push["none"] == TablePush("fp32", None, 1.0, second_moment=False, whole=True)
    assert push["share"] == TablePush("int2", "pow2", 0.25, second_moment=True)
    assert push["safe"] == TablePush("int4", "pow2", 1.0, second_moment=True)
    assert push["job"] == TablePush("int8", "fp16", 0.1, second_moment=True)
    pulls = [pull_of(table, compression.pull) for table in (None, "none", "balanced")]
    assert [(pull.values, pull.scale) for pull in pulls] == [("fp16", None), ("fp32", None), ("int4", "fp16")]
    default = parse_config("{tables: {default: {compression: safe}, t: {freeze: true}}}")
    assert default.table("t").compression == default.table("other").compression == "safe"

"""Settings of tables: frozen ones, compression of their own, admission and eviction. What does not go together, or
changes nothing, is one line that names it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardkeep import EmbeddingClient
from shardkeep.base.errors import ConfigError
from shardkeep.compression.per_table import Numbers, pull_of, push_of
from shardkeep.config import CompressionConfig, TableCompressionConfig, parse_config
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
        ("freeze: true, compression: {push: {values: int8}}", "tables.t: compression.push: with freeze: true"),
        ("compression: {push: {values: fp32, scale: pow2}}", "push.scale: has no effect with values: fp32"),
        ("compression: {push: {scale: pow2}}", "tables.t.compression.push.scale: has no effect with values: fp16"),
        ("compression: {pull: {scale: pow2}}", "tables.t.compression.pull.scale: has no effect with values: fp32"),
        ("compression: {push: {keep_rows: 0}}", "tables.t.compression.push.keep_rows: 0"),
        ("compression: {push: {pool_rows: 10}}", "tables.t.compression.push.pool_rows: unknown key"),
        (
            f"compression: {{push: {{keep_rows: 0.5}}}}, {DECAY}",
            "tables.t.optimizer.weight_decay_on: table with tables.t.compression.push.keep_rows: 0.5",
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
        parse_config(f"{{compression: {{push: {{values: fp16}}}}, tables: {{t: {{{table}}}}}}}")
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_table_is_checked_against_the_compression_of_its_job_or_client() -> None:
    text = "{compression: {push: {keep_values: 0.1, pool_rows: 9}}, tables: {t: {compression: {push: {values: int8}}}}}"
    with pytest.raises(ConfigError, match=r"tables.t.compression.push: with compression.push.keep_values: 0.1"):
        parse_config(text)
    parse_config(text.replace("push: {values: int8}", "pull: {values: int8}"))
    own = TableCompressionConfig.model_validate({"push": {"scale": "fp16"}})
    with pytest.raises(ConfigError, match=r"tables.t.compression.push.scale: has no effect with values: fp32"):
        EmbeddingClient.local([TableSpec(name="t", compression=own)])
    job = CompressionConfig.model_validate({"push": {"values": "int8"}})
    EmbeddingClient.local([TableSpec(name="t", compression=own)], compression=job).close()


def test_a_table_takes_from_the_job_what_it_leaves_out() -> None:
    config = parse_config(
        """
        compression:
          push: {values: int8, scale: fp16, keep_rows: 0.1, pool_rows: 9}
          pull: {values: fp16}
        tables:
          default: {compression: {push: {keep_rows: 0.5}}}
          format: {compression: {push: {values: int4}}}
          share: {compression: {push: {keep_rows: 1.0}, pull: {values: int8}}}
          whole: {compression: {push: {values: fp32, keep_rows: 1.0}}}
          job: {compression: {}}
          frozen: {freeze: true}
        """
    )
    push = {name: push_of(config.table(name).compression, config.compression.push) for name in config.tables}
    eighth = Numbers("int8", "fp16")
    assert (push["format"].numbers, push["format"].keep) == (Numbers("int4"), 0.1)
    assert (push["share"].numbers, push["share"].keep, push["share"].whole) == (eighth, 1.0, False)
    assert (push["whole"].numbers, push["whole"].keep, push["whole"].whole) == (Numbers("fp32"), 1.0, True)
    assert (push["job"].numbers, push["job"].keep) == (eighth, 0.1)
    assert push_of(config.table("other").compression, config.compression.push).keep == 0.5
    assert pull_of(config.table("share").compression, config.compression.pull) == Numbers("int8")
    assert pull_of(config.table("whole").compression, config.compression.pull) == Numbers("fp16")
    frozen = config.table("frozen").compression
    assert frozen is not None and frozen.push.keep_rows is None


@every(
    "table",
    [
        {"evict": {"ttl_steps": 9, "sweep_steps": 5}},
        {"evict": {"max_rows": ROWS, "decay": 0.5, "decay_steps": 5}},
        {"evict": {"max_rows": ROWS, "policy": "lru"}},
        {"admit": {"min_count": 2, "window_steps": 5}},
    ],
)
def test_settings_that_go_together_are_accepted_and_read_again(table: dict[str, Any]) -> None:
    config = parse_config(json.dumps({"data": {"synthetic": {}}, "tables": {"C1": table}}))
    assert parse_config(config.to_yaml()) == config
    (kind,) = table
    assert getattr(config.table("C1"), kind).model_dump(include=set(table[kind]), mode="json") == table[kind]

"""Tables with policies in a loop of the user's own: rows go, wrong rules are refused, saved states hold all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardkeep import EmbeddingClient, TableSpec
from shardkeep.base.errors import ConfigError
from tests.support.cases import every

POLICIES: dict[str, Any] = {"admit": {"min_count": 2}, "evict": {"ttl_steps": 2, "sweep_steps": 1}}


def spec_of(name: str = "t", **more: Any) -> TableSpec:
    return TableSpec(name=name, dim=2, optimizer={"name": "sgd"}, **more)  # type: ignore[arg-type]


def trained(client: EmbeddingClient, steps: int) -> dict[str, Any]:
    """New ids come with each step, and half of those of the step before."""
    for _ in range(steps):
        rows = client.lookup({"t": torch.arange(client.step * 5, client.step * 5 + 10)})
        rows["t"].sum().backward()  # type: ignore[union-attr]
        client.apply(rows)
    return dict(client.summary(digest=True))


def test_rows_go_in_a_loop_and_a_saved_state_has_what_was_counted(tmp_path: Path) -> None:
    with EmbeddingClient.local([spec_of(**POLICIES)], consistency="sync") as client:
        trained(client, 6)
        client.save(tmp_path / "saved")
        whole = trained(client, 6)
    (table,) = whole["tables"]
    assert (table["admitted_rows"], table["refused_rows"], table["candidates"]) == (55, 65, 10)
    assert table["rows"] == table["admitted_rows"] - table["evicted_rows"] == 15
    with EmbeddingClient.local([spec_of(**POLICIES)], consistency="sync") as client:
        client.restore(tmp_path / "saved")
        assert trained(client, 6)["state_digest"] == whole["state_digest"]
    with EmbeddingClient.local([spec_of()], consistency="sync") as client:
        client.restore(tmp_path / "saved")  # other rules: the rows stay from here on
        (table,) = trained(client, 6)["tables"]
        assert "evicted_rows" not in table and table["rows"] > 15


def test_rows_that_fill_sets_count_as_pushed_once() -> None:
    evict = {"ttl_steps": 6, "sweep_steps": 1}
    with EmbeddingClient.local([spec_of(evict=evict)], consistency="sync") as client:
        client.fill({"t": torch.ones(20, 2)})
        (table,) = trained(client, 1)["tables"]
        assert (table["rows"], table["evicted_rows"]) == (20, 0)
        (table,) = trained(client, 20)["tables"]
        assert table["evicted_rows"] > 0


@every("mode", ["sync", "bounded"])
def test_a_clock_decides_only_outside_of_sync(mode: str) -> None:
    table = spec_of(evict={"ttl_s": 60})
    if mode == "bounded":
        with EmbeddingClient.local([table], consistency=mode) as client:
            assert trained(client, 2)["tables"][0]["rows"] == 15
        return
    with pytest.raises(ConfigError, match=r"^tables\.t\.evict\.ttl_s with consistency\.mode: sync"):
        EmbeddingClient.local([table], consistency=mode)
    with (
        pytest.raises(ConfigError, match=r"^tables\.t\.evict\.ttl_s with consistency\.mode: sync"),
        EmbeddingClient.serve([table], servers=1, consistency=mode),
    ):
        raise AssertionError("unreachable")


def test_a_table_with_the_name_of_the_counts_of_another_is_refused() -> None:
    tables = [spec_of(admit={"min_count": 2}), spec_of("t (counts)")]
    with pytest.raises(ConfigError, match=r"^tables\.t\.admit\.min_count: its ids are counted in a table t \(counts\)"):
        EmbeddingClient.local(tables)

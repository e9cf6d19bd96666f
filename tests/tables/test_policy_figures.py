"""`shardkeep tables` of tables with admission and eviction: what policies did, ages and scores of rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

import shardkeep
from shardkeep.cli.main import app
from shardkeep.ps.checkpoints.folder import Checkpoint, Checkpoints
from shardkeep.ps.checkpoints.row_stream import count_candidates, stream_rows
from shardkeep.ps.config import TableSpec
from shardkeep.ps.server.snapshot.files import load_snapshots, write_snapshot
from shardkeep.ps.server.table.policies.config import AdmitConfig, EvictConfig
from shardkeep.ps.server.tables import Tables
from shardkeep.tables.counters import Bin, Histogram
from shardkeep.tables.figures import figures_of
from tests.support.cases import every
from tests.support.click_files import click_job, click_rows, write_csv
from tests.support.tables import gradients


def spec_of(evict: EvictConfig | None, admit: AdmitConfig | None = None) -> TableSpec:
    return TableSpec(name="t", dim=2, optimizer={"name": "sgd"}, evict=evict, admit=admit)  # type: ignore[arg-type]


def push(tables: Tables, step: int, *ids: int) -> None:
    grads = {0: (np.array(sorted(ids)), np.ones((len(ids), 2), np.float32))}
    tables.apply([gradients(grads)], step=step)


def saved(folder: Path, tables: Tables, step: int, base: Checkpoint | None = None) -> Checkpoint:
    checkpoints = Checkpoints(folder)
    snapshot = tables.snapshot("" if base is None else base.id)
    assert snapshot.full is (base is None)
    checkpoint = checkpoints.commit(step, write_snapshot(snapshot, checkpoints.begin(step), shard=0), {}, base=base)
    tables.changed.complete(checkpoint.id)
    return checkpoint


def test_the_figures_of_policies_are_those_of_the_summary(tmp_path: Path) -> None:
    tables = {
        "default": {"dim": 4},
        "user": {"admit": {"min_count": 2, "window_steps": 5}, "evict": {"ttl_steps": 4, "sweep_steps": 2}},
        "item": {"dtype": "int8", "admit": {"probability": 0.5}},
    }
    job = click_job(
        write_csv(tmp_path / "train.csv", click_rows(1000)),
        tables=tables,
        checkpoint={"every_steps": 7, "full_every": 3},
    )
    shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=tmp_path / "run", quiet=True)
    summary = {t["name"]: t for t in json.loads((tmp_path / "run" / "summary.json").read_text())["tables"]}
    found = CliRunner().invoke(app, ["tables", str(tmp_path / "run"), "--json"])
    assert found.exit_code == 0
    listed = {table["name"]: table for table in json.loads(found.stdout)["tables"]}
    for name, keys in {
        "user": ("rows", "admitted_rows", "refused_rows", "evicted_rows", "candidates"),
        "item": ("rows", "admitted_rows", "refused_rows"),
    }.items():
        assert {key: listed[name][key] for key in keys} == {key: summary[name][key] for key in keys}
    assert listed["user"]["candidates"] > 0 and listed["user"]["evicted_rows"] > 0
    assert sum(bin["rows"] for bin in listed["user"]["ages"]) == listed["user"]["rows"]
    assert not {"evicted_rows", "candidates", "ages"} & set(listed["item"])
    assert not {"admitted_rows", "refused_rows", "evicted_rows", "candidates", "ages"} & set(listed["tags"])
    text = CliRunner().invoke(app, ["tables", str(tmp_path / "run")]).stdout
    assert "policies of table" in text and text.count("user") == 2 and text.count("tags") == 1
    text = CliRunner().invoke(app, ["tables", str(tmp_path / "run"), "--table", "user"]).stdout
    assert "steps since the last push" in text and "score" in text and "ids without a row" in text


def test_ages_and_scores_are_those_of_the_pushes_through_increments(tmp_path: Path) -> None:
    spec = spec_of(EvictConfig(ttl_steps=1000, decay=0.5, decay_steps=1, max_rows=262_144))
    tables = Tables([spec], seed=0)
    tables.changed.follow("")
    push(tables, 0, 1, 2, 3)
    push(tables, 1, 2, 3)
    base = saved(tmp_path, tables, 2)
    push(tables, 2, 3, 4)
    last = saved(tmp_path, tables, 3, base)
    (found,) = figures_of(last)
    assert found.ages == (Bin(0.0, 1.0, 2), Bin(1.0, 2.0, 1), Bin(2.0, 4.0, 1))  # 3 and 4; 2; 1
    assert found.scores == (Bin(0.25, 0.5, 1), Bin(0.5, 1.0, 1), Bin(1.0, 2.0, 2))  # 1; 2: 0.75; 3: 1.75 and 4


def test_rows_of_a_table_that_did_not_count_have_the_counters_that_servers_give_them(tmp_path: Path) -> None:
    plain = Tables([spec_of(None)], seed=0)
    plain.changed.follow("")
    push(plain, 0, 1, 2)
    base = saved(tmp_path, plain, 5)
    tables = Tables([spec_of(EvictConfig(ttl_steps=1000))], seed=0)
    load_snapshots(tables, base, shard=0, num_shards=1)
    tables.changed.follow(base.id)
    push(tables, 8, 2)
    last = saved(tmp_path, tables, 9, base)
    (block,) = stream_rows(last, "t", [(0, 4096)], counters=True)
    read = Tables([spec_of(EvictConfig(ttl_steps=1000))], seed=0)
    load_snapshots(read, last, shard=0, num_shards=1)
    (again,) = stream_rows(saved(tmp_path / "again", read, 9), "t", [(0, 4096)], counters=True)
    clocks = dict(zip(block.ids_N.tolist(), block.counters_NC[:, 0].tolist(), strict=True))
    assert clocks == {1: 5, 2: 8}
    assert np.array_equal(block.counters_NC, again.counters_NC)


def test_counted_ids_are_those_without_a_row_through_increments(tmp_path: Path) -> None:
    tables = Tables([spec_of(None, AdmitConfig(min_count=2))], seed=0)
    tables.changed.follow("")
    push(tables, 0, 1, 2, 3)
    base = saved(tmp_path, tables, 1)
    push(tables, 1, 1, 4)
    last = saved(tmp_path, tables, 2, base)
    assert count_candidates(base, "t") == 3 and count_candidates(last, "t") == 3  # 2, 3, 4
    (found,) = figures_of(last)
    assert found.rows == 1
    assert found.policy_counts == {"admitted_rows": 1, "refused_rows": 4, "candidates": 3}


@every(
    ("numbers", "bins"),
    [([0.0, 0.5], [(0, 1, 2)]), ([1, 3, 3, 16], [(1, 2, 1), (2, 4, 2), (4, 8, 0), (8, 16, 0), (16, 32, 1)]), ([], [])],
)
def test_a_bin_is_twice_as_wide_as_the_one_before(numbers: list[float], bins: list[tuple[int, int, int]]) -> None:
    histogram = Histogram(0)
    histogram.add(np.array(numbers, dtype=np.float64))
    assert [(bin.first, bin.end, bin.rows) for bin in histogram.bins()] == bins

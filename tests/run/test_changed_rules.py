"""A resume with other rules of admission and eviction, and what increments of the old rules then mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

from shardkeep.base.yaml_text import write_yaml
from shardkeep.cli.main import app
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.config import TableSpec
from shardkeep.ps.server.snapshot.files import load_snapshots, write_snapshot
from shardkeep.ps.server.tables import Tables
from tests.support.cases import every
from tests.support.click_files import click_job, click_rows, write_csv
from tests.support.tables import gradients

ADMIT, EVICT = {"min_count": 2, "window_steps": 5}, {"ttl_steps": 4, "sweep_steps": 2}


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stderr


def stopped_run(folder: Path, tables: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """A run that ended at step 20, and its figures of the table `user`."""
    csv = write_csv(folder / "train.csv", click_rows(1600))
    job = click_job(csv, tables={"default": {"dim": 4}, **tables}, checkpoint={"every_steps": 7, "full_every": 3})
    (folder / "job.yaml").write_text(write_yaml(job))
    run = folder / "run"
    assert invoke("train", str(folder / "job.yaml"), "--set", "train.max_steps=20", "--run-dir", str(run)) == (0, "")
    return run, user_table(run)


def user_table(run: Path) -> dict[str, Any]:
    tables = json.loads((run / "summary.json").read_text())["tables"]
    return next(dict(table) for table in tables if table["name"] == "user")


def resumed(run: Path, *settings: str) -> tuple[int, str]:
    changes = [word for setting in ("train.max_steps=40", *settings) for word in ("--set", setting)]
    return invoke("train", "--resume", str(run), *changes)


@every("named", [True, False], ids=["a named table", "a table of the default"])
def test_rules_that_a_resume_switches_on_hold_for_rows_of_before_and_other_changes_are_refused(
    tmp_path: Path, named: bool
) -> None:
    run, before = stopped_run(tmp_path, {"user": {}} if named else {})
    for setting in ("tables.user.dim=5", "tables.user.dtype=int8", "tables.item.dim=5"):
        code, error = resumed(run, setting)
        assert code == 2 and "may not change when a job continues" in error and "tables.TABLE.evict" in error
    evict, admit = f"tables.user.evict={json.dumps(EVICT)}", f"tables.user.admit={json.dumps(ADMIT)}"
    assert resumed(run, evict, admit)[0] == 0
    table = user_table(run)
    assert table["evicted_rows"] > before["rows"] - 40 and table["candidates"] > 0
    assert table["rows"] == before["rows"] + table["admitted_rows"] - table["evicted_rows"] < before["rows"]


def test_rules_that_a_resume_switches_off_leave_the_rows_that_are_there(tmp_path: Path) -> None:
    run, before = stopped_run(tmp_path, {"user": {"evict": EVICT, "admit": ADMIT}})
    assert before["evicted_rows"] > 0
    assert resumed(run, "tables.user.evict=null", "tables.user.admit=null")[0] == 0
    table = user_table(run)
    assert table["rows"] > before["rows"] + 20 and not {"evicted_rows", "admitted_rows", "candidates"} & set(table)


@every("later", [{"ttl_steps": 1000}, None], ids=["still on", "off"])
def test_a_servers_part_with_all_rows_in_an_increment_ends_the_rows_that_it_lacks(
    tmp_path: Path, later: dict[str, Any] | None
) -> None:
    """The job that loads it may have switched eviction off."""
    spec = TableSpec(name="t", dim=2, optimizer={"name": "sgd"}, evict={"ttl_steps": 1000})  # type: ignore[arg-type]
    checkpoints, ids = Checkpoints(tmp_path), np.arange(10)
    before = Tables([spec], seed=0)
    before.apply([gradients({0: (ids, np.ones((10, 2), np.float32))})], step=0)
    base = checkpoints.commit(1, write_snapshot(before.snapshot(), checkpoints.begin(1), shard=0), {})
    after = Tables([spec], seed=0)
    after.apply([gradients({0: (ids[:4], np.ones((4, 2), np.float32))})], step=1)
    last = checkpoints.commit(2, write_snapshot(after.snapshot(), checkpoints.begin(2), shard=0), {}, base=base)
    loaded = Tables([spec.model_copy(update={"evict": None if later is None else spec.evict})], seed=0)
    load_snapshots(loaded, last, shard=0, num_shards=1)
    assert loaded[0].num_rows == 4

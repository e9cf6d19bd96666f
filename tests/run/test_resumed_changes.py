"""A resume with other rules of admission and eviction, or with its data at another place or in another form."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from shardkeep.base.yaml_text import read_yaml, write_yaml
from shardkeep.cli.main import app
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.config import TableSpec
from shardkeep.ps.server.snapshot.files import load_snapshots, write_snapshot
from shardkeep.ps.server.tables import Tables
from tests.support.cases import every
from tests.support.click_files import click_job, click_rows, write_csv
from tests.support.tables import gradients

ADMIT, EVICT = {"min_count": 2, "window_steps": 5}, {"ttl_steps": 4, "sweep_steps": 2}


def train(*words: object, settings: tuple[str, ...] = ()) -> tuple[int, str]:
    changes = [word for setting in settings for word in ("--set", setting)]
    done = CliRunner().invoke(app, ["train", *map(str, words), *changes])
    return done.exit_code, done.stderr


def stopped_run(folder: Path, tables: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """A run that ended at step 20, and its figures of the table `user`."""
    csv = write_csv(folder / "train.csv", click_rows(1600))
    job = click_job(csv, tables={"default": {"dim": 4}, **tables}, checkpoint={"every_steps": 7, "full_every": 3})
    (folder / "job.yaml").write_text(write_yaml(job))
    run = folder / "run"
    assert train(folder / "job.yaml", "--run-dir", run, settings=("train.max_steps=20",)) == (0, "")
    return run, user_table(run)


def user_table(run: Path) -> dict[str, Any]:
    tables = json.loads((run / "summary.json").read_text())["tables"]
    return next(dict(table) for table in tables if table["name"] == "user")


def resumed(run: Path, *settings: str) -> tuple[int, str]:
    return train("--resume", run, settings=("train.max_steps=40", *settings))


@every("named", [True, False], ids=["a named table", "a table of the default"])
def test_rules_that_a_resume_switches_on_hold_for_rows_of_before_and_other_changes_are_refused(
    tmp_path: Path, named: bool
) -> None:
    run, before = stopped_run(tmp_path, {"user": {}} if named else {})
    for setting in ("tables.user.dtype=int8", "tables.item.dim=5") if named else ():
        code, error = resumed(run, setting)
        assert code == 2 and "may not change when a job continues" in error and error.count("tables.TABLE.") == 3
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


@every("evicts", [True, False], ids=["still on", "off"])
def test_a_servers_part_with_all_rows_in_an_increment_ends_the_rows_that_it_lacks(tmp_path: Path, evicts: bool) -> None:
    """The job that loads it may have switched eviction off."""
    spec = TableSpec(name="t", dim=2, optimizer={"name": "sgd"}, evict={"ttl_steps": 1000})  # type: ignore[arg-type]
    checkpoints, ids, last = Checkpoints(tmp_path), np.arange(10), None
    for step, kept in ((1, 10), (2, 4)):
        tables = Tables([spec], seed=0)
        tables.apply([gradients({0: (ids[:kept], np.ones((kept, 2), np.float32))})], step=step - 1)
        parts = write_snapshot(tables.snapshot(), checkpoints.begin(step), shard=0)
        last = checkpoints.commit(step, parts, {}, base=last)
    loaded = Tables([spec if evicts else spec.model_copy(update={"evict": None})], seed=0)
    assert last is not None
    load_snapshots(loaded, last, shard=0, num_shards=1)
    assert loaded[0].num_rows == 4


def test_the_line_to_train_longer_leads_to_rates_above_0_and_a_rate_of_0_is_warned_of(tmp_path: Path) -> None:
    schedule = {"decay": "cosine", "decay_steps": 14}
    falling = {"decay": "exponential", "warmup_steps": 4, "decay_steps": 3, "final_factor": 0.005}
    job = click_job(
        write_csv(tmp_path / "train.csv", click_rows(400)),
        tables={"default": {"dim": 4, "optimizer": {"name": "adagrad", "schedule": schedule}}},
        tower={"amp": "off", "optimizer": {"lr": 0.002, "schedule": falling}},
    ) | {"train": {"batch_size": 32, "max_steps": 14, "epochs": 2}}
    (tmp_path / "job.yaml").write_text(write_yaml(job))
    run, again = tmp_path / "run", tmp_path / "again"
    done = CliRunner().invoke(app, ["train", str(tmp_path / "job.yaml"), "--run-dir", str(run)])
    shown = " ".join(done.output.split())
    assert done.exit_code == 0 and "warning: t" not in shown, shown
    shutil.copytree(run, again)
    digests = [json.loads((run / "summary.json").read_text())["state_digest"]]
    for folder, command in (
        (run, shown.split("to train longer: shardkeep ")[1].split(" steps 14 ")[0].split()),
        (again, ["train", "--resume", str(again), "--set", "train.epochs=4", "--set", "train.max_steps=28"]),
    ):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        digests.append(json.loads((folder / "summary.json").read_text())["state_digest"])
        for key in ("tables.default", "tower"):
            warning = f"warning: {key}.optimizer.schedule: the learning rate is 0 from step 14 to the end, 28"
            assert (warning in " ".join(done.output.split())) == (folder == again), done.output
    assert digests[1] != digests[0]


# ---- data at another place, or in another form ----


PARTS = {"train": (1600, 1), "eval": (300, 2)}


def written(folder: Path, seed: int = 0) -> dict[str, Path]:
    folder.mkdir()
    return {
        part: write_csv(folder / f"{part}.csv", click_rows(rows, seed=seed + own))
        for part, (rows, own) in PARTS.items()
    }


def moved(run: Path, steps: int, files: dict[str, Path], *more: str) -> tuple[int, str]:
    places = (f"data.{part}=[{path}]" for part, path in files.items())
    return train("--resume", run, settings=(f"train.max_steps={steps}", *places, *more))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two equal runs that stopped at step 10; the data of `run` are gone."""
    home = tmp_path_factory.mktemp("home")
    files = {part: [str(path)] for part, path in written(home / "data").items()}
    job: dict[str, Any] = click_job(Path(files["train"][0]))
    job["data"] |= files
    del job["data"]["split"]
    (home / "job.yaml").write_text(write_yaml(job))
    assert train(home / "job.yaml", "--run-dir", home / "run", settings=("train.max_steps=10",)) == (0, "")
    shutil.copytree(home / "run", home / "whole")
    assert train("--resume", home / "whole", settings=("train.max_steps=40",)) == (0, "")
    (home / "data").rename(home / "elsewhere")
    return home


def test_data_that_are_gone_are_missed_with_the_option_that_the_command_has(home: Path, tmp_path: Path) -> None:
    gone = home / "data"
    code, error = train("--resume", home / "run", settings=("train.max_steps=20",))
    assert code == 2 and error.count("\n") == 1
    assert error.startswith(f"error: {gone / 'train.csv'}: no such file (data.train); there is no folder {gone}; ")
    assert error.endswith("; --set data.train=PATH or --set data.root=FOLDER names their place now\n")
    run = Path(shutil.copytree(home / "run", tmp_path / "run"))
    config = read_yaml((run / "config.yaml").read_text())
    config["data"]["test"] = [str(gone / "test.csv")]
    (run / "config.yaml").write_text(write_yaml(config))
    for split in ("eval", "test"):
        done = CliRunner().invoke(app, ["evaluate", str(run), "--split", split])
        assert done.exit_code == 2
        assert done.stderr.endswith("; allowed: --data FILE, wherever the data are now\n"), done.stderr


def test_the_same_data_at_another_place_and_in_another_form_continue_with_the_same_bits_and_others_are_refused(
    home: Path, tmp_path: Path
) -> None:
    code, error = moved(home / "run", 20, written(tmp_path / "other", seed=50))
    assert code == 2 and error.count("\n") == 1 and "data: the training data are not those of " in error
    there = {part: home / "elsewhere" / f"{part}.csv" for part in PARTS}
    assert moved(home / "run", 20, there) == (0, "")
    parquet = {part: tmp_path / f"{part}.parquet" for part in PARTS}
    text = pyarrow.csv.ConvertOptions(column_types={"tags": pyarrow.string()})
    for part, path in parquet.items():
        pyarrow.parquet.write_table(pyarrow.csv.read_csv(there[part], convert_options=text), path)
    assert moved(home / "run", 40, parquet, "data.source=parquet") == (0, "")
    ours, whole = (json.loads((home / name / "summary.json").read_text()) for name in ("run", "whole"))
    assert ours["state_digest"] == whole["state_digest"]

"""`init: {name: file}`: a job that begins with rows of the user's own."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import shardkeep
from shardkeep.base.errors import ConfigError, DataError, UserError
from shardkeep.cli.main import app
from shardkeep.inference.scoring import evaluate_run
from shardkeep.launch.in_process_job import ShownFolder
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.checkpoints.row_stream import stream_rows
from shardkeep.roles.in_process import run_in_process
from shardkeep.run.folder import RunFolder
from shardkeep.run.origin import pretrained
from shardkeep.run.reader import RunReader
from shardkeep.view.screen import Screen, console
from shardkeep.workers.data.conversion.hashing import hash_text
from tests.support.cases import every
from tests.support.click_files import click_job, click_rows, write_csv
from tests.support.records import records_in

SEEN = np.array([hash_text(str(item).encode()) for item in range(50)])
"""Ids of items in the data; a CSV has texts."""
STRANGERS = np.arange(10_000, 10_100)
"""Ids that are not."""
SHORT = {"max_steps": 1, "batch_size": 32}


def row_file(path: Path, ids: np.ndarray, dim: int = 4, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).normal(size=(ids.size, dim)).astype(np.float32)
    pq.write_table(pa.table({"id": ids, "row": pa.array(list(rows), pa.list_(pa.float32()))}), path)
    return rows


def job_of(folder: Path, init: dict[str, Any] | None, **changes: Any) -> shardkeep.JobConfig:
    data = folder / "train.csv"
    if not data.exists():
        write_csv(data, click_rows(200))
    entry = {} if init is None else {"item": {"init": init}}
    tables = {"default": {"dim": 4, "optimizer": {"name": "rowwise_adagrad", "initial_accumulator": 0.25}}, **entry}
    return shardkeep.JobConfig.model_validate(click_job(data, tables=tables) | changes)


def train(config: shardkeep.JobConfig, run: Path, **options: Any) -> shardkeep.callbacks.Summary:
    return shardkeep.train(config, run_dir=run, quiet=True, **options)


def from_file(path: Path, **law: float) -> dict[str, Any]:
    return {"name": "file", "path": str(path), **law}


def still(optimizer: str = "sgd", **entries: dict[str, Any]) -> dict[str, Any]:
    return {"default": {"dim": 4, "optimizer": {"name": optimizer, "lr": 1e-30}}} | entries


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a completed job that began with a file of the items' rows: `rows.parquet`, `train.csv`, `run`."""
    folder = tmp_path_factory.mktemp("begun")
    row_file(folder / "rows.parquet", SEEN)
    train(job_of(folder, from_file(folder / "rows.parquet")), folder / "run")
    return folder


def test_ids_of_the_file_begin_with_its_rows_and_others_by_the_usual_law(tmp_path: Path) -> None:
    """Texts of the file are the texts of the data; its whole numbers are ids."""
    rows = row_file(tmp_path / "rows.parquet", np.concatenate([SEEN[::2], STRANGERS]))
    texts, law = [f"u{number}" for number in range(0, 200, 2)], {"low": -0.01, "high": 0.02}
    user_rows = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)
    pq.write_table(pa.table({"id": texts, "row": list(user_rows)}), tmp_path / "users.parquet")
    item, user = from_file(tmp_path / "rows.parquet", **law), from_file(tmp_path / "users.parquet", **law)
    train(job_of(tmp_path, None, tables=still(item={"init": item}, user={"init": user})), tmp_path / "run")
    usual = still(item={"init": law}, user={"init": law})
    train(job_of(tmp_path, None, tables=usual), tmp_path / "usual")
    found, expected = shardkeep.load(tmp_path / "run"), shardkeep.load(tmp_path / "usual")
    assert np.array_equal(found.rows("item", np.concatenate([SEEN[::2], STRANGERS])), rows)
    assert np.array_equal(found.rows("user", texts), user_rows)
    others = (("item", SEEN[1::2]), ("item", STRANGERS + 5000), ("user", ["u1", "u3", "nobody"]), ("tags", ["t1"]))
    for table, ids in others:  # trained ones, and ids without a row
        assert np.array_equal(found.rows(table, ids), expected.rows(table, ids))


def test_a_job_with_a_file_repeats_when_the_file_has_gone_once_it_had_begun(begun: Path, tmp_path: Path) -> None:
    run = shutil.copytree(begun / "run", tmp_path / "run")
    rows, summary = begun / "rows.parquet", RunReader(run).summary() or {}
    for path in (run / "checkpoints").glob("step-*[1-9]*"):  # died before a checkpoint of its own
        path.rename(path.with_name(f".{path.name}"))
    (run / "summary.json").unlink()
    hidden = rows.rename(begun / "gone")
    try:
        done = CliRunner().invoke(app, ["train", "--resume", str(run)])
    finally:
        hidden.rename(rows)
    assert done.exit_code == 0 and "at step 0 from step-00000000" in done.output
    assert (RunReader(run).summary() or {})["state_digest"] == summary["state_digest"]
    assert evaluate_run(run)["auc"] == summary["eval"]["auc"]
    without = train(job_of(begun, None), tmp_path / "without")
    assert without.state_digest != summary["state_digest"]
    (event,) = [r for r in records_in(begun / "run" / "metrics.jsonl") if "began" in r.get("text", "")]
    assert event["text"] == f"began with 50 rows of table item from {rows}"


def test_an_export_of_a_run_is_the_start_of_another_job(begun: Path, tmp_path: Path) -> None:
    entries = {}
    for name in ("user", "item"):
        out = tmp_path / f"{name}.parquet"
        command = ["tables", "export", str(begun / "run"), "--table", name, "--out", str(out)]
        assert CliRunner().invoke(app, command).exit_code == 0
        entries[name] = {"init": from_file(out)}
    train(job_of(begun, None, tables=still(**entries)), tmp_path / "second")
    first, second = (shardkeep.load(run) for run in (begun / "run", tmp_path / "second"))
    users = [f"u{number}" for number in range(200)]
    assert np.array_equal(first.rows("item", SEEN), second.rows("item", SEEN))
    assert np.array_equal(first.rows("user", users), second.rows("user", users))


def rows_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rows ")]
    return line


def test_ids_that_the_data_have_are_counted_and_the_optimizer_of_given_rows_is_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, checkpoints = tmp_path / "rows.parquet", Checkpoints(tmp_path / "run" / "checkpoints")
    row_file(path, np.concatenate([SEEN[:20], STRANGERS]))
    shardkeep.train(job_of(tmp_path, from_file(path), train=SHORT), run_dir=tmp_path / "run")
    told = f"rows of table item from {path}"
    assert rows_line(capsys) == f"rows      120 {told}; 20 of 120 ids are in the training data"
    (block,) = stream_rows(checkpoints.load(checkpoints.last_step()), "item")
    untouched = np.isin(block.ids_N, STRANGERS)
    assert untouched.sum() == 100 and (block.slots_NS[untouched] == 0.25).all()
    assert (block.slots_NS[~untouched] >= 0.25).all() and (block.slots_NS[~untouched] > 0.25).any()
    row_file(path, STRANGERS)
    shardkeep.train(job_of(tmp_path, from_file(path), train=SHORT), run_dir=tmp_path / "strange")
    assert rows_line(capsys) == f"rows      warning: 100 {told}; 0 of 100 ids are in the training data"


def test_of_large_data_some_samples_of_all_parts_are_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "MAX_SAMPLES", 60)
    monkeypatch.setattr(pretrained, "BLOCK", 20)
    row_file(tmp_path / "rows.parquet", SEEN)
    shardkeep.train(job_of(tmp_path, from_file(tmp_path / "rows.parquet"), train=SHORT), run_dir=tmp_path / "run")
    found = re.search(r"; (\d+) of 50 ids are in \d\d training samples$", rows_line(capsys))
    assert found is not None and 20 < int(found[1]) < 50


def test_a_model_with_first_order_weights_takes_rows_with_and_without_them(tmp_path: Path) -> None:
    model: dict[str, Any] = {"model": {"name": "deepfm", "hidden": [8]}, "train": SHORT}
    train(job_of(tmp_path, None, tables=still(), **model), tmp_path / "without")
    usual = shardkeep.load(tmp_path / "without").rows("item", SEEN)
    for dim in (4, 5):  # vectors alone, and with the weight
        path = tmp_path / f"{dim}.parquet"
        rows = row_file(path, SEEN, dim)
        train(job_of(tmp_path, None, tables=still(item={"init": from_file(path)}), **model), tmp_path / f"run-{dim}")
        found = shardkeep.load(tmp_path / f"run-{dim}").rows("item", SEEN)
        assert np.array_equal(found[:, :dim], rows) and found.shape == (50, 5)
        assert np.array_equal(found[:, dim:], usual[:, dim:])


def test_a_run_gives_its_tables_and_the_file_a_new_one(tmp_path: Path) -> None:
    """The run's last checkpoint is an increment."""
    before = click_job(write_csv(tmp_path / "train.csv", click_rows(200)))
    before["checkpoint"] = {"every_steps": 4, "full_every": 3}
    before["data"]["sparse"] = ["user", {"column": "tags", "separator": "|"}]
    train(shardkeep.JobConfig.model_validate(before), tmp_path / "first")
    rows = row_file(tmp_path / "rows.parquet", SEEN)
    tables = still("rowwise_adagrad", item={"init": from_file(tmp_path / "rows.parquet")})
    after = click_job(tmp_path / "train.csv", tables=tables)
    after["data"]["sparse"] = [*before["data"]["sparse"], "item"]
    train(shardkeep.JobConfig.model_validate(after), tmp_path / "second", from_run=tmp_path / "first")
    first, second = (shardkeep.load(tmp_path / name) for name in ("first", "second"))
    last = Checkpoints(tmp_path / "first" / "checkpoints").latest()
    assert last is not None and last.base is not None
    assert np.array_equal(second.rows("item", SEEN), rows)
    assert np.array_equal(second.rows("user", ["u1", "u2"]), first.rows("user", ["u1", "u2"]))


def test_the_next_day_begins_with_the_run_and_not_with_the_file_again(begun: Path, tmp_path: Path) -> None:
    shutil.copy(begun / "train.csv", tmp_path)
    gone = from_file(begun / "rows.parquet")
    monday = shutil.copytree(begun / "run", tmp_path / "monday")
    hidden = (begun / "rows.parquet").rename(begun / "gone")
    try:
        train(job_of(tmp_path, gone), tmp_path / "tuesday", from_run=monday)
    finally:
        hidden.rename(begun / "rows.parquet")
    with pytest.raises(ConfigError, match=r"tables\.item\.init: .* was trained with .*rows\.parquet"):
        train(job_of(tmp_path, None), tmp_path / "other", from_run=monday)


def file_with_an_id_twice(path: Path) -> None:
    rows = pa.array([[1.0, 2.0, 3.0, 4.0]] * 3, pa.list_(pa.float32()))
    pq.write_table(pa.table({"id": ["u1", "2", " u1"], "row": rows}), path)


@every(
    ("make", "error", "text"),
    [
        (file_with_an_id_twice, DataError, "{path}, rows 1 and 3: both have id 'u1'; allowed: one row an id"),
        (lambda path: row_file(path, SEEN, dim=6), ConfigError, "{path} have 6 values; allowed for table item: 4"),
        (lambda path: None, UserError, "{path}: cannot be read (No such file or directory)"),
        (lambda path: path.write_text("id,row"), DataError, "{path}: damaged, or no Parquet file"),
    ],
)
def test_a_file_that_does_not_fit_is_named_and_there_is_no_run(
    tmp_path: Path, make: Callable[[Path], object], error: type[Exception], text: str
) -> None:
    path = tmp_path / "rows.parquet"
    make(path)
    with pytest.raises(error) as caught:
        train(job_of(tmp_path, from_file(path)), tmp_path / "run")
    assert str(caught.value).startswith("tables.item.init.path: ") and text.format(path=path) in str(caught.value)
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


IN_USER = "tables: {{user: {{init: {}}}}}"


def test_what_would_not_keep_or_read_given_rows_is_refused(tmp_path: Path) -> None:
    row_file(tmp_path / "rows.parquet", SEEN)
    tables = {"default": {"dim": 4, "optimizer": "ftrl"}, "item": {"init": from_file(tmp_path / "rows.parquet")}}
    with pytest.raises(ConfigError, match=r"init\.name: file with optimizer\.name: ftrl"):
        train(job_of(tmp_path, None, tables=tables), tmp_path / "run")
    spec = shardkeep.TableSpec(name="user", dim=4, init=shardkeep.config.InitConfig(name="file", path="a.npy"))
    with pytest.raises(ConfigError, match=r"tables\.user\.init\.name: file; .* fill the table by client\.fill"):
        shardkeep.EmbeddingClient.local([spec])
    (tmp_path / "job.yaml").write_text(IN_USER.format("{name: file, path: a.npy}"))
    done = CliRunner().invoke(app, ["with", "--config", str(tmp_path / "job.yaml"), "--", "true"])
    assert done.exit_code == 2 and done.stderr.count("\n") == 1 and "fill the table by client.fill" in done.stderr


def test_a_process_that_does_not_see_the_start_refuses_to_begin_without_rows(tmp_path: Path) -> None:
    row_file(tmp_path / "rows.parquet", SEEN)
    config = job_of(tmp_path, from_file(tmp_path / "rows.parquet"))
    folder = RunFolder.create(tmp_path / "run", config)
    with pytest.raises(ConfigError, match=r"tables\.item\.init\.name: file; .* there is none in .*run/checkpoints"):
        run_in_process(config, ShownFolder(folder, Screen(console(quiet=True))), folder=folder.path)

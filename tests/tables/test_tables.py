"""`shardkeep tables` and `tables export`: figures and files of a run's rows, against the rows that a Predictor has."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import shardkeep
from shardkeep.base.errors import CheckpointError
from shardkeep.cli.main import app
from shardkeep.ps.checkpoints import row_stream
from shardkeep.ps.checkpoints.folder import Checkpoint, Checkpoints
from shardkeep.ps.config import TableSpec
from shardkeep.ps.placement import keys_of
from shardkeep.ps.server.snapshot.files import write_snapshot
from shardkeep.ps.server.tables import Tables
from shardkeep.row_files.registry import FORMS, open_rows
from shardkeep.run.trained import with_checkpoint
from shardkeep.tables.export import export_table
from shardkeep.tables.figures import Norms, figures_of
from tests.support.cases import every
from tests.support.click_files import click_job, click_rows, write_csv


def invoke(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    tables = {"default": {"dim": 4}, "item": {"optimizer": {"name": "adam"}}, "tags": {"optimizer": {"name": "ftrl"}}}
    job = click_job(write_csv(folder / "train.csv", click_rows(600)), tables=tables)
    shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=folder / "run", quiet=True)
    return folder / "run"


def rows_of(path: Path) -> tuple[np.ndarray, np.ndarray]:
    chunks = list(open_rows(path, key="rows").chunks())
    return np.concatenate([ids for ids, _ in chunks]), np.concatenate([rows for _, rows in chunks])


# ---- figures ----


def test_the_figures_are_those_of_the_summary_and_of_the_rows(run: Path, tmp_path: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    code, out, error = invoke("tables", str(run), "--json")
    found = json.loads(out)
    assert (code, error) == (0, "") and (found["step"], found["ended"]) == (summary["steps"], True)
    for key in ("rows", "load_factor"):
        expected = {table["name"]: table[key] for table in summary["tables"]}
        assert {table["name"]: table[key] for table in found["tables"]} == expected and min(expected.values()) > 0
    slots = {"user": 1, "item": 8, "tags": 8}
    for table in found["tables"]:
        out_file = tmp_path / f"{table['name']}.npy"
        assert invoke("tables", "export", str(run), "--table", table["name"], "--out", str(out_file))[0] == 0
        norms = np.linalg.norm(rows_of(out_file)[1].astype(float), axis=1)
        assert table["bytes"] == {"rows": 24 * norms.size, "optimizer": 4 * slots[table["name"]] * norms.size}
        assert table["norm"]["mean"] == pytest.approx(norms.mean()) and table["norm"]["max"] == pytest.approx(
            norms.max()
        )
        exact = np.sort(norms)[[max(0, -(-p * norms.size // 100) - 1) for p in (1, 50, 99)]]
        assert [table["norm"][f"p{p}"] for p in (1, 50, 99)] == pytest.approx(exact, rel=1e-3)
        assert table["not_finite"] == 0 and "top" not in table


@every(("table", "by"), [("user", "squared_gradients"), ("item", "norm"), ("tags", "squared_gradients")])
def test_one_table_has_its_top_rows(run: Path, table: str, by: str) -> None:
    code, out, _ = invoke("tables", str(run), "--table", table, "--top", "5", "--json")
    (found,) = json.loads(out)["tables"]
    top = found["top"]
    assert code == 0 and top["by"] == by and len(top["rows"]) == 5
    values = [row[by] for row in top["rows"]]
    assert values == sorted(values, reverse=True) and values[0] > 0
    assert [row["squared_gradients"] is None for row in top["rows"]] == [by == "norm"] * 5
    norms = np.linalg.norm(shardkeep.load(run).rows(table, [row["id"] for row in top["rows"]]), axis=1)
    assert [row["norm"] for row in top["rows"]] == pytest.approx(norms)
    if by == "norm":
        assert values[0] == found["norm"]["max"]


def test_a_person_sees_each_table_and_then_one_with_its_top_rows(run: Path) -> None:
    code, out, _ = invoke("tables", str(run))
    lines = out.splitlines()
    assert code == 0 and lines[0] == f"step {json.loads((run / 'summary.json').read_text())['steps']}"
    assert [line.split()[0] for line in lines[1:]] == ["table", "user", "item", "tags", "all"]
    code, out, _ = invoke("tables", str(run), "--table", "item", "--top", "3")
    assert code == 0 and "top by norm" in out and len(out.splitlines()) == 1 + 6 + 1 + 3


def test_a_run_that_has_not_ended_says_which_step_is_shown(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "progress", "step": 9999}\n{"kind": "progr')
    code, out, _ = invoke("tables", str(tmp_path / "run"))
    assert code == 0 and out.splitlines()[0].endswith(", of a job that was at step 9,999 and has not ended")
    assert json.loads(invoke("tables", str(tmp_path / "run"), "--json")[1])["ended"] is False


def test_percentiles_are_exact_to_a_thousandth_over_all_magnitudes() -> None:
    norms, values = Norms(), 10.0 ** np.random.default_rng(0).uniform(-30, 30, 5000)
    values[:100] = 0.0
    for part in np.array_split(values, 7):
        norms.add(part)
    found, ordered = norms.figures(), np.sort(values)
    assert found is not None and found["p1"] == 0.0 and found["max"] == values.max()
    assert found["p50"] == pytest.approx(ordered[2499], rel=1e-3)
    assert found["p99"] == pytest.approx(ordered[4949], rel=1e-3)
    assert Norms().figures() is None


def one_table(folder: Path, rows: np.ndarray, optimizer: str = "sgd") -> Checkpoint:
    """A checkpoint of one table `t` with rows of the ids 0, 1, 2, ..."""
    spec = TableSpec(name="t", dim=rows.shape[1], optimizer={"name": optimizer})  # type: ignore[arg-type]
    tables, checkpoints = Tables([spec], seed=0), Checkpoints(folder)
    tables[0].load(np.arange(len(rows)), rows)
    return checkpoints.commit(1, write_snapshot(tables.snapshot(), checkpoints.begin(1), shard=0), {})


def test_rows_that_are_not_finite_are_counted_and_in_no_norm(tmp_path: Path) -> None:
    rows = np.ones((10, 4), np.float32)
    rows[3, 1], rows[5, 2] = np.nan, np.inf
    (found,) = figures_of(one_table(tmp_path, rows), top=3)
    assert found.not_finite == 2 and found.norms is not None and found.norms["max"] == 2.0
    assert {row.id for row in found.top[:2]} == {3, 5}


def test_of_equal_rows_those_with_the_smaller_ids_are_the_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_stream, "BLOCK_BYTES", 100)
    (found,) = figures_of(one_table(tmp_path, np.ones((500, 4), np.float32)), top=7)
    assert [row.id for row in found.top] == list(range(7))


# ---- export ----


@every("form", FORMS)
def test_an_export_has_every_row_as_the_predictor_has_it(run: Path, tmp_path: Path, form: str) -> None:
    out = tmp_path / f"x{FORMS[form].suffix}"
    code, said, error = invoke("tables", "export", str(run), "--table", "user", "--format", form, "--out", str(out))
    ids, rows = rows_of(out)
    keys = keys_of(ids)
    assert (code, error) == (0, "") and said.startswith(f"{ids.size} rows of table user at step ")
    assert np.array_equal(shardkeep.load(run).rows("user", ids), rows) and (keys[1:] > keys[:-1]).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in FORMS[form].files(out))


def test_the_default_file_is_named_after_the_table(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke("tables", "export", str(run), "--table", "item")[0] == 0
    assert invoke("tables", "export", str(run), "--table", "item", "--format", "safetensors")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["item.parquet", "item.safetensors"]


@every(
    ("arguments", "text"),
    [
        (("tables", "/nowhere"), "error: /nowhere: there is no such folder"),
        (("tables", "RUN", "--table", "users"), "error: table users: unknown; the model has user, item, tags"),
        (("tables", "RUN", "--model", "3"), "error: --model 3: there is no checkpoint of that step"),
        (
            ("tables", "export", "RUN", "--table", "users"),
            "error: table users: unknown; the model has user, item, tags",
        ),
        (
            ("tables", "export", "RUN", "--table", "user", "--format", "csv"),
            "error: --format csv: allowed: parquet, npy",
        ),
        (("tables", "export", "RUN", "--table", "user", "--out", "x.csv"), "error: --out x.csv: allowed: a name that"),
        (
            ("tables", "export", "RUN", "--table", "user", "--format", "npy", "--out", "x.parquet"),
            "error: --out x.parquet: allowed: a name that ends in .npy",
        ),
        (
            ("tables", "export", "RUN", "--table", "user", "--out", "/none/x.npy"),
            "error: --out /none/x.ids.npy: there is no folder /none",
        ),
    ],
)
def test_wrong_arguments_are_one_line(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, error = invoke(*(argument.replace("RUN", str(run)) for argument in arguments))
    assert code == 2 and not out and error.startswith(text) and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@every("form", FORMS)
def test_an_export_that_fails_leaves_the_older_file(run: Path, tmp_path: Path, form: str) -> None:
    shutil.copytree(run, tmp_path / "run")
    files = FORMS[form].files(tmp_path / f"x{FORMS[form].suffix}")
    for path in files:
        path.write_text("old")
    damaged = next((tmp_path / "run").glob("checkpoints/step-*/server-0/rows-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    os.truncate(damaged, damaged.stat().st_size + 1)
    arguments = ("tables", "export", str(tmp_path / "run"), "--table", "user", "--out")
    code, _, error = invoke(*arguments, str(tmp_path / f"x{FORMS[form].suffix}"))
    assert code == 1 and "damaged: its checksum is wrong" in error and error.count("\n") == 1
    assert [path.read_text() for path in files] == ["old"] * len(files)
    assert len(list(tmp_path.iterdir())) == 1 + len(files)


@every("form", FORMS)
def test_an_export_is_the_same_file_for_any_cut_of_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    rows = np.random.default_rng(0).normal(size=(5000, 8)).astype(np.float32)
    checkpoint, found = one_table(tmp_path / "c", rows), []
    for block_bytes in (1000, 1 << 30):
        monkeypatch.setattr(row_stream, "BLOCK_BYTES", block_bytes)
        out = tmp_path / f"x{FORMS[form].suffix}"
        assert export_table(checkpoint, "t", out, FORMS[form])[0] == 5000
        found.append(rows_of(out))
    assert np.array_equal(found[0][0], found[1][0]) and np.array_equal(found[0][1], found[1][1])
    assert np.array_equal(found[0][1], rows[found[0][0]])


# ---- a job that deletes checkpoints meanwhile ----


def test_a_checkpoint_that_is_deleted_while_it_is_read_gives_way_to_a_newer_one(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    checkpoints, seen = Checkpoints(tmp_path / "run" / "checkpoints"), []
    steps = checkpoints.last_step()

    def use(checkpoint: Checkpoint) -> int:
        seen.append(checkpoint.step)
        if len(seen) == 1:  # the job writes a newer one and prunes
            facts: dict[str, Any] = checkpoint.facts
            partial = checkpoints.begin(steps + 1)
            for file in checkpoint.files:
                (partial / file.path).parent.mkdir(exist_ok=True)
                shutil.copyfile(checkpoint.folder / file.path, partial / file.path)
            checkpoints.commit(steps + 1, checkpoint.files, facts)
            checkpoints.prune(1)
        return len(figures_of(checkpoint))

    found, count = with_checkpoint(tmp_path / "run", "last", use)
    assert (found.step, count, seen) == (steps + 1, 3, [steps, steps + 1])


def test_damage_of_a_checkpoint_that_is_there_is_no_reason_to_try_again(run: Path, tmp_path: Path) -> None:
    calls = []

    def use(checkpoint: Checkpoint) -> None:
        calls.append(checkpoint.step)
        raise CheckpointError("damaged")

    with pytest.raises(CheckpointError, match="damaged"):
        with_checkpoint(run, "last", use)
    assert len(calls) == 1

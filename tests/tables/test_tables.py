"""`shardkeep tables` and `tables export`: figures of rows and policies, and files, beside the rows of a Predictor."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkeep
from shardkeep.base.errors import CheckpointError
from shardkeep.inference.predictor import Predictor
from shardkeep.ps.checkpoints import row_stream
from shardkeep.ps.checkpoints.folder import Checkpoint, Checkpoints
from shardkeep.ps.checkpoints.row_stream import count_candidates, stream_rows
from shardkeep.ps.config import TableSpec
from shardkeep.ps.placement import keys_of
from shardkeep.ps.server.snapshot.files import load_snapshots, write_snapshot
from shardkeep.ps.server.table.policies.config import AdmitConfig, EvictConfig
from shardkeep.ps.server.tables import Tables
from shardkeep.row_files.registry import FORMS, open_rows
from shardkeep.run.trained import with_checkpoint
from shardkeep.tables.counters import Bin
from shardkeep.tables.export import export_table
from shardkeep.tables.figures import Norms, figures_of
from tests.support.cases import every
from tests.support.click_files import click_job, click_rows, write_csv
from tests.support.invoked import invoke
from tests.support.tables import gradients


def trained(folder: Path, rows: int, **changes: Any) -> Path:
    job = click_job(write_csv(folder / "train.csv", click_rows(rows)), **changes)
    shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=folder / "run", quiet=True)
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tables = {"default": {"dim": 4}, "item": {"optimizer": {"name": "adam"}}, "tags": {"optimizer": {"name": "ftrl"}}}
    return trained(tmp_path_factory.mktemp("tables"), 600, tables=tables)


@pytest.fixture(scope="module")
def model(run: Path) -> Predictor:
    return shardkeep.load(run)


@pytest.fixture
def own(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


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
        assert table["norm"]["mean"] == pytest.approx(norms.mean())
        assert table["norm"]["max"] == pytest.approx(norms.max())
        exact = np.sort(norms)[[max(0, -(-p * norms.size // 100) - 1) for p in (1, 50, 99)]]
        assert [table["norm"][f"p{p}"] for p in (1, 50, 99)] == pytest.approx(exact, rel=1e-3)
        assert table["not_finite"] == 0 and "top" not in table


@every(("table", "by"), [("user", "squared_gradients"), ("item", "norm"), ("tags", "squared_gradients")])
def test_one_table_has_its_top_rows(run: Path, model: Predictor, table: str, by: str) -> None:
    code, out, _ = invoke("tables", str(run), "--table", table, "--top", "5", "--json")
    (found,) = json.loads(out)["tables"]
    top = found["top"]
    assert code == 0 and top["by"] == by and len(top["rows"]) == 5
    values = [row[by] for row in top["rows"]]
    assert values == sorted(values, reverse=True) and values[0] > 0
    assert [row["squared_gradients"] is None for row in top["rows"]] == [by == "norm"] * 5
    norms = np.linalg.norm(model.rows(table, [row["id"] for row in top["rows"]]), axis=1)
    assert [row["norm"] for row in top["rows"]] == pytest.approx(norms)
    if by == "norm":
        assert values[0] == found["norm"]["max"]


def test_a_person_sees_each_table_and_one_with_its_top_rows_and_the_step_of_a_run_that_has_not_ended(own: Path) -> None:
    code, out, _ = invoke("tables", str(own))
    lines = out.splitlines()
    assert code == 0 and lines[0] == f"step {json.loads((own / 'summary.json').read_text())['steps']}"
    assert [line.split()[0] for line in lines[1:]] == ["table", "user", "item", "tags", "all"]
    code, out, _ = invoke("tables", str(own), "--table", "item", "--top", "3")
    assert code == 0 and "top by norm" in out and len(out.splitlines()) == 1 + 6 + 1 + 3
    (own / "summary.json").unlink()
    with (own / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "progress", "step": 9999}\n{"kind": "progr')
    code, out, _ = invoke("tables", str(own))
    assert code == 0 and out.splitlines()[0].endswith(", of a job that was at step 9,999 and has not ended")
    assert json.loads(invoke("tables", str(own), "--json")[1])["ended"] is False


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


def one_table(folder: Path, rows: np.ndarray) -> Checkpoint:
    """A checkpoint of one table `t` with rows of the ids 0, 1, 2, ..."""
    tables = Tables([spec_of(dim=rows.shape[1])], seed=0)
    tables[0].load(np.arange(len(rows)), rows)
    return saved(folder, tables, 1)


def test_rows_that_are_not_finite_are_in_no_norm_and_of_equal_rows_those_with_the_smaller_ids_are_the_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.ones((10, 4), np.float32)
    rows[3, 1], rows[5, 2] = np.nan, np.inf
    (found,) = figures_of(one_table(tmp_path, rows), top=3)
    assert found.not_finite == 2 and found.norms is not None and found.norms["max"] == 2.0
    assert {row.id for row in found.top[:2]} == {3, 5}
    monkeypatch.setattr(row_stream, "BLOCK_BYTES", 100)
    (found,) = figures_of(one_table(tmp_path / "equal", np.ones((500, 4), np.float32)), top=7)
    assert [row.id for row in found.top] == list(range(7))


# ---- tables with admission and eviction: what policies did, ages and scores of rows ----


def spec_of(evict: EvictConfig | None = None, admit: AdmitConfig | None = None, dim: int = 2) -> TableSpec:
    return TableSpec(name="t", dim=dim, optimizer={"name": "sgd"}, evict=evict, admit=admit)  # type: ignore[arg-type]


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
        "item": {"dtype": "int8", "admit": {"min_count": 2}},
    }
    run = trained(tmp_path, 1000, tables=tables, checkpoint={"every_steps": 7, "full_every": 3})
    summary = {t["name"]: t for t in json.loads((run / "summary.json").read_text())["tables"]}
    listed = {table["name"]: table for table in json.loads(invoke("tables", str(run), "--json")[1])["tables"]}
    for name, keys in {
        "user": ("rows", "admitted_rows", "refused_rows", "evicted_rows", "candidates"),
        "item": ("rows", "admitted_rows", "refused_rows", "candidates"),
    }.items():
        assert {key: listed[name][key] for key in keys} == {key: summary[name][key] for key in keys}
    assert listed["user"]["candidates"] > 0 and listed["user"]["evicted_rows"] > 0
    assert sum(bin["rows"] for bin in listed["user"]["ages"]) == listed["user"]["rows"]
    assert not {"evicted_rows", "ages"} & set(listed["item"])
    assert not {"admitted_rows", "refused_rows", "evicted_rows", "candidates", "ages"} & set(listed["tags"])
    text = invoke("tables", str(run))[1]
    assert "policies of table" in text and text.count("user") == 2 and text.count("tags") == 1
    text = invoke("tables", str(run), "--table", "user")[1]
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
    plain = Tables([spec_of()], seed=0)
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


# ---- export ----


@every("form", FORMS)
def test_an_export_has_every_row_as_the_predictor_has_it(
    run: Path, model: Predictor, tmp_path: Path, form: str
) -> None:
    out = tmp_path / f"x{FORMS[form].suffix}"
    code, said, error = invoke("tables", "export", str(run), "--table", "user", "--format", form, "--out", str(out))
    ids, rows = rows_of(out)
    keys = keys_of(ids)
    assert (code, error) == (0, "") and said.startswith(f"{ids.size} rows of table user at step ")
    assert np.array_equal(model.rows("user", ids), rows) and (keys[1:] > keys[:-1]).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in FORMS[form].files(out))


def test_the_default_file_is_named_after_the_table(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke("tables", "export", str(run), "--table", "item")[0] == 0
    assert invoke("tables", "export", str(run), "--table", "item", "--format", "npy")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["item.ids.npy", "item.parquet", "item.rows.npy"]


EXPORT = "tables", "export", "RUN", "--table"


@every(
    ("arguments", "text"),
    [
        (("tables", "/nowhere"), "error: /nowhere: there is no such folder"),
        (("tables", "RUN", "--table", "users"), "error: table users: unknown; the model has user, item, tags"),
        (("tables", "RUN", "--model", "3"), "error: --model 3: there is no checkpoint of that step"),
        ((*EXPORT, "users"), "error: table users: unknown; the model has user, item, tags"),
        ((*EXPORT, "user", "--format", "csv"), "error: --format csv: allowed: parquet, npy"),
        ((*EXPORT, "user", "--out", "x.csv"), "error: --out x.csv: allowed: a name that"),
        ((*EXPORT, "user", "--format", "npy", "--out", "x.parquet"),
         "error: --out x.parquet: allowed: a name that ends in .npy"),
        ((*EXPORT, "user", "--out", "/none/x.npy"), "error: --out /none/x.ids.npy: there is no folder /none"),
    ],
)  # fmt: skip
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


def test_a_checkpoint_that_is_deleted_while_it_is_read_gives_way_to_a_newer_one(own: Path) -> None:
    checkpoints, seen = Checkpoints(own / "checkpoints"), []
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

    found, count = with_checkpoint(own, "last", use)
    assert (found.step, count, seen) == (steps + 1, 3, [steps, steps + 1])

    def fails(checkpoint: Checkpoint) -> None:
        seen.append(checkpoint.step)
        raise CheckpointError("damaged")  # no reason to try again: it is there

    seen.clear()
    with pytest.raises(CheckpointError, match="damaged"):
        with_checkpoint(own, "last", fails)
    assert len(seen) == 1

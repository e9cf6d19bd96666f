"""A trained model in use: evaluate, predict and Predictor against the trainer's own evaluation, and what goes wrong."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import shardkeep
from shardkeep.base.errors import DataError, UserError
from shardkeep.cli.main import app
from shardkeep.inference.export.writing import Formats, export_run
from shardkeep.inference.following import Follower
from shardkeep.inference.loading import load_trained
from shardkeep.inference.predictor import Predictor
from shardkeep.inference.scoring import evaluate_run, predict_files
from tests.support.cases import every
from tests.support.click_files import click_job, click_rows, write_csv
from tests.support.served_clicks import FEATURES, texts, trained_once


def columns_of(rows: list[dict[str, str]]) -> dict[str, list[str]]:
    return {name: [row[name] for row in rows] for name in FEATURES}


def test_a_row_has_the_same_bits_at_every_place_and_beside_every_other(predictor: Predictor) -> None:
    rows = click_rows(230, seed=8)  # several blocks, and a part of one
    scores_N = predictor.predict(columns_of(rows))
    assert scores_N.dtype == np.float32 and scores_N.shape == (230,) and scores_N.std() > 0.01
    order_N = np.random.default_rng(0).permutation(230)
    assert np.array_equal(predictor.predict(columns_of([rows[i] for i in order_N])), scores_N[order_N])
    for i in (0, 57, 229):
        assert predictor.predict(columns_of([rows[i]]))[0] == scores_N[i]
    assert predictor.predict(columns_of([])).shape == (0,)


def test_evaluate_gives_the_numbers_of_the_trainer_and_of_files_those_of_the_scores(
    clicks: Path, predictor: Predictor, tmp_path: Path
) -> None:
    summary, own = json.loads((clicks / "summary.json").read_text()), evaluate_run(clicks)
    assert own == {"step": summary["steps"]} | summary["eval"] and 0.0 < own["auc"] < 1.0
    rows = click_rows(300, seed=9)
    found = evaluate_run(clicks, files=[write_csv(tmp_path / "new.csv", rows)])
    scores_N = predictor.predict(columns_of(rows)).astype(np.float64)
    clicked_N = np.array([int(row["clicked"]) for row in rows])
    expected = -np.where(clicked_N == 1, np.log(scores_N), np.log1p(-scores_N)).mean()
    assert found["samples"] == 300 and found["logloss"] == pytest.approx(expected, rel=1e-6)


@every("out", ["scores.csv", "scores.parquet"])
def test_predict_writes_every_score_in_order_beside_kept_columns(
    clicks: Path, predictor: Predictor, tmp_path: Path, out: str
) -> None:
    rows = click_rows(130, seed=10)
    files = [
        write_csv(tmp_path / "a.csv", rows[:100], FEATURES),  # no label, and columns in another order
        write_csv(tmp_path / "b.csv", rows[100:], tuple(reversed(FEATURES))),
    ]
    done = predict_files(clicks, files, tmp_path / out, keep=["item", "user"])
    table = pacsv.read_csv(tmp_path / out) if out.endswith("csv") else pq.read_table(tmp_path / out)
    assert table.column_names == ["item", "user", "score"] and done.rows == table.num_rows == 130
    assert table["user"].to_pylist() == [row["user"] for row in rows]
    scores_N = table["score"].to_numpy().astype(np.float32)
    assert np.array_equal(scores_N, predictor.predict(columns_of(rows)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "b.csv", out]


def test_files_in_another_dialect_have_the_scores_of_the_training_files_one(clicks: Path, tmp_path: Path) -> None:
    own = write_csv(tmp_path / "own.csv", click_rows(60))
    other = tmp_path / "other.csv"
    other.write_text(own.read_text().replace(",", "::"))
    for file, how in ((own, []), (other, ["data.delimiter='::'"])):
        predict_files(clicks, [file], tmp_path / f"{file.stem}_scores.csv", settings=how)
        evaluated = evaluate_run(clicks, files=[file], settings=how)
        assert evaluated["samples"] == 60
    assert (tmp_path / "other_scores.csv").read_bytes() == (tmp_path / "own_scores.csv").read_bytes()


ROW = {"user": ["u1"], "item": [1], "tags": [""], "price": [1.0], "age": [2]}


@every(
    ("data", "text"),
    [
        ({"user": ["u1"]}, "the data: has no column price"),
        ([1, 2], "the data: is a list; allowed: a DataFrame, a dict of columns, a list of dicts, a pyarrow Table"),
        ({"user": ["u1", "u2"], "item": ["1"]}, "the data: cannot be read as columns"),
        (ROW | {"item": [1.5]}, "the data, row 1, column item: 1.5 is not a whole number"),
        (ROW | {"price": ["cheap"]}, "'cheap' is not a number"),
    ],
)
def test_wrong_data_is_one_line(predictor: Predictor, data: Any, text: str) -> None:
    with pytest.raises(DataError, match=text) as error:
        predictor.predict(data)
    assert "\n" not in str(error.value)


def test_an_error_in_the_middle_leaves_the_old_scores(exported: Path, tmp_path: Path) -> None:
    good, bad = write_csv(tmp_path / "good.csv", click_rows(60)), tmp_path / "bad.csv"
    write_csv(bad, [row | {"price": "cheap"} for row in click_rows(3)])
    out = tmp_path / "scores.csv"
    predict_files(exported, [good], out)
    before = out.read_bytes()
    with pytest.raises(DataError, match=r"bad.csv, row 1, column price: 'cheap' is not a number"):
        predict_files(exported, [good, bad], out)
    assert out.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.csv", "good.csv", "scores.csv"]


@every(
    ("call", "text"),
    [
        (lambda run, file, out: predict_files(run, [file], out / "x.json"), "allowed: a name that ends in .parquet"),
        (lambda run, file, out: predict_files(run, [file], out / "no" / "x.csv"), "there is no folder"),
        (lambda run, file, out: predict_files(run, [file], file), "is one of the files to score"),
        (lambda run, file, out: load_trained(run, 5), "--model 5: there is no"),
        (
            lambda run, file, out: predict_files(run, [file], out / "x.csv", settings=["seed=1"]),
            "allowed: data.columns",
        ),
        (
            lambda run, file, out: predict_files(run, "eval", out / "x.csv", settings=["data.quote=none"]),
            "no file is a",
        ),
        (lambda run, file, out: shardkeep.load(out), "is not a run folder"),
        (lambda run, file, out: shardkeep.load(run).rows("users", [1]), "table users: unknown; the model has user"),
    ],
)
def test_wrong_calls_are_one_line(
    clicks: Path, tmp_path: Path, call: Callable[[Path, Path, Path], object], text: str
) -> None:
    file = write_csv(tmp_path / "data.csv", click_rows(5))
    with pytest.raises(UserError, match=text) as error:
        call(clicks, file, tmp_path)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["data.csv"]


def test_a_missing_label_is_an_error_of_evaluate_alone(exported: Path, tmp_path: Path) -> None:
    rows = click_rows(5)
    file = write_csv(tmp_path / "data.csv", [*rows, rows[0] | {"clicked": ""}])
    with pytest.raises(DataError, match=r"data.csv, row 6, column clicked: the label is missing"):
        evaluate_run(exported, files=[file])
    assert predict_files(exported, [file], tmp_path / "scores.csv").rows == 6


def test_a_run_of_a_stream_has_columns_can_be_exported_and_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    job = click_job(tmp_path / "none.csv", data={"synthetic": {"train_samples": 200, "eval_samples": 64}})
    run = tmp_path / "run"
    summary = shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=run, quiet=True)
    assert set(shardkeep.load(run).columns) >= {"I1", "I13", "C1", "C26"}
    told = summary.to_dict()["eval"]
    assert evaluate_run(run) | {"best_auc": told["best_auc"]} == told | {"step": summary.steps}
    export_run(run, tmp_path / "model")
    columns = {name: [1, 2, 3] for name in shardkeep.load(tmp_path / "model").columns}
    scores = [shardkeep.load(model).predict(columns).tolist() for model in (run, tmp_path / "model")]
    assert scores[0] == scores[1]
    shutil.rmtree(run / "checkpoints")
    off = shardkeep.JobConfig.model_validate(job | {"checkpoint": {"every_steps": "off"}})
    (run / "config.yaml").write_text(off.to_yaml())
    with pytest.raises(UserError, match=r"has no complete checkpoint in .*; checkpoint.every_steps is off"):
        shardkeep.load(run)


def test_a_predictor_is_pickled_by_its_folder_step_and_arithmetic(clicks: Path, tmp_path: Path) -> None:
    run = shutil.copytree(clicks, tmp_path / "run")
    predictor = shardkeep.load(run, amp="bf16")
    again: Predictor = pickle.loads(pickled := pickle.dumps(predictor))
    assert again.step == predictor.step and again.trained.config.tower.amp == "bf16"
    assert np.array_equal(again.predict(SCORED), predictor.predict(SCORED))
    shutil.rmtree(run)
    with pytest.raises(UserError, match="there is no such folder"):
        pickle.loads(pickled)


# ---- in another arithmetic than that of the job ----


SCORED = texts(50)


def near(scores_N: np.ndarray, expected_N: np.ndarray) -> bool:
    """Whether scores are those of bf16: near the others, and not the same."""
    return 1e-7 < np.abs(scores_N - expected_N).max() < 0.03


def test_a_run_an_export_and_a_follower_compute_in_bf16_alike(
    clicks: Path, exported: Path, predictor: Predictor
) -> None:
    bf16_N = shardkeep.load(clicks, amp="bf16").predict(SCORED)
    assert near(bf16_N, predictor.predict(SCORED))
    np.testing.assert_array_equal(shardkeep.load(exported, amp="bf16").predict(SCORED), bf16_N)
    followed = Follower(clicks, amp="bf16").look()
    assert followed is not None
    np.testing.assert_array_equal(Predictor(followed.trained).predict(SCORED), bf16_N)


def test_predict_and_evaluate_take_it(clicks: Path, predictor: Predictor, tmp_path: Path) -> None:
    data, out = write_csv(tmp_path / "new.csv", click_rows(200, seed=4)), tmp_path / "scores.csv"
    command = ["predict", str(clicks), "--data", str(data), "--out", str(out), "--amp", "bf16"]
    assert CliRunner().invoke(app, command).exit_code == 0
    table = pacsv.read_csv(data, convert_options=pacsv.ConvertOptions(column_types={"item": "string"}))
    assert near(pacsv.read_csv(out)["score"].to_numpy(), predictor.predict(table.drop_columns(["clicked"])))
    for files in ([], [data]):
        bf16, fp32 = (evaluate_run(clicks, files=files, amp=amp) for amp in ("bf16", "off"))
        assert bf16["logloss"] != fp32["logloss"] and abs(bf16["auc"] - fp32["auc"]) < 0.01


# ---- rows of fewer than 32 bits a value ----


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose tables have rows of each precision."""
    tables = {
        "default": {"dim": 6, "dtype": "int8"},
        "item": {"dtype": "fp16", "optimizer": "adam", "state_dtype": "bf16"},
        "tags": {"dtype": "bf16"},
    }
    return trained_once(tmp_path_factory, tables=tables)


def test_a_run_of_packed_rows_scores_as_its_trainer_and_its_exports_score_as_the_run(
    packed: Path, tmp_path: Path
) -> None:
    summary, run = json.loads((packed / "summary.json").read_text()), shardkeep.load(packed)
    assert evaluate_run(packed) == {"step": summary["steps"]} | summary["eval"]
    found = {}
    for rows in ("fp32", "fp16", "int8"):
        export_run(packed, tmp_path / rows, formats=Formats(rows=rows))
        found[rows] = shardkeep.load(tmp_path / rows)
    assert np.array_equal(found["fp32"].predict(SCORED), run.predict(SCORED))
    assert np.array_equal(found["fp16"].rows("item", SCORED["item"]), run.rows("item", SCORED["item"]))
    assert np.allclose(found["int8"].predict(SCORED), run.predict(SCORED), atol=0.02)


def test_tables_have_the_rows_and_the_bytes_of_their_precision(packed: Path, tmp_path: Path) -> None:
    options = ["--table", "item", "--format", "npy", "--out", str(tmp_path / "item.npy")]
    done = CliRunner().invoke(app, ["tables", "export", str(packed), *options])
    assert done.exit_code == 0, done.output
    rows = np.load(tmp_path / "item.rows.npy")
    assert rows.dtype == np.float32 and np.array_equal(rows, rows.astype(np.float16).astype(np.float32))
    assert np.array_equal(shardkeep.load(packed).rows("item", np.load(tmp_path / "item.ids.npy")), rows)
    done = CliRunner().invoke(app, ["tables", str(packed), "--json"])
    assert done.exit_code == 0, done.output
    figures = {one["name"]: one for one in json.loads(done.output)["tables"]}
    for name, precision, row_bytes, slot_bytes in (  # id, values and scale; slots
        ("user", {"rows": "int8", "state": "fp32"}, 8 + 8 + 4, 4),
        ("item", {"rows": "fp16", "state": "bf16"}, 8 + 12, 24),
        ("tags", {"rows": "bf16", "state": "fp32"}, 8 + 12, 4),
    ):
        count = figures[name]["rows"]
        assert figures[name]["precision"] == precision
        assert figures[name]["bytes"] == {"rows": count * row_bytes, "optimizer": count * slot_bytes}

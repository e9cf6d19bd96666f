"""A job of several labels from a file to scores: trained, evaluated, predicted, exported and served."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import shardkeep
from shardkeep.base.errors import ConfigError
from shardkeep.cli.main import app
from shardkeep.inference.export.writing import Formats, export_run
from shardkeep.inference.predictor import Predictor
from shardkeep.inference.scoring import evaluate_run, predict_files
from shardkeep.inference.server.served_model import ServedModel
from shardkeep.workers.metrics.quality import auc
from tests.support.label_files import job_of, rows_of
from tests.support.served_clicks import as_json
from tests.support.serving import Server, raw_request, scores_of

SCORES = ["score_clicked", "score_bought", "score_seconds", "score_bought_given_clicked"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    job = job_of(folder, rows_of(800), train={"batch_size": 32, "epochs": 4})
    shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=folder / "run", quiet=True)
    return folder / "run"


def test_the_summary_has_the_metrics_of_each_label_on_the_rows_that_have_it(run: Path) -> None:
    found = json.loads((run / "summary.json").read_text())["eval"]
    assert found["auc/clicked"] > 0.6 and found["samples"] > found["samples/seconds"] > 0
    assert found["mse/seconds"] < found["baseline_mse/seconds"] and "auc/seconds" not in found
    evaluated = evaluate_run(run)
    assert {key: value for key, value in evaluated.items() if key != "step"} == found


def test_scores_are_those_of_the_metrics(run: Path, tmp_path: Path) -> None:
    data = run.parent / "train.csv"
    predict_files(run, [data], tmp_path / "out.csv", keep=["clicked", "bought"])
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    scores = {name: np.array([float(row[name]) for row in rows]) for name in SCORES}
    assert [name for name in rows[0] if name.startswith("score")] == SCORES
    np.testing.assert_allclose(
        scores["score_bought"], scores["score_clicked"] * scores["score_bought_given_clicked"], rtol=1e-6
    )
    found = evaluate_run(run, files=[data])
    bought = np.array([float(row["bought"]) for row in rows])
    assert auc(scores["score_bought"], bought) == pytest.approx(found["auc/bought"], abs=1e-6)
    assert scores["score_bought"].sum() / bought.sum() == pytest.approx(found["calibration/bought"], rel=1e-6)
    assert shardkeep.load(run).outputs == tuple(SCORES)


def test_an_export_and_a_server_say_the_same(run: Path, tmp_path: Path) -> None:
    export_run(run, tmp_path / "export", formats=Formats(rows="fp32"))
    whole, exported = shardkeep.load(run), shardkeep.load(tmp_path / "export")
    columns = {name: [row[name] for row in rows_of(40)] for name in ("user", "item", "tags")}
    columns |= {name: [float(row[name] or "nan") for row in rows_of(40)] for name in ("price", "age")}
    expected_NP = whole.predict(columns)
    assert expected_NP.shape == (40, len(SCORES))
    np.testing.assert_array_equal(exported.predict(columns), expected_NP)
    data = run.parent / "train.csv"
    own = evaluate_run(run, files=[data])
    assert own.pop("note").startswith("the model was trained on rows of train.csv"), "an export knows no files"
    same = {k: v for k, v in own.items() if not k.startswith("baseline")}
    assert same == evaluate_run(tmp_path / "export", files=[data])
    tensors = {name: [v.encode() for v in columns[name]] for name in ("user", "item", "tags")}
    tensors |= {name: np.array(columns[name]) for name in ("price", "age")}
    with Server(ServedModel(Predictor.load(tmp_path / "export"))) as server:
        reply = server.infer(request := raw_request(tensors))
        assert [output.name for output in reply.outputs] == SCORES
        status, plain = server.post(as_json(tensors))
        assert status == 200 and [output["name"] for output in plain["outputs"]] == SCORES
        status, binary = server.post_binary(tensors)
        assert status == 200 and list(binary) == SCORES
        for p, name in enumerate(SCORES):
            for scores_N in (scores_of(reply, p), plain["outputs"][p]["data"], binary[name]):
                np.testing.assert_allclose(scores_N, expected_NP[:, p], atol=1e-6)
        request.outputs.add(name="score_bought")
        (only,) = server.infer(request).outputs
        assert only.name == "score_bought"
        np.testing.assert_allclose(scores_of(server.infer(request)), expected_NP[:, 1], atol=1e-6)
        request.outputs.add(name="score")
        assert "output score: unknown; the model has score_clicked, score_bought, " in server.refusal(request)[1]


def test_number_formats_cost_what_they_change_of_each_label(run: Path, tmp_path: Path) -> None:
    manifest = export_run(run, tmp_path / "export", formats=Formats(rows="int8", tower="int8"))
    assert manifest.cost is not None and {"auc/clicked", "logloss/bought", "mse/seconds"} <= manifest.cost.keys()
    assert not any(key.startswith(("samples", "baseline")) for key in manifest.cost)


def test_a_score_depends_on_no_other_row(run: Path) -> None:
    rows = rows_of(60)
    columns = {name: np.array([row[name] for row in rows], object) for name in ("user", "item", "tags")}
    columns |= {name: np.array([float(row[name] or "nan") for row in rows]) for name in ("price", "age")}
    model, order = shardkeep.load(run), np.random.default_rng(0).permutation(60)
    scores_NP = model.predict(columns)
    moved = model.predict({name: values[order] for name, values in columns.items()})
    np.testing.assert_array_equal(moved, scores_NP[order])


def test_a_planted_chain_of_labels_tells_the_best_possible_of_each(tmp_path: Path) -> None:
    made = {"task": "tasks", "table_sizes": [20, 50], "train_samples": 4000, "eval_samples": 1000}
    job = {"servers": 0, "workers": 1, "data": {"synthetic": made}, "model": {"name": "ple", "hidden": [9]}}
    config = shardkeep.JobConfig.model_validate(job | {"train": {"batch_size": 100}, "tower": {"compile": "off"}})
    found = shardkeep.train(config, run_dir=tmp_path / "run", quiet=True).to_dict()["eval"]
    for name in ("clicked", "bought", "returned"):
        assert 0.55 < found[f"auc/{name}"] < found[f"best_auc/{name}"] < 0.95
    columns = {f"I{n + 1}": [0.5, 1.0] for n in range(13)} | {"C1": [3, 4], "C2": [5, 6]}
    assert shardkeep.load(tmp_path / "run").predict(columns).shape == (2, 5)


def test_early_stopping_follows_one_label_and_samples_by_time_are_scored_before_they_train(tmp_path: Path) -> None:
    stopping = {"metric": "auc/bought", "patience": 1}
    train = {"batch_size": 32, "epochs": 9, "order": "time", "early_stopping": stopping}
    job = shardkeep.JobConfig.model_validate(job_of(tmp_path, rows_of(300), train=train))
    found = shardkeep.train(job, run_dir=tmp_path / "run", quiet=True).to_dict()
    assert found["best"]["auc/bought"] >= found["eval"]["auc/bought"]
    assert evaluate_run(tmp_path / "run", which="best")["auc/bought"] == found["best"]["auc/bought"]
    progressive = found["progressive"]
    assert {"auc/clicked", "auc/bought", "rmse/seconds"} <= progressive.keys() and "auc/seconds" not in progressive
    assert 0 < progressive["samples"] < 300 and found["samples"] % progressive["samples"] == 0


@pytest.mark.parametrize(
    "model",
    [
        {"name": "ple", "hidden": [6]},
        pytest.param({"name": "dlrm", "bottom": [7], "hidden": [9]}, marks=pytest.mark.chaos),
        pytest.param({"name": "finalmlp", "hidden": [8]}, marks=pytest.mark.chaos),
    ],
    ids=lambda model: model["name"],
)
def test_a_resumed_job_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path, model: dict[str, Any]) -> None:
    job = job_of(tmp_path, rows_of(120), model=model)
    whole = shardkeep.JobConfig.model_validate(job | {"train": {"batch_size": 32, "epochs": 2}})
    part = shardkeep.JobConfig.model_validate(job | {"train": {"batch_size": 32, "epochs": 1}})
    one = shardkeep.train(whole, run_dir=tmp_path / "one", quiet=True)
    shardkeep.train(part, run_dir=tmp_path / "two", quiet=True)
    resumed = CliRunner().invoke(app, ["train", "--resume", str(tmp_path / "two"), "--set", "train.epochs=2"])
    assert resumed.exit_code == 0, resumed.output
    two = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert (one.state_digest, one.steps) == (two["state_digest"], two["steps"])


def test_a_model_of_ones_own_gets_the_names_of_its_labels(tmp_path: Path) -> None:
    (tmp_path / "own_heads.py").write_text(
        "import torch\n"
        "class Heads(torch.nn.Module):\n"
        "    def __init__(self, num_dense, features, labels):\n"
        "        super().__init__()\n"
        "        assert labels == ('clicked', 'bought', 'seconds')\n"
        "        self.layer = torch.nn.Linear(num_dense + sum(features.values()), len(labels))\n"
        "    def forward(self, dense, embeddings):\n"
        "        return self.layer(torch.cat([dense, *embeddings.values()], dim=1))\n"
    )
    job = job_of(tmp_path, rows_of(80), model={"name": "own_heads:Heads"})
    job["data"]["root"] = str(tmp_path)
    shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=tmp_path / "run", quiet=True)
    predict_files(tmp_path / "run", [tmp_path / "train.csv"], tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text().splitlines()[0].replace('"', "") == ",".join(SCORES)


def test_settings_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    watching = job_of(tmp_path, rows_of(20), train={"early_stopping": {}})
    with pytest.raises(ValueError, match="auc is not evaluated; allowed: auc/clicked, auc/bought"):
        shardkeep.JobConfig.model_validate(watching)
    both = job_of(tmp_path, rows_of(20))
    both["data"]["label"] = "clicked"
    with pytest.raises((ValueError, ConfigError), match="label: is there beside labels"):
        shardkeep.JobConfig.model_validate(both)

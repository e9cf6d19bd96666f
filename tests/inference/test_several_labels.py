"""A job of several labels from a file to scores: trained, evaluated, predicted, exported and served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv as pacsv  # type: ignore[import-untyped]
import pytest

import shardkeep
from shardkeep.examples.synthetic.tasks import best_auc
from shardkeep.inference.export.writing import Formats, export_run
from shardkeep.inference.protocol.datatypes import Values
from shardkeep.inference.scoring import evaluate_run, predict_files
from shardkeep.inference.server.served_model import ServedModel
from shardkeep.workers.metrics.quality import auc
from tests.support.label_files import job_of, rows_of
from tests.support.served_clicks import as_json
from tests.support.serving import Server, raw_request, scores_of

SCORES = ["score_clicked", "score_bought", "score_seconds", "score_bought_given_clicked"]


def train(job: dict[str, Any], run: Path) -> dict[str, Any]:
    return shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=run, quiet=True).to_dict()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    tower = {"amp": "off", "compile": "off", "optimizer": {"lr": 0.01}}
    train(job_of(folder, rows_of(400), train={"batch_size": 32, "epochs": 4}, tower=tower), folder / "run")
    return folder / "run"


def test_metrics_are_of_each_label_on_the_rows_that_have_it_and_those_of_the_scores(run: Path, tmp_path: Path) -> None:
    told, data = json.loads((run / "summary.json").read_text())["eval"], run.parent / "train.csv"
    assert told["auc/clicked"] > 0.5 and told["samples"] > told["samples/seconds"] > 0
    assert told["mse/seconds"] < told["baseline_mse/seconds"] and "auc/seconds" not in told
    assert {key: value for key, value in evaluate_run(run).items() if key != "step"} == told
    predict_files(run, [data], tmp_path / "out.csv", keep=["clicked", "bought"])
    table, found = pacsv.read_csv(tmp_path / "out.csv"), evaluate_run(run, files=[data])
    assert table.column_names == ["clicked", "bought", *SCORES] and shardkeep.load(run).outputs == tuple(SCORES)
    assert found["auc/clicked"] > 0.65
    bought, clicked_N, bought_N, given_N = (
        table[name].to_numpy() for name in ("bought", "score_clicked", "score_bought", "score_bought_given_clicked")
    )
    np.testing.assert_allclose(bought_N, clicked_N * given_N, rtol=1e-6)
    assert auc(bought_N, bought.astype(float)) == pytest.approx(found["auc/bought"], abs=1e-6)
    assert bought_N.sum() / bought.sum() == pytest.approx(found["calibration/bought"], rel=1e-6)


def test_an_export_and_a_server_say_the_same_and_no_other_row_matters(run: Path, tmp_path: Path) -> None:
    export_run(run, tmp_path / "export", formats=Formats(rows="fp32"))
    whole, exported = shardkeep.load(run), shardkeep.load(tmp_path / "export")
    rows, order = rows_of(40), np.random.default_rng(0).permutation(40)
    columns = {name: np.array([row[name] for row in rows], object) for name in ("user", "item", "tags")}
    columns |= {name: np.array([float(row[name] or "nan") for row in rows]) for name in ("price", "age")}
    expected_NP = whole.predict(columns)
    assert expected_NP.shape == (40, len(SCORES))
    moved_NP = whole.predict({name: values[order] for name, values in columns.items()})
    np.testing.assert_array_equal(moved_NP, expected_NP[order])
    np.testing.assert_array_equal(exported.predict(columns), expected_NP)
    own = evaluate_run(run, files=[run.parent / "train.csv"])
    assert own.pop("note").startswith("the model was trained on rows of train.csv"), "an export knows no files"
    same = {k: v for k, v in own.items() if not k.startswith("baseline")}
    assert same == evaluate_run(tmp_path / "export", files=[run.parent / "train.csv"])
    tensors: dict[str, Values] = {
        name: [v.encode() for v in values] if values.dtype == object else values for name, values in columns.items()
    }
    with Server(ServedModel(exported)) as server:
        reply = server.infer(request := raw_request(tensors))
        status, plain = server.post(as_json(tensors))
        binary_status, binary = server.post_binary(tensors)
        assert status == binary_status == 200
        assert [output.name for output in reply.outputs] == list(binary) == SCORES
        assert [output["name"] for output in plain["outputs"]] == SCORES
        for p, name in enumerate(SCORES):
            for scores_N in (scores_of(reply, p), plain["outputs"][p]["data"], binary[name]):
                np.testing.assert_allclose(scores_N, expected_NP[:, p], atol=1e-6)
        request.outputs.add(name="score_bought")
        reply = server.infer(request)
        assert [output.name for output in reply.outputs] == ["score_bought"]
        np.testing.assert_allclose(scores_of(reply), expected_NP[:, 1], atol=1e-6)
        request.outputs.add(name="score")
        assert "output score: unknown; the model has score_clicked, score_bought, " in server.refusal(request)[1]
    small = export_run(run, tmp_path / "small", formats=Formats(rows="int8", tower="int8"))
    assert small.cost is not None and {"auc/clicked", "logloss/bought", "mse/seconds"} <= small.cost.keys()
    assert not any(key.startswith(("samples", "baseline")) for key in small.cost)


def test_a_planted_chain_of_labels_is_learned_from_arrays(tmp_path: Path) -> None:
    labels = [
        "clicked",
        {"column": "bought", "after": "clicked"},
        {"column": "returned", "after": "bought", "missing": "mask"},
    ]
    options: dict[str, Any] = {"table_sizes": [20, 50], "eval_rows": 600}
    data = {"source": "shardkeep.examples.synthetic.tasks:samples", "options": options | {"rows": 2000}}
    job = {"servers": 0, "workers": 1, "data": data | {"labels": labels}, "model": {"name": "ple", "hidden": [9]}}
    found = train(job | {"train": {"batch_size": 50}, "tower": {"compile": "off"}}, tmp_path / "run")["eval"]
    for name, best in best_auc(**options).items():
        assert 0.55 < found[f"auc/{name}"] < best < 0.95
    columns = {f"I{n + 1}": [0.5, 1.0] for n in range(13)} | {"C1": [3, 4], "C2": [5, 6]}
    assert shardkeep.load(tmp_path / "run").predict(columns).shape == (2, 5)


def test_early_stopping_follows_one_label_and_samples_by_time_are_scored_before_they_train(tmp_path: Path) -> None:
    stopping = {"metric": "auc/bought", "patience": 1}
    order = {"batch_size": 32, "epochs": 5, "order": "time", "early_stopping": stopping}
    found = train(job_of(tmp_path, rows_of(150), train=order), tmp_path / "run")
    assert found["best"]["auc/bought"] >= found["eval"]["auc/bought"]
    assert evaluate_run(tmp_path / "run", which="best")["auc/bought"] == found["best"]["auc/bought"]
    progressive = found["progressive"]
    assert {"auc/clicked", "auc/bought", "rmse/seconds"} <= progressive.keys() and "auc/seconds" not in progressive
    assert 0 < progressive["samples"] < 150 and found["samples"] % progressive["samples"] == 0


HEADS = """
import torch
class Heads(torch.nn.Module):
    def __init__(self, num_dense, features, labels):
        super().__init__()
        assert labels == ('clicked', 'bought', 'seconds')
        self.layer = torch.nn.Linear(num_dense + sum(features.values()), len(labels))
    def forward(self, dense, embeddings):
        return self.layer(torch.cat([dense, *embeddings.values()], dim=1))
"""


def test_a_model_of_ones_own_gets_the_names_of_its_labels(tmp_path: Path) -> None:
    (tmp_path / "own_heads.py").write_text(HEADS)
    job = job_of(tmp_path, rows_of(80), model={"name": "own_heads:Heads"})
    job["data"]["root"] = str(tmp_path)
    train(job, tmp_path / "run")
    predict_files(tmp_path / "run", [tmp_path / "train.csv"], tmp_path / "out.csv")
    assert pacsv.read_csv(tmp_path / "out.csv").column_names == SCORES

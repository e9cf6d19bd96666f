"""A trained model computes in another arithmetic than the job did, wherever it is used."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pyarrow.csv as pacsv  # type: ignore[import-untyped]
import pytest
from typer.testing import CliRunner

import shardkeep
from shardkeep.base.errors import UserError
from shardkeep.cli.main import app
from shardkeep.inference.export.writing import export_run
from shardkeep.inference.following import Follower
from shardkeep.inference.predictor import Predictor
from shardkeep.inference.scoring import evaluate_run
from tests.support.cases import every
from tests.support.click_files import click_job, click_rows, write_csv
from tests.support.served_clicks import texts

OWN = """
from torch import nn
import torch
class Net(nn.Module):
    def __init__(self, *, num_dense, features):
        super().__init__()
        self.layer = nn.Linear(num_dense + sum(features.values()), 1)
    def forward(self, dense_BI, embeddings):
        return self.layer(torch.cat([dense_BI, *embeddings.values()], dim=1))
"""
ROWS = texts(50)


def near(scores_N: np.ndarray, expected_N: np.ndarray) -> bool:
    """Whether scores are those of bf16: near the others, and not the same."""
    return 1e-7 < np.abs(scores_N - expected_N).max() < 0.03


def test_a_run_an_export_and_a_follower_compute_in_bf16_alike(
    clicks: Path, exported: Path, predictor: Predictor
) -> None:
    bf16_N = shardkeep.load(clicks, amp="bf16").predict(ROWS)
    assert near(bf16_N, predictor.predict(ROWS))
    np.testing.assert_array_equal(shardkeep.load(exported, amp="bf16").predict(ROWS), bf16_N)
    followed = Follower(clicks, amp="bf16").look()
    assert followed is not None
    np.testing.assert_array_equal(Predictor(followed.trained).predict(ROWS), bf16_N)


@every("amp", ["bf16", "off"])
def test_a_pickled_predictor_computes_as_before(exported: Path, amp: str) -> None:
    model = shardkeep.load(exported, amp=amp)
    again: Predictor = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict(ROWS), model.predict(ROWS))
    assert again.trained.config.tower.amp == amp


def test_predict_and_evaluate_take_it(clicks: Path, predictor: Predictor, tmp_path: Path) -> None:
    data, out = write_csv(tmp_path / "new.csv", click_rows(200, seed=4)), tmp_path / "scores.csv"
    command = ["predict", str(clicks), "--data", str(data), "--out", str(out), "--amp", "bf16"]
    assert CliRunner().invoke(app, command).exit_code == 0
    table = pacsv.read_csv(data, convert_options=pacsv.ConvertOptions(column_types={"item": "string"}))
    assert near(pacsv.read_csv(out)["score"].to_numpy(), predictor.predict(table.drop_columns(["clicked"])))
    for files in ([], [data]):
        bf16, fp32 = (evaluate_run(clicks, files=files, amp=amp) for amp in ("bf16", "off"))
        assert bf16["logloss"] != fp32["logloss"] and abs(bf16["auc"] - fp32["auc"]) < 0.01


@pytest.mark.slow
def test_a_program_computes_as_it_was_exported(tmp_path: Path) -> None:
    (tmp_path / "one_layer.py").write_text(OWN)
    job = click_job(write_csv(tmp_path / "train.csv", click_rows(100)), model={"name": "one_layer:Net"})
    job["data"]["root"] = str(tmp_path)
    shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=tmp_path / "run", quiet=True)
    export_run(tmp_path / "run", tmp_path / "export")
    again: Predictor = pickle.loads(pickle.dumps(shardkeep.load(tmp_path / "export")))
    assert np.isfinite(again.predict(ROWS)).all()
    with pytest.raises(UserError, match=r"--amp bf16: the dense model of .* is a program"):
        shardkeep.load(tmp_path / "export", amp="bf16")

"""A table in any form gets the same scores: files and frames bit for bit, requests as docs/guide/serve.md says."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from pyarrow import csv as pacsv  # type: ignore[import-untyped]

import shardkeep
from shardkeep.base.errors import DataError
from shardkeep.inference.scoring import predict_files
from shardkeep.inference.server.served_model import ServedModel
from tests.support import logical_forms as forms
from tests.support.logical_tables import LogicalTable, data_settings, separators_of, tables
from tests.support.serving import Server, scores_of

WITHIN = 1e-6


def trained(table: LogicalTable, written: forms.Written, folder: Path, *, cut: bool) -> Path:
    separators = separators_of(table, lambda _: cut)
    job: dict[str, Any] = {
        "servers": 0,
        "workers": 1,
        "data": data_settings(table, written.data, separators),
        "model": {"name": "dlrm", "bottom": [5], "hidden": [6]}
        if table.of("dense")
        else {"name": "dlrm", "hidden": [6]},
        "tables": {name: {"dim": 4} for name in ("default", *(t for s in table.sequences for t in s.tables.values()))},
        "tower": {"amp": "off", "compile": "off"},
        "train": {"batch_size": 8}
        | ({"loss": "mse"} if table.label.get("kind") == "number" else {})
        | ({"order": "time"} if table.of("time") else {}),
    }
    shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=folder, quiet=True)
    return folder


def scores_of_file(run: Path, path: Path, out: Path) -> np.ndarray[Any, Any]:
    predict_files(run, [path], out)
    return pacsv.read_csv(out).column("score").to_numpy().astype(np.float32)


@settings(
    deadline=None,
    max_examples=3,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(table=tables(), seed=st.integers(0, 2**32))
def test_a_model_scores_a_table_alike_in_every_form(table: LogicalTable, seed: int) -> None:
    choose = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = forms.write_csv(table, folder / "a.csv", choose)
        numbers = forms.write_parquet(table, folder / "a.parquet", choose)
        for run, written, cut in ((folder / "texts", texts, True), (folder / "numbers", numbers, False)):
            check_model(trained(table, written, run, cut=cut), written.data, table, choose, folder, cut=cut)


def check_model(run: Path, own: Path, table: LogicalTable, choose: forms.Choose, folder: Path, *, cut: bool) -> None:
    predictor = shardkeep.load(run)
    right_N = scores_of_file(run, own, folder / "scores.csv")
    for form, frame in forms.FRAMES.items():
        try:
            scores_N = predictor.predict(frame(table, choose).data)
        except DataError:
            continue
        assert scores_N.tobytes() == right_N.tobytes(), form
    separators = separators_of(table, lambda _: cut)
    with Server(ServedModel(predictor), name="m") as server:
        for _ in range(3):
            columns = forms.request_columns(table, choose, separators, predictor.inputs.fitted.kinds).data
            for raw in (True, False):
                reply = server.infer(forms.grpc(columns, raw=raw))
                found = scores_of(reply) if raw else np.array(reply.outputs[0].contents.fp32_contents)
                assert_near(found, right_N)
            for write in (forms.http_binary, forms.http_json):
                try:
                    body, length = write(columns)
                except UnicodeDecodeError:
                    continue
                assert_near(answer(server, body, length), right_N)


def assert_near(scores_N: np.ndarray[Any, Any], right_N: np.ndarray[Any, Any]) -> None:
    """Values of a model of numbers may be large."""
    assert np.abs(scores_N - right_N).max() <= WITHIN * max(1.0, float(np.abs(right_N).max()))


def answer(server: Server, body: bytes, length: str | None) -> np.ndarray[Any, Any]:
    headers = {} if length is None else {"Inference-Header-Content-Length": length}
    status, _, content = server.http("POST", "/v2/models/m/infer", body, headers)
    assert status == 200, content
    return np.array(json.loads(content)["outputs"][0]["data"], np.float32)

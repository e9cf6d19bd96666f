"""tritonclient against a server of ours, in one environment with it, and protobuf of the next major version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shardkeep
from shardkeep.inference.server.served_model import ServedModel
from tests.support.builds import ROOT
from tests.support.served_clicks import texts, trained
from tests.support.serving import Server

PROBE = Path(__file__).resolve().parents[2] / "support" / "triton_probe.py"


@pytest.mark.slow
@pytest.mark.waits_for_processes
def test_every_form_of_tritonclients_requests_has_the_scores_of_predict(tmp_path: Path) -> None:
    pytest.importorskip("tritonclient")
    predictor, columns = shardkeep.load(trained(tmp_path)), texts(50)
    expected_N = predictor.predict(columns)
    several = [[tag for tag in text.split("|") if tag] for text in columns["tags"]]
    typed = columns | {
        "item": [int(item) for item in columns["item"]],
        "price": [float(price or "nan") for price in columns["price"]],
        "tags": {"values": [tag for tags in several for tag in tags], "lengths": [len(tags) for tags in several]},
    }
    with Server(ServedModel(predictor)) as server:
        for sent in (columns, typed):
            addresses = [server.addresses.grpc, str(server.addresses.http)]
            done = subprocess.run(
                [sys.executable, str(PROBE), *addresses, "clicks"],
                input=json.dumps(sent), capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            found = json.loads(done.stdout)
            assert len(found["scores"]) == 16
            for form, scores in found["scores"].items():
                assert np.abs(np.array(scores, np.float32) - expected_N).max() < 1e-6, form
            names = ["price", "age", "user", "item", "tags"]
            assert found["facts"]["grpc inputs"] == found["facts"]["http inputs"] == names
            assert found["facts"]["version"] == shardkeep.__version__
            assert len(found["facts"]["errors"]) == 2 and all("is missing" in e for e in found["facts"]["errors"])


@pytest.mark.waits_for_processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "major", [pytest.param("7", marks=pytest.mark.slow), pytest.param("6", marks=pytest.mark.chaos)]
)
def test_a_job_and_the_code_of_serving_run_with_both_versions_of_protobuf(major: str, tmp_path: Path) -> None:
    """tritonclient and MLflow need one below 7; alone, pip installs the newest."""
    other = tmp_path / "protobuf"
    install = ["-m", "pip", "install", "-q", "--no-deps", "--target", str(other), f"protobuf=={major}.*"]
    done = subprocess.run([sys.executable, *install], capture_output=True, text=True, timeout=200, check=False)
    if done.returncode:
        pytest.skip(f"protobuf {major} cannot be installed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    path = os.pathsep.join([str(other), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    check = (
        "import google.protobuf, shardkeep.proto.inference_pb2_grpc, shardkeep.proto.control_pb2_grpc;"
        f"assert google.protobuf.__version__.startswith('{major}.'), google.protobuf.__version__"
    )
    job = ["train", str(ROOT / "examples" / "demo.yaml"), "--set", "servers=1", "--set", "train.max_steps=5"]
    for command in (["-W", "error", "-c", check], ["-m", "shardkeep", *job, "--run-dir", str(tmp_path / "run")]):
        done = subprocess.run(
            [sys.executable, *command],
            env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

"""tritonclient against a server of ours, in an environment and a process of its own: it needs protobuf below 7."""

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
from tests.support.served_clicks import texts, trained
from tests.support.serving import Server

PROBE = Path(__file__).resolve().parents[2] / "support" / "triton_probe.py"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with tritonclient: of SHARDKEEP_TRITON_PYTHON, or of a new environment."""
    if named := os.environ.get("SHARDKEEP_TRITON_PYTHON"):
        return Path(named)
    folder = tmp_path_factory.mktemp("triton")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    install = [str(folder / "bin" / "pip"), "install", "-q", "tritonclient[grpc,http]"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.skip(f"tritonclient cannot be installed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return folder / "bin" / "python"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_every_form_of_tritonclients_requests_has_the_scores_of_predict(python: Path, tmp_path: Path) -> None:
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
                [str(python), str(PROBE), *addresses, "clicks"],
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

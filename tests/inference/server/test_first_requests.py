"""No request, the first of its form neither, holds up the event loop of a server."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardkeep
from shardkeep.inference.server.served_model import ServedModel
from tests.support import first_requests
from tests.support.serving import Server

FORESEEN = {200, 400, 404, 405}
JOBS: dict[str, dict[str, Any]] = {
    "histories": {"synthetic": {"task": "sequences"}, "model": {"name": "din", "hidden": [4]}},
    "items": {"synthetic": {"task": "retrieval"}, "model": {"name": "sasrec"}},
}


def test_every_form_of_request_is_answered_or_refused_within_milliseconds_of_the_event_loop(narrow: Path) -> None:
    with Server(ServedModel(shardkeep.load(narrow))) as server:
        gc.freeze()  # else a collection looks at what all tests have made
        try:
            with server.watched() as pauses:
                statuses = first_requests.statuses(server, "clicks")
        finally:
            gc.unfreeze()
    assert {*statuses} == FORESEEN and max(pauses) < 0.05


@pytest.mark.slow
@pytest.mark.waits_for_processes
def test_a_fresh_server_imports_and_compiles_nothing_in_a_request(clicks: Path, tmp_path: Path) -> None:
    for name, job in JOBS.items():
        data = {"source": "synthetic", "synthetic": {"train_samples": 500, "eval_samples": 100, **job["synthetic"]}}
        parts = {"servers": 0, "workers": 1, "data": data, "model": job["model"], "tables": {"default": {"dim": 4}}}
        config = shardkeep.JobConfig.model_validate(parts | {"train": {"batch_size": 100, "max_steps": 2}})
        shardkeep.train(config, run_dir=tmp_path / name, quiet=True)
    folders = [str(clicks), *(str(tmp_path / name) for name in JOBS)]
    command = [sys.executable, "-m", first_requests.__name__, *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    for folder, found in json.loads(done.stdout).items():
        assert found["late"] == [] and found["longest_s"] < 0.05, (folder, found)
        assert {*found["statuses"]} == FORESEEN, folder

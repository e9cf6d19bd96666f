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

FORESEEN, LONGEST_S = [200, 400, 404, 405], 0.05
JOBS: dict[str, Any] = {"sequences": {"name": "din", "hidden": [4]}, "retrieval": {"name": "sasrec"}}


def test_every_form_of_request_is_answered_or_refused_within_milliseconds_of_the_event_loop(narrow: Path) -> None:
    with Server(ServedModel(shardkeep.load(narrow)), name="m") as server:
        gc.freeze()  # else a collection looks at what all tests have made
        try:
            with server.watched() as pauses:
                statuses = first_requests.statuses(server)
        finally:
            gc.unfreeze()
    assert sorted(statuses) == FORESEEN and max(pauses) < LONGEST_S


@pytest.mark.slow
@pytest.mark.waits_for_processes
def test_a_fresh_server_imports_nothing_in_a_request(clicks: Path, tmp_path: Path) -> None:
    for task, model in JOBS.items():
        data = {"source": "synthetic", "synthetic": {"train_samples": 500, "eval_samples": 100, "task": task}}
        job = {"servers": 0, "workers": 1, "data": data, "model": model, "train": {"batch_size": 100, "max_steps": 2}}
        shardkeep.train(job | {"tables": {"default": {"dim": 4}}}, run_dir=tmp_path / task, quiet=True)
    command = [sys.executable, "-m", first_requests.__name__, str(clicks), *(str(tmp_path / task) for task in JOBS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(found) == 1 + len(JOBS), done.stderr
    for each in found:
        assert each["late"] == [] and each["longest_s"] < LONGEST_S and each["statuses"] == FORESEEN, each

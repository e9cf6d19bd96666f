"""Scores a finished job's test data, once, in a process of its own: the launcher loads no model."""

from __future__ import annotations

import json
import os
import subprocess

from shardkeep.base.errors import JobError
from shardkeep.config import JobConfig
from shardkeep.launch.children import SHARDKEEP, child_environment
from shardkeep.run.folder import RunFolder


def score_test_data(config: JobConfig, folder: RunFolder) -> JobError | None:
    """Adds `test` to summary.json by `shardkeep evaluate`, if the job has test data. Returns why that failed: the job
    is completed and its model stays."""
    if not config.data.test:
        return None
    model = "last" if config.train.early_stopping is None else "best"
    arguments = ("evaluate", str(folder.path), "--split", "test", "--model", model, "--json")
    env = child_environment(os.environ, threads=config.threads)
    done = subprocess.run([*SHARDKEEP, *arguments], capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1].removeprefix("error: ")
        again = f"shardkeep evaluate {folder.path} --split test --model {model}"
        return JobError(f"the model is trained, but data.test is not scored: {why}; `{again}` scores it")
    folder.tested(json.loads(done.stdout))
    return None

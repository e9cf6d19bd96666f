"""Scores a finished job's test data, once, in a process of its own: the launcher loads no model."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from shardkeep.base.errors import JobError
from shardkeep.base.files import atomic_write
from shardkeep.config import JobConfig
from shardkeep.core_plan import worker_threads
from shardkeep.launch.processes.children import SHARDKEEP, child_environment
from shardkeep.run.folder import RunFolder


def score_test_data(config: JobConfig, folder: RunFolder, summary: dict[str, Any]) -> dict[str, Any]:
    """Adds `test` to summary.json by `shardkeep evaluate`, if the job has test data, or says why it is not there.
    Returns the summary."""
    if not config.tested:
        return summary
    what = "data.test is" if config.data.test else "the test rows of data.split are"
    if summary["status"] != "completed":
        return folder.amend({"message": f"{summary['message']}; so {what} not scored"})
    model = "last" if config.train.early_stopping is None else "best"
    arguments = ("evaluate", str(folder.path), "--split", "test", "--model", model, "--json")
    env = child_environment(os.environ, threads=worker_threads(config))
    done = subprocess.run([*SHARDKEEP, *arguments], capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1].removeprefix("error: ")
        again = f"shardkeep evaluate {folder.path} --split test --model {model}"
        text = f"the model is trained, but {what} not scored: {why}; `{again}` scores it"
        return folder.amend({"status": "incomplete", "message": text})
    return folder.amend({"test": json.loads(done.stdout)})


def score_once(config: JobConfig, folder: RunFolder) -> dict[str, Any]:
    """The metrics of the test data of a finished run, which reads them if it has not. `config`: its own with the test
    data, which the run left unread. Raises JobError."""
    summary = folder.last_summary() or {}
    if "test" not in summary:
        atomic_write(folder.config_path, config.to_yaml())
        ready = {"status": "completed", "message": ""}  # also where an earlier try could not read the data
        summary = {**summary, **ready} if "message" not in summary else folder.amend(ready)
        summary = score_test_data(config, folder, summary)
    if summary["status"] != "completed":
        raise JobError(summary["message"])
    return dict(summary.get("test") or {})

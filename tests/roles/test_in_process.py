"""A job in one process: how it ends early."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from shardkeep.config import parse_config
from shardkeep.ps.server.snapshot import writer as snapshot_writer
from shardkeep.roles.in_process import run_in_process

CONFIG = """
servers: 0
workers: 1
data: {synthetic: {train_samples: 300, eval_samples: 30, num_dense: 2, table_sizes: [40, 90]}}
model: {bottom: [4], hidden: [4]}
tables: {default: {dim: 4}}
tower: {compile: off}
train: {batch_size: 10}
checkpoint: {every_steps: 3}
"""


class Sink:
    def progress(self, record: dict[str, Any]) -> None:
        pass

    def event(self, record: dict[str, Any]) -> None:
        pass

    def telemetry(self, record: dict[str, Any]) -> None:
        pass


def test_an_interrupt_while_a_checkpoint_is_written_ends_the_job_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended, waited_in_vain = threading.Event(), threading.Event(), threading.Event()

    def write_slowly(*_arguments: Any, **_named: Any) -> list[Any]:
        begun.set()
        if not ended.wait(90):
            waited_in_vain.set()
        return []

    def interrupt() -> bool:
        if begun.wait(0.2):  # else the next checkpoint could wait for this one before its thread has begun
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(snapshot_writer, "write_snapshot", write_slowly)
    with pytest.raises(KeyboardInterrupt):
        run_in_process(parse_config(CONFIG), Sink(), interrupt, folder=tmp_path)
    ended.set()
    assert begun.is_set() and not waited_in_vain.is_set()
    assert not list((tmp_path / "checkpoints").glob("step-*"))

"""The roles' mains: which device a worker gets, what they import, and how a role or a job in one process ends early."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkeep.base.errors import ConfigError
from shardkeep.config import JobConfig, parse_config
from shardkeep.member.devices import worker_device
from shardkeep.member.membership import lasting_imports
from shardkeep.ps.control.records import Formation, Member
from shardkeep.ps.server.snapshot import writer as snapshot_writer
from shardkeep.roles.in_process import run_in_process
from tests.support.cases import every
from tests.support.configs import ALONE
from tests.support.control_job import ListSink


@every(
    ("wanted", "gpus", "hosts", "expected"),
    [
        ("auto", 2, "aabb", [("cuda:0", "nccl"), ("cuda:1", "nccl"), ("cuda:0", "nccl"), ("cuda:1", "nccl")]),
        ("auto", 1, "aa", [("cpu", "gloo")] * 2),
        ("cuda", 1, "aa", [("cuda:0", "gloo")] * 2),
        ("cpu", 2, "a", [("cpu", "gloo")]),
        ("auto", 0, "a", [("cpu", "gloo")]),
    ],
)
def test_the_workers_of_a_host_share_its_gpus(
    monkeypatch: pytest.MonkeyPatch, wanted: str, gpus: int, hosts: str, expected: list[tuple[str, str]]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    members = tuple(Member("worker", index, host, 1) for index, host in enumerate(hosts))
    formation = Formation(1, "127.0.0.1", 1, members, ())
    config = parse_config(f"tower: {{device: {wanted}}}")
    found = [worker_device(config, formation, index) for index in range(len(hosts))]
    assert [(str(device), backend) for device, backend in found] == expected


def test_a_gpu_that_is_not_there_is_the_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"tower\.device: cuda, but this machine has no CUDA device"):
        worker_device(parse_config("tower: {device: cuda}"), None, 0)


NOT_NEEDED = {
    "shardkeep": ["torch", "numba", "grpc", "pydantic", "yaml", "numpy", "pyarrow"],
    "shardkeep.cli.main": ["torch", "numba", "grpc", "pydantic", "yaml", "numpy", "pyarrow"],  # help
    "shardkeep.config": ["torch", "numba", "numpy", "pyarrow"],
    "shardkeep.member.membership": ["torch", "numba", "pyarrow"],  # a role before it compiles kernels
    "shardkeep.run.folder": ["torch", "numba", "pyarrow"],
    "shardkeep.ps.control.grpc.server": ["torch", "numba", "pyarrow"],  # the coordinator
    "shardkeep.launch.job": ["torch", "numba", "pyarrow"],
    "shardkeep.launch.train_job": ["torch", "numba", "pyarrow"],
    "shardkeep.view.screen": ["torch", "numba", "pyarrow"],
}
"""In the order in which one process imports them: what it must not have loaded afterwards."""
LOADED = """
import importlib, json, sys, threading
for module, others in json.loads(sys.argv[1]).items():
    importlib.import_module(module)
    print(json.dumps([module, [other for other in others if other in sys.modules]]))

from shardkeep.member.membership import end_when_the_job_failed
from shardkeep.ps.control.grpc.client import ControlClient
from shardkeep.trust.endpoint import Endpoint
control = ControlClient(Endpoint("127.0.0.1:1", "t" * 32), role="worker", index=0)
end_when_the_job_failed(control, grace_s=0.1)
threading.Event().wait(0.5)
print(json.dumps(["stuck", "still here"]), flush=True)
control.failed.set()
threading.Event().wait()
"""


def test_a_process_loads_only_what_it_needs_and_one_that_is_stuck_ends_when_its_job_has_failed_and_only_then() -> None:
    """What servers and workers load: test_kernel_needs.py."""
    command = [sys.executable, "-c", LOADED, json.dumps(NOT_NEEDED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    loaded = dict(map(json.loads, done.stdout.splitlines()))
    assert loaded == {**{module: [] for module in NOT_NEEDED}, "stuck": "still here"}, done.stderr
    assert done.returncode == 1


def test_imports_of_a_role_are_kept_from_the_garbage_collector_and_it_works_again_afterwards() -> None:
    before = gc.get_freeze_count()
    try:
        with pytest.raises(ImportError), lasting_imports("server") as seconds:
            assert seconds < 60 and not gc.isenabled()
            raise ImportError
        assert gc.isenabled() and gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


def test_an_interrupt_while_a_checkpoint_is_written_ends_a_job_in_one_process_at_once(
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
    config = JobConfig.model_validate(ALONE | {"checkpoint": {"every_steps": 3}})
    with pytest.raises(KeyboardInterrupt):
        run_in_process(config, ListSink(), interrupt, folder=tmp_path)
    ended.set()
    assert begun.is_set() and not waited_in_vain.is_set()
    assert not list((tmp_path / "checkpoints").glob("step-*"))

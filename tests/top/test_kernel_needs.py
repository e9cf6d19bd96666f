"""Which kernels a role imports: those that its config names, and no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.kernel_sources import kernel_modules
from shardkeep.config import parse_config
from shardkeep.kernel_needs import Role, needed_kernels


@pytest.mark.parametrize("role", ["server", "worker"])
def test_the_module_of_a_role_imports_the_kernels_that_every_such_role_needs(role: Role) -> None:
    code = (
        f"import json, sys; import shardkeep.{role}_role; from shardkeep.base.kernels import kernel_modules; "
        "print(json.dumps([name for name in kernel_modules() if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert sorted(json.loads(done.stdout)) == sorted(needed_kernels(None, role))


JOB = """
import json, pathlib, sys
from numba.core import event
from shardkeep.base.kernels import kernel_modules, load_kernels
from shardkeep.config import parse_config
from shardkeep.kernel_needs import needed_kernels
from shardkeep.worker_role import run_in_process

config = parse_config(sys.argv[1])
load_kernels(needed_kernels(config, "server", "worker"))
compiled = []

class Compiled(event.Listener):
    def on_start(self, found):
        compiled.append(str(found.data["dispatcher"]))

    def on_end(self, found):
        pass

class Sink:
    def progress(self, record):
        pass

    def event(self, record):
        pass

with event.install_listener("numba:compile", Compiled()):
    run_in_process(config, Sink(), folder=pathlib.Path(sys.argv[2]))
print(json.dumps([compiled, [name for name in kernel_modules() if name in sys.modules]]))
"""


@pytest.mark.parametrize(
    "compression",
    [
        {},
        {
            "ids": "coded",
            "push": {"keep_rows": 0.5, "pool_rows": 100, "values": "int8", "rounding": "stochastic"},
            "pull": {"cache_rows": 100, "lease": 2, "values": "fp16"},
        },
        {"push": {"values": "bf16", "rounding": "stochastic", "keep_rows": 0.5}},
    ],
    ids=["plain", "ids, pools and int8", "bf16 of the largest rows"],
)
def test_a_job_imports_the_kernels_that_its_config_names_and_compiles_none_in_a_step(
    compression: dict[str, Any], tmp_path: Path
) -> None:
    job = {
        "servers": 0,
        "workers": 1,
        "consistency": "bounded",
        "data": {"source": "synthetic", "synthetic": {"train_samples": 300, "eval_samples": 100}},
        "train": {"batch_size": 100},
        "tower": {"compile": "off"},
        "compression": compression,
    }
    text = json.dumps(job)
    done = subprocess.run([sys.executable, "-c", JOB, text, str(tmp_path)], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-2000:]
    compiled, imported = json.loads(done.stdout.splitlines()[-1])
    assert not compiled
    assert sorted(imported) == sorted(needed_kernels(parse_config(text), "server", "worker"))


def test_a_plain_job_needs_no_kernels_of_compression_but_varints() -> None:
    names = needed_kernels(parse_config("{data: {source: synthetic}}"), "server", "worker")
    assert [name for name in names if ".compression." in name] == ["shardkeep.compression.bit_kernels"]
    assert set(names) < set(kernel_modules())

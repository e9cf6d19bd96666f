"""The example scripts train: each of them, as a user would run it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.slow, pytest.mark.timeout(240)]

EXAMPLES = Path(__file__).parents[2] / "examples"
AROUND = [sys.executable, "-m", "shardkeep", "with", "--servers", "2", "--run-dir", "run", "--"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
COMMANDS: dict[str, tuple[str | None, list[str], float]] = {
    "custom_loop.py": (None, [sys.executable], 0.5),
    "hstu.py": (None, [sys.executable], 4.0),
    "torchrec_dlrm.py": ("torchrec", AROUND + TORCHRUN, 0.45),
    "lightning_module.py": ("lightning", [sys.executable], 0.2),
    "mlflow_callback.py": ("mlflow", [sys.executable], 0.65),
    "wandb_callback.py": ("wandb", ["env", "WANDB_MODE=offline", sys.executable], 0.65),
}
"""By script: the library that it needs, the command before it, and a loss that a model without training cannot have."""


@pytest.mark.parametrize("script", COMMANDS)
def test_an_example_trains(tmp_path: Path, script: str) -> None:
    library, command, at_most = COMMANDS[script]
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")
    done = subprocess.run(
        [*command, str(EXAMPLES / script)], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(found) for found in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert losses and losses[-1] < at_most, done.stdout

"""The lowest versions that pyproject.toml allows are installed and tried, on the lowest Python.

torch is that of this environment: its lower bound is what constraints.txt pins, and every test uses it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.builds import PROJECT, ROOT, building, copied
from tests.support.environments import checked, empty_environment, linked
from tests.support.requirements import closure

NEWEST = {"ruff", "mypy", "torchmetrics", "torch"}
"""Used in the newest version: the first two by `make check`, the third, which needs torch, by tests."""
OFFLINE = re.compile(r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout")
TRIED = ["tests/config", "tests/row_files", "tests/cli/test_general_options.py", "tests/test_public_names.py"]
TRIED += [f"tests/workers/data/test_{name}.py" for name in ("csv_files", "parquet_files", "partitions", "labels")]
IN_ONE_PROCESS = "not waits_for_processes and not slow and not chaos and not gpu"
"""Fast tests that use many packages: settings, data and row files in each format, the command line. Some Parquet files
of rare types need a newer pyarrow to be read."""


def bounds() -> dict[str, str]:
    """The lower bound of every requirement that has one."""
    extras = PROJECT["optional-dependencies"].values()
    wanted = [Requirement(text) for part in (PROJECT["dependencies"], *extras) for text in part]
    return {
        f"{each.name}[{','.join(sorted(each.extras))}]" if each.extras else each.name: specifier.version
        for each in wanted
        for specifier in each.specifier
        if specifier.operator == ">="
    }


def pip_into(target: Path, *requirements: str) -> None:
    """Installs wheels with what they require. Skips the test where no index answers."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--target", str(target)]
    done = subprocess.run([*command, *requirements], capture_output=True, text=True, timeout=900)
    if done.returncode and OFFLINE.search(done.stderr):
        pytest.skip("needs a package index")
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_lower_bound_of_torch_is_the_version_that_the_tests_use() -> None:
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned in (bounds()["torch"], f"{bounds()['torch']}.0")


@pytest.mark.chaos
@pytest.mark.waits_for_processes
@pytest.mark.timeout(1500)
@pytest.mark.skipif(
    f">={sys.version_info[0]}.{sys.version_info[1]}" != PROJECT["requires-python"], reason="of the lowest Python"
)
def test_the_lowest_versions_build_train_the_demo_and_pass_fast_tests(tmp_path: Path) -> None:
    lowest = tmp_path / "lowest"
    pip_into(lowest, *(f"{name}=={version}" for name, version in bounds().items() if name not in NEWEST))
    environment = empty_environment(tmp_path / "venv", lowest, linked(tmp_path / "torch", closure(["torch"])))
    variables = {**environment.variables(), "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    demo = ["train", str(ROOT / "examples" / "demo.yaml"), "--set", "train.max_steps=20"]
    command = [environment.python, "-m", "shardkeep", *demo, "--run-dir", "run"]
    assert "step 20/20" in checked(*command, cwd=tmp_path, env=variables)
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "-m", IN_ONE_PROCESS]  # old packages warn of new ones
    checked(environment.python, "-m", "pytest", *options, *TRIED, cwd=ROOT, env=variables)
    built = building(copied(tmp_path / "checkout"), "wheel", tmp_path / "dist", python=environment.python)
    assert built.returncode == 0, built.stderr

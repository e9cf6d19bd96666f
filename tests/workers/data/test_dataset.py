"""The registry of sources."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardkeep.base.errors import ConfigError
from shardkeep.workers.data.sources.registry import open_data, source_named
from shardkeep.workers.data_config import SOURCES, DataConfig
from tests.support.cases import every

ROOT = Path(__file__).resolve().parents[3]


@every("name", [*SOURCES, "my_module:my_function"])
def test_every_source_has_its_function(name: str) -> None:
    expected = f"open_{name}" if name in SOURCES else "open_custom"
    assert source_named(name).__name__ == expected  # type: ignore[attr-defined]


def test_a_config_without_data_opens_none() -> None:
    with pytest.raises(ConfigError, match=r"^data: is missing; allowed: files, as in data: \{train: "):
        open_data(DataConfig(), seed=0)


def test_a_source_loads_no_library_of_another_one() -> None:
    code = (
        "import sys; from shardkeep.workers.data_config import DataConfig; "
        "from shardkeep.workers.data.sources.registry import open_data; "
        "open_data(DataConfig(source='synthetic'), seed=0); "
        "print([m for m in ('pyarrow', 'numba', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

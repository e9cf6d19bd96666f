"""The registry of selectors: what it names runs, with a pool and without one, and nothing else does."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import get_args

import numpy as np
import pytest

from shardkeep.base.compiling.sources import with_imports
from shardkeep.base.errors import ConfigError
from shardkeep.base.plugging.plugs import Plug
from shardkeep.compression.config import CompressionConfig, PushConfig
from shardkeep.compression.selection.registry import SELECTORS, Selector, SelectorName
from shardkeep.ps.client.compressor import Compressor
from shardkeep.ps.client.row_memory import RowMemory
from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import Catalog, JaggedIds, JaggedRows
from tests.support.cases import every

CATALOG = Catalog([TableSpec(name="a", dim=8)])
IDS = np.arange(40)
with_and_without_a_pool = every("pool_rows", [0, 100], ids=["no pool", "pool"])


def last_rows(grad_UD: np.ndarray, keep: float, key: int) -> np.ndarray:
    """A selector of the tests: the rows at the end."""
    count = len(grad_UD)
    return np.arange(count - round(count * keep), count)


def positions(select: str, pool_rows: int) -> list[int]:
    """Where the rows stand that a step sends, of 40 whose gradients fall, under a config that was checked by nobody."""
    push = PushConfig.model_construct(select=select, keep_rows=0.25, pool_rows=pool_rows)
    memory = RowMemory(CATALOG, CompressionConfig.model_construct(push=push), history=1)
    compressor = Compressor(CATALOG, push, memory, seed=5, rank=0)
    ids = JaggedIds.of_arrays(CATALOG, {"a": IDS})
    falling = np.linspace(2.0, 1.0, 40, dtype=np.float32)[:, None] * np.ones((1, 8), np.float32)
    packed = compressor.compress(0, ids, JaggedRows.of_arrays(ids, {"a": falling}))
    return packed.ids["a"].tolist()


def test_the_config_takes_the_names_of_the_registry() -> None:
    assert get_args(SelectorName) == tuple(SELECTORS) == ("largest", "random")


@with_and_without_a_pool
def test_a_selector_that_is_not_in_the_registry_is_refused(pool_rows: int) -> None:
    with pytest.raises(ConfigError) as caught:
        positions("newest", pool_rows)
    assert str(caught.value) == "compression.push.select: 'newest' is no selector; allowed: largest, random"


@with_and_without_a_pool
def test_one_line_adds_a_selector(monkeypatch: pytest.MonkeyPatch, pool_rows: int) -> None:
    monkeypatch.setitem(SELECTORS, "last", Plug("last", Selector(), f"{__name__}:last_rows"))
    assert positions("last", pool_rows) == list(range(30, 40))
    assert positions("largest", pool_rows) == list(range(10))
    assert positions("random", pool_rows) not in (list(range(10)), list(range(30, 40)))


LOADED = """
import json, sys
import numpy as np
from shardkeep.base.compiling.sources import kernel_modules
from shardkeep.compression.selection.registry import selector
from tests.support.cases import every
selector(sys.argv[1]).load()(np.ones((40, 8), np.float32), 0.25, 7)
print(json.dumps([name for name in kernel_modules() if name in sys.modules]))
"""


@every("name", SELECTORS)
def test_a_selector_loads_the_kernels_that_the_registry_names_and_no_other(name: str) -> None:
    command = [sys.executable, "-c", LOADED, name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert sorted(json.loads(done.stdout)) == sorted(with_imports(SELECTORS[name].kernels))

"""Every plug of every registry: its code is there, and its modules of kernels exist."""

from __future__ import annotations

import importlib.util
from typing import Any

from shardkeep.base.plugging.plugs import Plug
from shardkeep.compression.config import FORMS
from shardkeep.compression.selection.registry import SELECTORS
from shardkeep.compression.values.registry import FORMATS
from shardkeep.workers.config import LOSSES, METRICS
from shardkeep.workers.data_config import SOURCES
from shardkeep.workers.model_config import MODELS
from tests.support.cases import every

REGISTRIES: tuple[dict[str, Plug[Any, Any]], ...] = (FORMATS, SELECTORS, FORMS, SOURCES, MODELS, LOSSES, METRICS)


@every(("name", "plug"), [item for registry in REGISTRIES for item in registry.items()])
def test_a_plug_has_its_name_its_code_and_its_kernels(name: str, plug: Plug[Any, Any]) -> None:
    assert plug.name == name and callable(plug.load())
    assert all(importlib.util.find_spec(module) is not None for module in plug.kernels)

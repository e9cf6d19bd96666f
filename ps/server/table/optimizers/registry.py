"""The registry of row optimizers. Imports neither torch nor numba, nor any kernel before it is used.

To add one, write a module with its settings, a module with its kernel in kernels/, and name it in the union here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, get_args

from pydantic import Field

from shardkeep.base.plugging.plugs import Plug, by_name
from shardkeep.base.settings import bare
from shardkeep.ps.server.table.optimizers.adagrad import AdagradConfig
from shardkeep.ps.server.table.optimizers.adam import AdamConfig
from shardkeep.ps.server.table.optimizers.ftrl import FtrlConfig
from shardkeep.ps.server.table.optimizers.lamb import LambConfig
from shardkeep.ps.server.table.optimizers.lars_sgd import LarsSgdConfig
from shardkeep.ps.server.table.optimizers.optimizer import OptimizerSettings
from shardkeep.ps.server.table.optimizers.partial_rowwise_adam import PartialRowwiseAdamConfig
from shardkeep.ps.server.table.optimizers.rowwise_adagrad import RowwiseAdagradConfig
from shardkeep.ps.server.table.optimizers.sgd import SgdConfig

RowOptimizerConfig = Annotated[
    SgdConfig | AdagradConfig | RowwiseAdagradConfig | AdamConfig | PartialRowwiseAdamConfig | LarsSgdConfig
    | LambConfig | FtrlConfig,
    Field(discriminator="name"), bare("name"),
]  # fmt: skip


def _plug(config: type[OptimizerSettings]) -> Plug[type[OptimizerSettings], Callable[..., None]]:
    name = config.model_fields["name"].default
    module = f"shardkeep.ps.server.table.optimizers.kernels.{name}_kernels"
    return Plug(name, config, f"{module}:update", (module,))


OPTIMIZERS = by_name(*map(_plug, get_args(get_args(RowOptimizerConfig)[0])))
"""The `config` of an optimizer: its settings. The code is its kernel."""

"""The public names: what is called, and the modules with the rest. `__init__.py` reads this file."""

from shardkeep import callbacks as callbacks, config as config, errors as errors, nn as nn, torchrec as torchrec
from shardkeep.automl.init import init as init
from shardkeep.base.errors import ShardkeepError as ShardkeepError, UserError as UserError
from shardkeep.config import JobConfig as JobConfig
from shardkeep.engines import ray as ray
from shardkeep.inference.predictor import Predictor as Predictor, load as load
from shardkeep.launch.from_python import resume as resume, train as train
from shardkeep.loop.client import EmbeddingClient as EmbeddingClient
from shardkeep.loop.connecting import connect as connect
from shardkeep.loop.steps import Pending as Pending
from shardkeep.ps.config import TableSpec as TableSpec
from shardkeep.ps.server.table.optimizers.adagrad import AdagradConfig as AdagradConfig
from shardkeep.ps.server.table.optimizers.adam import AdamConfig as AdamConfig
from shardkeep.ps.server.table.optimizers.ftrl import FtrlConfig as FtrlConfig
from shardkeep.ps.server.table.optimizers.lamb import LambConfig as LambConfig
from shardkeep.ps.server.table.optimizers.lars_sgd import LarsSgdConfig as LarsSgdConfig
from shardkeep.ps.server.table.optimizers.partial_rowwise_adam import (
    PartialRowwiseAdamConfig as PartialRowwiseAdamConfig,
)
from shardkeep.ps.server.table.optimizers.rowwise_adagrad import RowwiseAdagradConfig as RowwiseAdagradConfig
from shardkeep.ps.server.table.optimizers.sgd import SgdConfig as SgdConfig
from shardkeep.view.callback import Callback as Callback
from shardkeep.workers.embeddings.bags import Bag as Bag, Pooled as Pooled
from shardkeep.workers.embeddings.loop_lookup import Lookup as Lookup

__version__: str

"""shardkeep: parameter-server training of large recommendation models in PyTorch.

The public names load on first use; `import shardkeep` itself loads nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NoReturn

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shardkeep.base.errors import (
        CheckpointError as CheckpointError,
    )
    from shardkeep.base.errors import (
        ConfigError as ConfigError,
    )
    from shardkeep.base.errors import (
        CorruptMessage as CorruptMessage,
    )
    from shardkeep.base.errors import (
        DataError as DataError,
    )
    from shardkeep.base.errors import (
        DeadlineExceeded as DeadlineExceeded,
    )
    from shardkeep.base.errors import (
        Diverged as Diverged,
    )
    from shardkeep.base.errors import (
        JobError as JobError,
    )
    from shardkeep.base.errors import (
        JobStopped as JobStopped,
    )
    from shardkeep.base.errors import (
        JournalError as JournalError,
    )
    from shardkeep.base.errors import (
        MemberLost as MemberLost,
    )
    from shardkeep.base.errors import (
        PlaceRefused as PlaceRefused,
    )
    from shardkeep.base.errors import (
        ProtocolError as ProtocolError,
    )
    from shardkeep.base.errors import (
        RemoteError as RemoteError,
    )
    from shardkeep.base.errors import (
        ShardkeepError as ShardkeepError,
    )
    from shardkeep.base.errors import (
        TransportError as TransportError,
    )
    from shardkeep.base.errors import (
        UserError as UserError,
    )
    from shardkeep.base.schedule import ScheduleConfig as ScheduleConfig
    from shardkeep.compression.config import (
        CompressionConfig as CompressionConfig,
    )
    from shardkeep.compression.config import (
        PullConfig as PullConfig,
    )
    from shardkeep.compression.config import (
        PushConfig as PushConfig,
    )
    from shardkeep.compression.config import (
        TableCompressionConfig as TableCompressionConfig,
    )
    from shardkeep.compression.config import (
        TablePullConfig as TablePullConfig,
    )
    from shardkeep.compression.config import (
        TablePushConfig as TablePushConfig,
    )
    from shardkeep.compression.config import (
        TowerCompressionConfig as TowerCompressionConfig,
    )
    from shardkeep.config import JobConfig as JobConfig
    from shardkeep.config import load_config as load_config
    from shardkeep.inference.predictor import Predictor as Predictor
    from shardkeep.inference.predictor import load as load
    from shardkeep.launch.from_python import resume as resume
    from shardkeep.launch.from_python import train as train
    from shardkeep.loop.ahead import Pending as Pending
    from shardkeep.loop.client import EmbeddingClient as EmbeddingClient
    from shardkeep.loop.connecting import connect as connect
    from shardkeep.ps.config import (
        AdadeltaConfig as AdadeltaConfig,
    )
    from shardkeep.ps.config import (
        AdagradConfig as AdagradConfig,
    )
    from shardkeep.ps.config import (
        AdamConfig as AdamConfig,
    )
    from shardkeep.ps.config import (
        ConsistencyConfig as ConsistencyConfig,
    )
    from shardkeep.ps.config import (
        FtrlConfig as FtrlConfig,
    )
    from shardkeep.ps.config import (
        LambConfig as LambConfig,
    )
    from shardkeep.ps.config import (
        LarsSgdConfig as LarsSgdConfig,
    )
    from shardkeep.ps.config import (
        LivenessConfig as LivenessConfig,
    )
    from shardkeep.ps.config import (
        PartialRowwiseAdamConfig as PartialRowwiseAdamConfig,
    )
    from shardkeep.ps.config import (
        RecoveryConfig as RecoveryConfig,
    )
    from shardkeep.ps.config import (
        RmspropConfig as RmspropConfig,
    )
    from shardkeep.ps.config import (
        RowwiseAdagradConfig as RowwiseAdagradConfig,
    )
    from shardkeep.ps.config import (
        SgdConfig as SgdConfig,
    )
    from shardkeep.ps.config import (
        TableConfig as TableConfig,
    )
    from shardkeep.ps.config import (
        TableSpec as TableSpec,
    )
    from shardkeep.ps.config import (
        TransportConfig as TransportConfig,
    )
    from shardkeep.ps.init_config import InitConfig as InitConfig
    from shardkeep.ps.policy_config import AdmitConfig as AdmitConfig
    from shardkeep.ps.policy_config import EvictConfig as EvictConfig
    from shardkeep.run.callback import Callback as Callback
    from shardkeep.run.callback import CheckpointEvent as CheckpointEvent
    from shardkeep.run.callback import EvaluationEvent as EvaluationEvent
    from shardkeep.run.callback import ProgressEvent as ProgressEvent
    from shardkeep.run.callback import StartEvent as StartEvent
    from shardkeep.run.summary import Summary as Summary
    from shardkeep.workers.config import CheckpointConfig as CheckpointConfig
    from shardkeep.workers.config import EvalConfig as EvalConfig
    from shardkeep.workers.config import TowerConfig as TowerConfig
    from shardkeep.workers.config import TowerOptimizerConfig as TowerOptimizerConfig
    from shardkeep.workers.config import TrainConfig as TrainConfig
    from shardkeep.workers.data_config import DataConfig as DataConfig
    from shardkeep.workers.embeddings.bags import Bag as Bag
    from shardkeep.workers.embeddings.bags import Pooled as Pooled
    from shardkeep.workers.embeddings.lookup import Lookup as Lookup
    from shardkeep.workers.model_config import ModelConfig as ModelConfig

_MODULES = {  # the same names, for the interpreter; tests/test_public_names.py compares the two
    "base.errors": "CheckpointError ConfigError CorruptMessage DataError DeadlineExceeded Diverged JobError JobStopped "
    "JournalError MemberLost PlaceRefused ProtocolError RemoteError ShardkeepError TransportError UserError",
    "base.schedule": "ScheduleConfig",
    "compression.config": "CompressionConfig PullConfig PushConfig TableCompressionConfig TablePullConfig "
    "TablePushConfig TowerCompressionConfig",
    "config": "JobConfig load_config",
    "inference.predictor": "Predictor load",
    "launch.from_python": "resume train",
    "loop.ahead": "Pending",
    "loop.client": "EmbeddingClient",
    "loop.connecting": "connect",
    "ps.config": "AdadeltaConfig AdagradConfig AdamConfig ConsistencyConfig FtrlConfig LambConfig "
    "LarsSgdConfig LivenessConfig PartialRowwiseAdamConfig RecoveryConfig RmspropConfig RowwiseAdagradConfig SgdConfig "
    "TableConfig TableSpec TransportConfig",
    "ps.init_config": "InitConfig",
    "ps.policy_config": "AdmitConfig EvictConfig",
    "run.callback": "Callback CheckpointEvent EvaluationEvent ProgressEvent StartEvent",
    "run.summary": "Summary",
    "workers.config": "CheckpointConfig EvalConfig TowerConfig TowerOptimizerConfig TrainConfig",
    "workers.data_config": "DataConfig",
    "workers.model_config": "ModelConfig",
    "workers.embeddings.bags": "Bag Pooled",
    "workers.embeddings.lookup": "Lookup",
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names.split()}
__all__ = ["__version__", *_HOMES]


def serve(*_arguments: object, **_named: object) -> NoReturn:
    """Was renamed to `EmbeddingClient.serve`. Raises UserError."""
    from shardkeep.base.errors import UserError

    raise UserError("shardkeep.serve(...) is EmbeddingClient.serve(...) now, with the same arguments")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

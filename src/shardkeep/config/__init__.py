"""The settings of a whole job, by section, and the reader of its YAML. Needs no torch."""

from __future__ import annotations

from shardkeep.base.config.schedule import (
    ScheduleConfig as ScheduleConfig,
)
from shardkeep.compression.config import (
    CompressionConfig as CompressionConfig,
    PullConfig as PullConfig,
    PushConfig as PushConfig,
    TowerCompressionConfig as TowerCompressionConfig,
)
from shardkeep.config.affinity import (
    AffinityConfig as AffinityConfig,
)
from shardkeep.config.job import (
    JobConfig as JobConfig,
)
from shardkeep.config.launch import (
    LaunchConfig as LaunchConfig,
)
from shardkeep.config.reading import (
    fitted_to as fitted_to,
    load_config as load_config,
    of_model as of_model,
    parse_config as parse_config,
    stored_config as stored_config,
)
from shardkeep.config.rules import (
    unused as unused,
)
from shardkeep.config.web import (
    WebConfig as WebConfig,
)
from shardkeep.ps.config import (
    ConsistencyConfig as ConsistencyConfig,
    LivenessConfig as LivenessConfig,
    RecoveryConfig as RecoveryConfig,
    TableConfig as TableConfig,
    TableSpec as TableSpec,
    TelemetryConfig as TelemetryConfig,
    TransportConfig as TransportConfig,
)
from shardkeep.ps.server.table.initializers.config import (
    InitConfig as InitConfig,
)
from shardkeep.ps.server.table.policies.config import (
    AdmitConfig as AdmitConfig,
    EvictConfig as EvictConfig,
)
from shardkeep.workers.config import (
    CheckpointConfig as CheckpointConfig,
    EvalConfig as EvalConfig,
    ProfileConfig as ProfileConfig,
    TowerConfig as TowerConfig,
    TowerOptimizerConfig as TowerOptimizerConfig,
    TrainConfig as TrainConfig,
)
from shardkeep.workers.data_config import (
    DataConfig as DataConfig,
)
from shardkeep.workers.model_config import (
    ModelConfig as ModelConfig,
)

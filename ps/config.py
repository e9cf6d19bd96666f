"""Settings of the parameter-server room: tables, row optimizers, consistency, transport, liveness.

Apart from the code they configure so that reading a config needs neither torch nor numba.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shardkeep.base.schedule import ScheduleConfig
from shardkeep.base.settings import DAY_S, Named, Settings, bare


class SgdConfig(Settings):
    """`w -= lr * (g + weight_decay * w)` (torch.optim.SGD without momentum, touched rows only)."""

    name: Literal["sgd"] = "sgd"
    """Plain stochastic gradient descent."""
    lr: float = Field(0.05, gt=0.0, le=1e6)
    """Learning rate."""
    weight_decay: float = Field(0.0, ge=0.0, le=1e6)
    """L2 penalty added to the gradient of touched rows (lazy)."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over steps."""


class AdagradConfig(Settings):
    """`s += g*g; w -= lr * g / (sqrt(s) + eps)` per element (torch.optim.Adagrad)."""

    name: Literal["adagrad"] = "adagrad"
    """Element-wise Adagrad; one slot per value."""
    lr: float = Field(0.05, gt=0.0, le=1e6)
    """Learning rate."""
    eps: float = Field(1e-10, ge=0.0, le=1e6)
    """Added to the root of the accumulator."""
    initial_accumulator: float = Field(0.0, ge=0.0, le=1e6)
    """Accumulator of a new row."""
    weight_decay: float = Field(0.0, ge=0.0, le=1e6)
    """L2 penalty added to the gradient of touched rows (lazy)."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over steps."""


class RowwiseAdagradConfig(Settings):
    """`s += mean_d(g*g); w -= lr * g / (sqrt(s) + eps)`, one `s` per row (FBGEMM EXACT_ROWWISE_ADAGRAD)."""

    name: Literal["rowwise_adagrad"] = "rowwise_adagrad"
    """Row-wise Adagrad; one slot per row."""
    lr: float = Field(0.05, gt=0.0, le=1e6)
    """Learning rate."""
    eps: float = Field(1e-8, ge=0.0, le=1e6)
    """Added to the root of the accumulator."""
    initial_accumulator: float = Field(0.0, ge=0.0, le=1e6)
    """Accumulator of a new row."""
    weight_decay: float = Field(0.0, ge=0.0, le=1e6)
    """L2 penalty added to the gradient of touched rows (lazy)."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over steps."""


class AdamConfig(Settings):
    """Lazy Adam (torch.optim.SparseAdam): moments of touched rows only, bias correction by the job's step."""

    name: Literal["adam"] = "adam"
    """Lazy Adam; two slots per value."""
    lr: float = Field(0.001, gt=0.0, le=1e6)
    """Learning rate."""
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (
        0.9,
        0.999,
    )
    """Decay of the first and the second moment."""
    eps: float = Field(1e-8, ge=0.0, le=1e6)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.0, ge=0.0, le=1e6)
    """L2 penalty added to the gradient of touched rows (lazy)."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over steps."""


class FtrlConfig(Settings):
    """FTRL-Proximal, Algorithm 1 of McMahan et al., KDD 2013, per element."""

    name: Literal["ftrl"] = "ftrl"
    """FTRL-Proximal; two slots per value (z, n)."""
    lr: float = Field(0.05, gt=0.0, le=1e6)
    """alpha in the paper."""
    beta: float = Field(1.0, ge=0.0, le=1e6)
    """beta in the paper: damps the rate of values seen for the first time."""
    l1: float = Field(0.0, ge=0.0, le=1e6)
    """L1 strength; above 0 it makes weights exactly zero."""
    l2: float = Field(0.0, ge=0.0, le=1e6)
    """L2 strength."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over steps."""


RowOptimizerConfig = Annotated[
    SgdConfig | AdagradConfig | RowwiseAdagradConfig | AdamConfig | FtrlConfig,
    Field(discriminator="name"),
    bare("name"),
]


class InitConfig(Named):
    """Initial value of a row: a counter-based hash of (seed, table, id, column)."""

    name: Literal["uniform", "normal", "zeros"] = "uniform"
    """uniform in [-scale, scale), normal with standard deviation scale, or zeros."""
    scale: float = Field(0.05, gt=0.0, le=1e6)
    """Half-width of the uniform, standard deviation of the normal distribution."""


class TableSpec(Settings):
    """One embedding table as servers and workers see it: what a member is told at formation."""

    name: str = Field(min_length=1, max_length=200)
    """Unique in the job."""
    dim: int = Field(16, ge=1, le=4096)
    """Values per row."""
    optimizer: RowOptimizerConfig = RowwiseAdagradConfig()
    """How pushed gradients change rows."""
    init: InitConfig = InitConfig()
    """Values of a row before its first push."""


class TableConfig(Settings):
    """Settings of one table in the YAML file; what is left out comes from `tables.default`."""

    dim: int | None = Field(None, ge=1, le=4096)
    """Values per row; left out = the default table's, else 16."""
    optimizer: RowOptimizerConfig | None = None
    """Row optimizer; left out = the default table's, else rowwise_adagrad."""
    init: InitConfig | None = None
    """Initial values; left out = the default table's, else uniform in +-0.05."""


class ConsistencyConfig(Named):
    """What a pull is promised to have seen."""

    mode: Literal["sync", "bounded", "async"] = "bounded"
    """sync: exactly all pushes of earlier steps; bounded: all but the last `staleness` steps'; async: no bound."""
    staleness: int = Field(2, ge=0, le=64)
    """Steps that a pull may lag behind (bounded), or that a worker's own pushes may be under way (async)."""

    @model_validator(mode="before")
    @classmethod
    def _sync_is_never_stale(cls, data: Any) -> Any:
        data = {"mode": data} if isinstance(data, str) else data  # this class's validators run before those of Named
        if not isinstance(data, dict) or data.get("mode") != "sync":
            return data
        if data.get("staleness", 0) != 0:
            raise ValueError(f"staleness: {data['staleness']} with mode: sync; allowed: 0, or another mode")
        return {**data, "staleness": 0}

    @property
    def window(self) -> int:
        """Batches whose pulls may be under way at once, the running one included."""
        return 1 if self.mode == "sync" else self.staleness + 1


class TransportConfig(Settings):
    """How bytes move between workers and servers."""

    same_host: Literal["memory", "sockets"] = "memory"
    """Between processes of one Linux host: memory = the receiver copies arrays out of the sender's memory, or takes
    sockets where it knows that the system forbids it; sockets = always, so that network counters see every byte."""


class RecoveryConfig(Settings):
    """What a job may lose when processes die."""

    max_lost_steps: int | None = Field(None, ge=0)
    """Trained steps that may be lost by going back to a checkpoint; a job that would lose more ends. Left out = one
    checkpoint period, counted from the checkpoint that may just be being written; none where none are kept."""


class LivenessConfig(Settings):
    """Deadlines and leases."""

    lease_s: float = Field(15.0, ge=1.0, le=DAY_S)
    """Seconds without a heartbeat after which a member is declared dead."""
    step_timeout_s: float = Field(30.0, ge=1.0, le=DAY_S)
    """Seconds that one pull, push or reduction may take."""
    form_timeout_s: float = Field(120.0, ge=5.0, le=7 * DAY_S)
    """Seconds to wait for all members of a job to join, and to come together again after a death."""
    grace_s: float = Field(25.0, ge=2.0, le=DAY_S)
    """Seconds from SIGTERM to the end: of a server or worker, which leaves after its running step; of the job, with a
    checkpoint, when its coordinator or launcher gets it."""
    restarts: int = Field(3, ge=0, le=1_000_000)
    """Deaths of one process in a row, without one more trained step, that a job outlives; 0 = it fails at the first."""

"""Settings of the parameter-server room: tables, row optimizers, consistency, transport, liveness.

Apart from the code they configure so that reading a config needs neither torch nor numba.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shardkeep.base.schedule import ScheduleConfig
from shardkeep.base.settings import DAY_S, Named, Settings, bare
from shardkeep.compression.config import TableCompressionConfig, TablePushConfig
from shardkeep.ps.init_config import InitConfig
from shardkeep.ps.policy_config import AdmitConfig, EvictConfig

DecayOn = Literal["touched", "table"]
"""Which rows an update decays."""
RowPrecision = Literal["fp32", "fp16", "bf16", "int8"]
"""How a server stores the weights of a row."""
StatePrecision = Literal["fp32", "bf16"]
"""How a server stores the optimizer slots of a row."""
_NO_STATE = {
    "sgd": "keeps none",
    "rowwise_adagrad": "keeps one number a row, so that bf16 would save nothing",
    "ftrl": "computes rows from it, so that a row would be as coarse as bf16",
}
"""Why the state of an optimizer is not stored as bf16."""


def _decays_something(config: Any) -> Any:
    if config.weight_decay_on == "table" and not config.weight_decay:
        raise ValueError("weight_decay_on: table with weight_decay: 0; allowed: touched, or weight_decay above 0")
    return config


class SgdConfig(Settings):
    """`w -= lr * (g + weight_decay * w)` (torch.optim.SGD without momentum)."""

    name: Literal["sgd"] = "sgd"
    """Plain stochastic gradient descent."""
    lr: float = Field(0.05, gt=0.0, le=1e6)
    """Learning rate."""
    weight_decay: float = Field(0.0, ge=0.0, le=1e6)
    """L2 penalty added to the gradient of rows: `g + weight_decay * w`."""
    weight_decay_on: DecayOn = "touched"
    """touched = the rows of a push; table = all rows of the table, at each update, the others with gradient 0."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over steps."""

    _decays = model_validator(mode="after")(_decays_something)


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
    """L2 penalty added to the gradient of rows: `g + weight_decay * w`."""
    weight_decay_on: DecayOn = "touched"
    """touched = the rows of a push; table = all rows of the table, at each update, the others with gradient 0."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over steps."""

    _decays = model_validator(mode="after")(_decays_something)


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
    """L2 penalty added to the gradient of rows: `g + weight_decay * w`."""
    weight_decay_on: DecayOn = "touched"
    """touched = the rows of a push; table = all rows of the table, at each update, the others with gradient 0."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over steps."""

    _decays = model_validator(mode="after")(_decays_something)


class AdamConfig(Settings):
    """Lazy Adam (torch.optim.SparseAdam): moments of touched rows only, bias correction by the job's step.

    `w -= lr * sqrt(1-b2^t)/(1-b1^t) * m / (sqrt(v) + eps)`, or with `eps_after_correction`
    `w -= lr / (1-b1^t) * m / (sqrt(v / (1-b2^t)) + eps)`.
    With `weight_decay_on: table` it is no longer lazy: all rows and moments change, as in torch.optim.Adam."""

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
    eps_after_correction: bool = False
    """false = eps is added before bias correction, as in torch.optim.SparseAdam; true = after it, as in
    torch.optim.Adam and FBGEMM."""
    weight_decay: float = Field(0.0, ge=0.0, le=1e6)
    """L2 penalty added to the gradient of rows: `g + weight_decay * w`."""
    weight_decay_on: DecayOn = "touched"
    """touched = the rows of a push; table = all rows of the table, at each update, the others with gradient 0."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over steps."""

    _decays = model_validator(mode="after")(_decays_something)


class PartialRowwiseAdamConfig(Settings):
    """Lazy Adam with one second moment per row: `v += (1-b2)(mean_d(g*g)-v); w -= lr / (1-b1^t) * m /
    (sqrt(v / (1-b2^t)) + eps)` (FBGEMM PARTIAL_ROWWISE_ADAM), bias correction by the job's step."""

    name: Literal["partial_rowwise_adam"] = "partial_rowwise_adam"
    """Lazy Adam; a slot per value and one per row."""
    lr: float = Field(0.001, gt=0.0, le=1e6)
    """Learning rate."""
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (
        0.9,
        0.999,
    )
    """Decay of the first and the second moment."""
    eps: float = Field(1e-8, ge=0.0, le=1e6)
    """Added to the root of the second moment, after bias correction."""
    weight_decay: float = Field(0.0, ge=0.0, le=1e6)
    """L2 penalty added to the gradient of rows: `g + weight_decay * w`."""
    weight_decay_on: DecayOn = "touched"
    """touched = the rows of a push; table = all rows of the table, at each update, the others with gradient 0."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over steps."""

    _decays = model_validator(mode="after")(_decays_something)


class LarsSgdConfig(Settings):
    """SGD with a rate per row by norms (LARS of You et al. 2017, FBGEMM LARS_SGD): `r = lr * eta * norm(w) / (norm(g) +
    weight_decay * norm(w)); m = momentum * m + r * (g + weight_decay * w); w -= m`.

    A row of zeros stays zero, so the table needs an init other than zeros."""

    name: Literal["lars_sgd"] = "lars_sgd"
    """SGD in steps as long as a part of the row; one slot per value."""
    lr: float = Field(1.0, gt=0.0, le=1e6)
    """Learning rate."""
    eta: float = Field(0.001, gt=0.0, le=1e6)
    """Trust coefficient: the step's length over the row's, at lr 1 and without momentum."""
    momentum: float = Field(0.9, ge=0.0, lt=1.0)
    """Decay of earlier steps."""
    weight_decay: float = Field(0.0, ge=0.0, le=1e6)
    """L2 penalty added to the gradient of rows, and its norm to the divisor."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over steps."""


class LambConfig(Settings):
    """Lazy Adam in steps as long as a part of the row (LAMB of You et al. 2020, FBGEMM LAMB): `u = m / (1-b1^t) /
    (sqrt(v / (1-b2^t)) + eps) + weight_decay * w; w -= lr * norm(w) / norm(u) * u`, bias correction by the job's step.

    A row of zeros stays zero, so the table needs an init other than zeros."""

    name: Literal["lamb"] = "lamb"
    """Adam in steps as long as a part of the row; two slots per value."""
    lr: float = Field(0.001, gt=0.0, le=1e6)
    """Learning rate: the step's length over the row's."""
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (
        0.9,
        0.999,
    )
    """Decay of the first and the second moment."""
    eps: float = Field(1e-8, ge=0.0, le=1e6)
    """Added to the root of the second moment, after bias correction."""
    weight_decay: float = Field(0.0, ge=0.0, le=1e6)
    """Weight of the row in the direction of its step; not in the moments."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over steps."""


class RmspropConfig(Settings):
    """`v += (1-alpha)(g*g-v); w -= lr * g / (sqrt(v) + eps)` per element (torch.optim.RMSprop without momentum, not
    centered), v of touched rows only."""

    name: Literal["rmsprop"] = "rmsprop"
    """RMSprop; one slot per value."""
    lr: float = Field(0.01, gt=0.0, le=1e6)
    """Learning rate."""
    alpha: float = Field(0.99, ge=0.0, lt=1.0)
    """Decay of the mean of squares."""
    eps: float = Field(1e-8, ge=0.0, le=1e6)
    """Added to the root of the mean of squares."""
    weight_decay: float = Field(0.0, ge=0.0, le=1e6)
    """L2 penalty added to the gradient of rows: `g + weight_decay * w`."""
    weight_decay_on: DecayOn = "touched"
    """touched = the rows of a push; table = all rows of the table, at each update, the others with gradient 0."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over steps."""

    _decays = model_validator(mode="after")(_decays_something)


class AdadeltaConfig(Settings):
    """`v += (1-rho)(g*g-v); u = sqrt(a + eps) / sqrt(v + eps) * g; a += (1-rho)(u*u-a); w -= lr * u` per element
    (torch.optim.Adadelta), v and a of touched rows only."""

    name: Literal["adadelta"] = "adadelta"
    """Adadelta; two slots per value."""
    lr: float = Field(1.0, gt=0.0, le=1e6)
    """Learning rate."""
    rho: float = Field(0.9, ge=0.0, lt=1.0)
    """Decay of both means of squares."""
    eps: float = Field(1e-6, ge=1e-30, le=1e6)
    """Added to both means of squares, under the root; the first steps are as long as its root."""
    weight_decay: float = Field(0.0, ge=0.0, le=1e6)
    """L2 penalty added to the gradient of rows: `g + weight_decay * w`."""
    weight_decay_on: DecayOn = "touched"
    """touched = the rows of a push; table = all rows of the table, at each update, the others with gradient 0."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over steps."""

    _decays = model_validator(mode="after")(_decays_something)


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
    SgdConfig
    | AdagradConfig
    | RowwiseAdagradConfig
    | AdamConfig
    | PartialRowwiseAdamConfig
    | LarsSgdConfig
    | LambConfig
    | RmspropConfig
    | AdadeltaConfig
    | FtrlConfig,
    Field(discriminator="name"),
    bare("name"),
]


class TableSpec(Settings):
    """One complete embedding table: what servers, workers and `EmbeddingClient` use. In a YAML file: `TableConfig`."""

    name: str = Field(min_length=1, max_length=200)
    """Unique in the job."""
    dim: int = Field(16, ge=1, le=4096)
    """Values per row."""
    optimizer: RowOptimizerConfig = RowwiseAdagradConfig()
    """How pushed gradients change rows."""
    init: InitConfig = InitConfig()
    """Values of a row before its first push."""
    rows: RowPrecision = "fp32"
    """How servers store rows: int8 = integers times one scale a row, its largest absolute value / 127."""
    state: StatePrecision = "fp32"
    """How servers store the optimizer's slots."""
    admit: AdmitConfig | None = None
    """Which new ids become rows; left out = all."""
    evict: EvictConfig | None = None
    """Which rows go; left out = none."""
    freeze: bool = False
    """Rows are read and never change; ids without a row get their initial values."""
    compression: TableCompressionConfig | None = None
    """What is compressed otherwise than in the rest of the job; left out = nothing."""

    @model_validator(mode="after")
    def _frozen_rows_never_change(self) -> TableSpec:
        if not self.freeze:
            return self
        for key in ("admit", "evict"):
            if getattr(self, key) is not None:
                raise ValueError(
                    f"{key}: with freeze: true, which neither creates nor removes rows; allowed: one of the two"
                )
        if self.compression is not None and self.compression.push != TablePushConfig():
            raise ValueError("compression.push: with freeze: true, which sends no gradient; allowed: compression.pull")
        if self.decays_all_rows:
            raise ValueError(
                "optimizer.weight_decay_on: table with freeze: true, where no update decays rows; allowed: touched"
            )
        return self

    @model_validator(mode="after")
    def _state_stands_rounding(self) -> TableSpec:
        if self.state != "fp32" and (why := _NO_STATE.get(self.optimizer.name)):
            raise ValueError(
                f"state: {self.state} with optimizer.name: {self.optimizer.name}, which {why}; allowed: fp32"
            )
        return self

    @model_validator(mode="after")
    def _sums_do_not_replace_given_rows(self) -> TableSpec:
        if self.init.name == "file" and self.optimizer.name == "ftrl":
            raise ValueError(
                "init.name: file with optimizer.name: ftrl, whose first update computes a row from its gradient sums "
                "and forgets the row of the file; allowed: another optimizer"
            )
        return self

    @property
    def candidates(self) -> TableSpec | None:
        """The table in which servers count ids that have no row in this one; None = nothing is counted."""
        if self.admit is None or self.admit.min_count == 1:
            return None
        window = self.admit.window_steps
        evict = EvictConfig(ttl_steps=window, sweep_steps=min(window, 1024), max_rows=self.admit.max_candidates)
        return TableSpec(name=f"{self.name[:190]} (counts)", dim=1, optimizer=SgdConfig(), evict=evict)

    @property
    def decays_all_rows(self) -> bool:
        """Whether each update decays all rows of the table."""
        return getattr(self.optimizer, "weight_decay_on", "touched") == "table"


class TableConfig(Settings):
    """An entry of `tables` in a job's config. `tables.default` gives what it leaves out; `TableSpec` is complete."""

    dim: int | None = Field(None, ge=1, le=4096)
    """Values per row; left out = that of the default table, else 16."""
    optimizer: RowOptimizerConfig | None = None
    """Row optimizer; left out = that of the default table, else rowwise_adagrad."""
    init: InitConfig | None = None
    """Initial values; left out = those of the default table, else uniform in +-0.05."""
    rows: RowPrecision | None = None
    """How servers store rows (docs/guide/tables.md); left out = as the default table, else fp32."""
    state: StatePrecision | None = None
    """How servers store the optimizer's slots; left out = as the default table, else fp32."""
    admit: AdmitConfig | None = None
    """Which new ids become rows; left out = as in the default table, else all."""
    evict: EvictConfig | None = None
    """Which rows go; left out = as in the default table, else none."""
    freeze: bool | None = None
    """true = rows are read and never change: no gradient of them is computed or sent, and no row is created. Left out
    = as in the default table, else false."""
    compression: TableCompressionConfig | None = None
    """What is compressed otherwise than in `compression` of the job; left out = as in the default table, else nothing.
    """


class ConsistencyConfig(Named):
    """How old the rows of a step may be (docs/guide/consistency.md)."""

    mode: Literal["sync", "bounded", "async"] = "bounded"
    """The pull of step t sees, in sync: exactly all pushes of the steps before t; in bounded: at least every worker's
    pushes up to step t - 1 - staleness; in async: no promise."""
    staleness: int = Field(2, ge=0, le=64)
    """Steps by which a pull may lag behind (bounded), or of a worker's own unacknowledged pushes (async)."""

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


def check_policies(tables: Sequence[TableSpec], consistency: ConsistencyConfig) -> None:
    """Raises ValueError for policies that do not go with the mode, or with the names of other tables."""
    names = {table.name for table in tables}
    for table in tables:
        if table.evict is not None and table.evict.ttl_s is not None and consistency.mode == "sync":
            raise ValueError(
                f"tables.{table.name}.evict.ttl_s with consistency.mode: sync, where no clock decides; "
                "allowed: ttl_steps, or mode: bounded or async"
            )
        if table.candidates is not None and table.candidates.name in names:
            raise ValueError(
                f"tables.{table.name}.admit.min_count: its ids are counted in a table {table.candidates.name}, and "
                "another table has that name; allowed: another name"
            )


class TransportConfig(Settings):
    """How bytes are sent between workers and servers."""

    same_host: Literal["memory", "sockets"] = "memory"
    """Between processes of one Linux host: memory = the receiver copies arrays out of the sender's memory, if the
    system allows it; sockets = always sockets, so that network counters see every byte."""


class RecoveryConfig(Settings):
    """What a job may lose when processes die."""

    max_lost_steps: int | None = Field(None, ge=0)
    """Trained steps that may be lost by going back to a checkpoint; a job that would lose more ends. Left out = one
    checkpoint period; 0 if no checkpoints are kept."""
    max_journal_bytes: int | None = Field(None, ge=1_000_000)
    """Bytes of one server's journal above which it is given up: the server cannot be replaced then. Left out = no
    limit; under a loop of your own, 8 GB."""


class TelemetryConfig(Settings):
    """What each process says of itself while the job runs: `telemetry.jsonl` of the run folder."""

    every_s: float = Field(5.0, ge=0.0, le=DAY_S)
    """Seconds between two records of a process; 0 = no records. Large jobs write fewer: all processes together write at
    most 10 a second."""
    max_bytes: int = Field(64_000_000, ge=1_000_000)
    """Size of the file. When it is almost full, older records of a process are merged, so that each covers a longer
    time; the newest quarter stays as it is."""


class LivenessConfig(Settings):
    """Deadlines and leases."""

    lease_s: float = Field(15.0, ge=1.0, le=DAY_S)
    """Seconds without a heartbeat after which a member is declared dead."""
    step_timeout_s: float = Field(30.0, ge=1.0, le=DAY_S)
    """Seconds that one pull, push or reduction may take."""
    form_timeout_s: float = Field(120.0, ge=5.0, le=7 * DAY_S)
    """Seconds for all members to join, at the start and after a death."""
    grace_s: float = Field(25.0, ge=2.0, le=DAY_S)
    """Seconds from SIGTERM to the end: of a server or worker, which finishes its step; of the job, which writes a
    checkpoint, if the coordinator or launcher receives it."""
    restarts: int = Field(3, ge=0, le=1_000_000)
    """Deaths of one process, without a trained step in between, that a job survives; 0 = the first death fails the
    job."""

"""Settings of the parameter-server room: tables, consistency, transport, liveness.

Apart from the code they configure so that reading a config needs neither torch nor numba.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from shardkeep.base.errors import CheckpointError
from shardkeep.base.settings import DAY_S, MayDiffer, Named, Settings, first_problem, known
from shardkeep.compression.per_table import TableCompression
from shardkeep.ps.server.table.initializers.config import InitConfig
from shardkeep.ps.server.table.optimizers.registry import RowOptimizerConfig
from shardkeep.ps.server.table.optimizers.rowwise_adagrad import RowwiseAdagradConfig
from shardkeep.ps.server.table.optimizers.sgd import SgdConfig
from shardkeep.ps.server.table.policies.config import AdmitConfig, EvictConfig

RowPrecision = Literal["fp32", "fp16", "bf16", "int8"]
"""How a server stores the weights of a row."""
StatePrecision = Literal["fp32", "bf16"]
"""How a server stores the optimizer slots of a row."""


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
    dtype: RowPrecision = "fp32"
    """How servers store rows: int8 = integers times one scale a row, its largest absolute value / 127."""
    state_dtype: StatePrecision = "fp32"
    """How servers store the optimizer's slots."""
    admit: AdmitConfig | None = None
    """Which new ids become rows; left out = all."""
    evict: EvictConfig | None = None
    """Which rows go; left out = none."""
    freeze: bool = False
    """Rows are read and never change; ids without a row get their initial values."""
    compression: TableCompression | None = None
    """What is compressed otherwise than in the rest of the job; left out = nothing."""

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> TableSpec:
        """The table as this version or another one stored it. Raises CheckpointError for one that does not fit."""
        try:
            return cls.model_validate(known(record, cls))
        except ValidationError as error:
            raise CheckpointError(
                f"table {record.get('name')!r:.100}: stored settings do not fit this version ({first_problem(error)}); "
                "use the version of shardkeep that wrote them"
            ) from error

    @model_validator(mode="after")
    def _frozen_rows_never_change(self) -> TableSpec:
        if not self.freeze:
            return self
        for key in ("admit", "evict"):
            if getattr(self, key) is not None:
                raise ValueError(
                    f"{key}: with freeze: true, which neither creates nor removes rows; allowed: one of the two"
                )
        if self.optimizer.decays_all_rows:
            raise ValueError(
                "optimizer.weight_decay_on: table with freeze: true, where no update decays rows; allowed: touched"
            )
        return self

    @model_validator(mode="after")
    def _state_stands_rounding(self) -> TableSpec:
        if self.state_dtype != "fp32" and (why := self.optimizer.exact_state):
            raise ValueError(
                f"state_dtype: {self.state_dtype} with optimizer.name: {self.optimizer.name}, which {why}; "
                "allowed: fp32"
            )
        return self

    @model_validator(mode="after")
    def _optimizers_go_with_first_rows(self) -> TableSpec:
        if self.init.parameters == (0.0, 0.0) and self.optimizer.keeps_zeros and not self.freeze:
            names = f"init.name: {self.init.name} with optimizer.name: {self.optimizer.name}"
            raise ValueError(f"{names}, which keeps rows of zeros; allowed: another init")
        if self.init.name == "file" and self.optimizer.name == "ftrl":
            raise ValueError(
                "init.name: file with optimizer.name: ftrl, whose first update computes a row from its gradient sums "
                "and forgets the row of the file; allowed: another optimizer"
            )
        return self

    @property
    def candidates(self) -> TableSpec | None:
        """The table in which servers count ids that have no row in this one; None = nothing is counted."""
        if self.admit is None:
            return None
        window = self.admit.window_steps
        evict = EvictConfig(ttl_steps=window, sweep_steps=min(window, 1024), max_rows=self.admit.max_candidates)
        return TableSpec(name=f"{self.name[:190]} (counts)", dim=1, optimizer=SgdConfig(), evict=evict)


class TableConfig(Settings):
    """An entry of `tables` in a job's config. `tables.default` gives what it leaves out; `TableSpec` is complete."""

    dim: int | None = Field(None, ge=1, le=4096)
    """Values per row; left out = that of the default table, else 16."""
    optimizer: RowOptimizerConfig | None = None
    """Row optimizer; left out = that of the default table, else rowwise_adagrad."""
    init: InitConfig | None = None
    """Initial values; left out = those of the default table, else uniform in +-0.05."""
    dtype: RowPrecision | None = None
    """How servers store rows (docs/guide/tables.md); left out = as the default table, else fp32."""
    state_dtype: StatePrecision | None = None
    """How servers store the optimizer's slots; left out = as the default table, else fp32."""
    admit: Annotated[AdmitConfig | None, MayDiffer.STARTS] = None
    """Which new ids become rows; left out = as in the default table, else all."""
    evict: Annotated[EvictConfig | None, MayDiffer.STARTS] = None
    """Which rows go; left out = as in the default table, else none."""
    freeze: bool | None = None
    """true = rows are read and never change: no gradient of them is computed or sent, and no row is created. Left out
    = as in the default table, else false."""
    compression: TableCompression | None = None
    """none = rows and gradients travel in fp32, and all at once. A recipe = its number formats and its `keep`; all
    else of it is the job's. Left out = as in the default table, else as in `compression` of the job."""


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
    """What a job may lose when processes die, and how long it waits for others."""

    journal: Literal["auto", "off", "os", "fsync"] = "auto"
    """What an acknowledged push survives: os = the death of the server's process; fsync = also that of its machine; off
    = neither, so a replaced server resumes from the last checkpoint. auto = fsync where other hosts see the folders of
    all journals, else os."""
    restarts: int = Field(3, ge=0, le=1_000_000)
    """Deaths of one process, without a trained step in between, that a job survives; 0 = the first death fails the
    job."""
    max_lost_steps: int | None = Field(None, ge=0)
    """Trained steps that may be lost by going back to a checkpoint, or by a server that follows the others without
    them; a job that would lose more ends. Left out = one checkpoint period; 0 if no checkpoints are kept."""
    max_journal_bytes: int | None = Field(None, ge=1_000_000)
    """Bytes of one server's journal above which it is given up until the next checkpoint: the server cannot be replaced
    then. Left out = no limit; under a loop of your own, 8 GB."""
    replace_timeout_s: float = Field(900.0, ge=5.0, le=7 * DAY_S)
    """Seconds that a job waits for the replacement of a lost server, worker or coordinator. The job ends
    earlier when the launcher of the dead process starts no other."""


class TelemetryConfig(Settings):
    """What each process says of itself while the job runs: `telemetry.jsonl` of the run folder."""

    every_s: Annotated[float, Field(gt=0.0, le=DAY_S)] | Literal["off"] = 5.0
    """Seconds between two records of a process; off = no records. Large jobs write fewer: all processes together write
    at most 10 a second."""
    max_bytes: int = Field(64_000_000, ge=1_000_000)
    """Size of the file with the one before it: at half of it, the file becomes `telemetry.1.jsonl`, and the next one
    begins."""


class LivenessConfig(Settings):
    """Deadlines and leases."""

    lease_s: float = Field(15.0, ge=1.0, le=DAY_S)
    """Seconds without a heartbeat after which a member is declared dead."""
    step_timeout_s: float = Field(30.0, ge=1.0, le=DAY_S)
    """Seconds that one pull, push or reduction may take."""
    form_timeout_s: float = Field(120.0, ge=5.0, le=7 * DAY_S)
    """Seconds for all members to join, since the last one came."""
    grace_s: float = Field(25.0, ge=2.0, le=DAY_S)
    """Seconds from SIGTERM to the end: of a server or worker, which finishes its step; of the job, which writes a
    checkpoint, if the coordinator or launcher receives it."""

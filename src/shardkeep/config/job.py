"""JobConfig: composes the rooms' settings, and checks what spans rooms."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from operator import getitem
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from shardkeep.base.config.schedule import ScheduleConfig
from shardkeep.base.errors import ConfigError
from shardkeep.base.logs.log import EventLog
from shardkeep.base.settings import MayDiffer, Origin, Settings
from shardkeep.base.yaml_text import write_yaml
from shardkeep.compression.config import CompressionConfig
from shardkeep.config.affinity import check_counts
from shardkeep.config.launch import LaunchConfig
from shardkeep.config.overrides import flat
from shardkeep.config.paths import marked_keys, without
from shardkeep.config.problems import problems_of
from shardkeep.config.retrieval import check_retrieval, with_sampled_loss
from shardkeep.config.rules import (
    check_compression,
    check_labels,
    check_ranks,
    evaluated_of,
    unused,
    with_kinds,
    with_number_label,
)
from shardkeep.config.web import WebConfig
from shardkeep.ps.config import (
    ConsistencyConfig,
    LivenessConfig,
    RecoveryConfig,
    TableConfig,
    TableSpec,
    TelemetryConfig,
    TransportConfig,
)
from shardkeep.ps.control.telemetry import record_interval_s
from shardkeep.workers.config import (
    CLASS_METRICS,
    NUMBER_METRICS,
    CheckpointConfig,
    EvalConfig,
    ProfileConfig,
    TowerConfig,
    TrainConfig,
)
from shardkeep.workers.data_config import DataConfig
from shardkeep.workers.model_config import (
    MODELS,
    ONE_LABEL,
    DlrmConfig,
    ModelConfig,
    RetrievalSettings,
)

if TYPE_CHECKING:
    from shardkeep.workers.data.schema import Schema

_log = EventLog("config")
TableName = Annotated[str, Field(min_length=1, max_length=200)]


class JobConfig(Settings):
    """A whole job: one YAML file."""

    name: str = Field(
        "job", pattern=r"^[A-Za-z0-9._-]+$", max_length=100,
        json_schema_extra={"allowed": "text of at most 100 letters, digits, dots, dashes and underscores"},
    )  # fmt: skip
    """Name of the job; part of the run folder's name."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of initial values, shuffling and the tower."""
    servers: Annotated[int, MayDiffer.STARTS] = Field(2, ge=0, le=1024)
    """Server processes; 0 = the tables are in the one worker's process."""
    workers: Annotated[int, MayDiffer.STARTS] = Field(2, ge=1, le=1024, validate_default=True)
    """Worker processes; left out with servers: 0 = 1."""
    threads: Annotated[Annotated[int, Field(ge=1, le=4096)] | Literal["auto"], MayDiffer.STARTS, MayDiffer.MACHINES] = 1
    """CPU threads of each worker's dense model; auto = its share of the physical cores of a NUMA node."""
    launch: Annotated[LaunchConfig, MayDiffer.STARTS, MayDiffer.MACHINES] = LaunchConfig()
    """How the processes of a job on this machine start, and on which cores."""
    data: DataConfig = DataConfig()
    """Samples."""
    model: ModelConfig = DlrmConfig()
    """The dense model."""
    tables: dict[TableName, TableConfig] = Field(default_factory=dict)
    """Embedding tables by name; `default` gives the settings that the others leave out."""
    tower: TowerConfig = TowerConfig()
    """How the dense model trains."""
    train: TrainConfig = TrainConfig()
    """The training loop."""
    eval: Annotated[EvalConfig, MayDiffer.STARTS] = EvalConfig()
    """Evaluation."""
    consistency: ConsistencyConfig = ConsistencyConfig()
    """How old the rows of a step may be; left out = mode: bounded, or mode: sync with servers: 0."""
    compression: CompressionConfig = CompressionConfig()
    """What is compressed."""
    checkpoint: Annotated[CheckpointConfig, MayDiffer.STARTS] = CheckpointConfig()
    """Checkpoints."""
    transport: Annotated[TransportConfig, MayDiffer.STARTS] = TransportConfig()
    """How bytes are sent."""
    liveness: Annotated[LivenessConfig, MayDiffer.STARTS] = LivenessConfig()
    """Deadlines and leases."""
    recovery: Annotated[RecoveryConfig, MayDiffer.STARTS] = RecoveryConfig()
    """What a job may lose when processes die."""
    web: Annotated[WebConfig, MayDiffer.STARTS, MayDiffer.MACHINES] = WebConfig()
    """The live page, and metrics for Prometheus."""
    telemetry: Annotated[TelemetryConfig, MayDiffer.STARTS] = TelemetryConfig()
    """Records of what each process does."""
    profile: Annotated[ProfileConfig, MayDiffer.STARTS] = ProfileConfig()
    """Traces of some steps."""

    @model_validator(mode="before")
    @classmethod
    def _what_depends_on_others(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        found = dict(raw)
        if raw.get("servers") in (0, "0"):
            found = {"workers": 1, **found}
            if raw.get("consistency", {}) == {}:
                found["consistency"] = {"mode": "sync"}
        if isinstance(tables := raw.get("tables"), Mapping):
            found["tables"] = with_kinds(tables)
        return with_sampled_loss(with_number_label(found))

    @field_validator("workers")
    @classmethod
    def _one_process_has_one_worker(cls, workers: int, info: Any) -> int:
        if info.data.get("servers") == 0 and workers != 1:
            raise ValueError("with servers: 0 everything runs in one process; allowed: 1")
        return workers

    @field_validator("launch")
    @classmethod
    def _cores_are_for_somebody(cls, launch: LaunchConfig, info: Any) -> LaunchConfig:
        if {"servers", "workers"} <= info.data.keys():
            check_counts(launch.affinity, servers=info.data["servers"], workers=info.data["workers"])
        return launch

    @model_validator(mode="after")
    def _a_cache_is_not_exact(self) -> JobConfig:
        if self.compression.pull.cache_rows and self.consistency.mode == "sync":
            default = "" if self.servers else " (servers: 0 runs sync unless a mode is set)"
            raise ValueError(
                f"compression.pull.cache_rows: {self.compression.pull.cache_rows} with consistency.mode: sync, where a "
                f"pull sees all earlier pushes{default}; allowed: 0, or mode: bounded or async"
            )
        return self

    @model_validator(mode="after")
    def _sharded_towers_sum_plainly(self) -> JobConfig:
        if self.tower.parallel == "fsdp" and self.consistency.mode == "sync":
            default = "" if self.servers else " (servers: 0 runs sync unless a mode is set)"
            raise ValueError(
                "tower.parallel: fsdp with consistency.mode: sync, where no death changes a bit and no step is lost"
                f"{default}; allowed: ddp, or mode: bounded or async"
            )
        if self.tower.parallel == "fsdp" and self.compression.tower.name != "none":
            raise ValueError(
                f"tower.parallel: fsdp with compression.tower.name: {self.compression.tower.name}, which sums whole "
                "gradients; allowed: ddp, or none"
            )
        if self.tower.parallel == "fsdp" and self.workers == 1:
            raise ValueError("tower.parallel: fsdp with workers: 1, which splits nothing; allowed: ddp, or 2 and more")
        return self

    @model_validator(mode="after")
    def _no_clock_decides_in_sync(self) -> JobConfig:
        by_clock = [name for name, table in self.tables.items() if table.evict is not None and table.evict.ttl_s]
        if by_clock and self.consistency.mode == "sync":
            default = "" if self.servers else " (servers: 0 runs sync unless a mode is set)"
            raise ValueError(
                f"tables.{by_clock[0]}.evict.ttl_s with consistency.mode: sync, where no clock decides{default}; "
                "allowed: ttl_steps, or mode: bounded or async"
            )
        return self

    @model_validator(mode="after")
    def _what_is_scored_later_needs_a_checkpoint(self) -> JobConfig:
        tested = "data.test" if self.data.test else "data.split.test"
        for key, wanted in ((tested, self.tested), ("train.early_stopping", self.train.early_stopping)):
            if wanted and not self.checkpoint.on:
                raise ValueError(f"checkpoint.every_steps: off keeps no model for {key}; allowed: auto, or 1 or more")
        return self

    @model_validator(mode="after")
    def _rows_of_files_are_a_checkpoint(self) -> JobConfig:
        if "default" in self.row_files:
            raise ValueError("tables.default.init.name: file; allowed in the entry of one table, whose rows it has")
        if self.row_files and not self.checkpoint.on:
            raise ValueError(
                f"checkpoint.every_steps: off with tables.{self.row_files[0]}.init.name: file, whose rows become the "
                "checkpoint of step 0; allowed: auto, or 1 or more; in a loop of your own: client.fill"
            )
        return self

    @model_validator(mode="after")
    def _retrieval_has_its_own_loss(self) -> JobConfig:
        check_retrieval(self.model.name, self.data, self.train, self.tower)
        return self

    @model_validator(mode="after")
    def _the_loss_is_of_the_labels(self) -> JobConfig:
        loss, label = self.train.loss, self.data.label
        asked = self.eval.asked(loss)
        check_ranks(self.model.name, asked)
        if self.data.labels:
            check_labels(self.data.labels, self.train, self.eval)
            return self
        if label is not None and label.kind == "number" and not loss.of_numbers:
            raise ValueError("data.label.kind: number with train.loss: bce, whose labels are 0 and 1; allowed: class")
        if loss.of_numbers and (wrong := [name for name in asked if name in CLASS_METRICS]):
            raise ValueError(
                f"eval.metrics: {wrong[0]} needs labels of 0 and 1; allowed with train.loss: {loss.name}: "
                f"{', '.join(NUMBER_METRICS)}"
            )
        for key, watched in (("early_stopping", self.train.early_stopping), ("plateau", self.train.plateau)):
            if watched is not None and watched.metric.partition("/")[0] not in asked:
                raise ValueError(f"train.{key}.metric: {watched.metric} is not evaluated; allowed: {', '.join(asked)}")
        return self

    @model_validator(mode="after")
    def _several_labels_need_several_outputs(self) -> JobConfig:
        if self.data.labels and self.model.name in ONE_LABEL:
            allowed = ", ".join(name for name in MODELS if name not in ONE_LABEL)
            raise ValueError(f"model.name: {self.model.name} predicts one label; allowed with data.labels: {allowed}")
        return self

    @model_validator(mode="after")
    def _metrics_are_found_by_records(self) -> JobConfig:
        if self.web.has_metrics and not self.counts_figures:
            raise ValueError(
                "telemetry.every_s: off with web.metrics, whose targets come with the records; allowed: above 0"
            )
        return self

    @model_validator(mode="after")
    def _selection_decays_touched_rows(self) -> JobConfig:
        check_compression([self.table(name) for name in (*self.tables, "default")], self.compression)
        return self

    @model_validator(mode="after")
    def _rows_of_lr_are_one_weight(self) -> JobConfig:
        wide = [name for name, table in self.tables.items() if table.dim not in (None, 1)]
        if self.model.name == "lr" and wide:
            raise ValueError(
                f"tables.{wide[0]}.dim: {self.tables[wide[0]].dim} has no effect with model.name: lr, whose rows are "
                "one weight; leave it out or set 1"
            )
        return self

    @model_validator(mode="after")
    def _every_setting_has_an_effect(self, info: ValidationInfo) -> JobConfig:
        if info.context is None:
            for path, text in unused(self).items():
                raise ValueError(f"{path}: {text}")
        return self

    @classmethod
    def stored(cls, raw: Mapping[str, Any]) -> JobConfig:
        """`model_validate` that accepts settings without effect: they were judged, or the caller judges them."""
        return cls.model_validate(raw, context={})

    @property
    def tested(self) -> bool:
        """Whether test data are scored after training."""
        return self.eval.test and bool(self.data.test or (self.data.split and self.data.split.test))

    @property
    def evaluated(self) -> list[str]:
        """Keys of the metrics of an evaluation: METRIC, or METRIC/LABEL where the config lists several labels."""
        if not self.data.labels:
            return list(self.eval.asked(self.train.loss))
        return evaluated_of(self.data.labels, self.eval)

    @property
    def items(self) -> RetrievalSettings | None:
        """The model, if it is one of retrieval, whose data have a catalogue."""
        return self.model if isinstance(self.model, RetrievalSettings) else None

    @property
    def schedules(self) -> dict[str, ScheduleConfig]:
        """The schedules of all learning rates, by their keys."""
        optimizers = {f"tables.{n}": t.optimizer for n, t in self.tables.items() if t.optimizer and not t.freeze}
        return {
            f"{key}.optimizer.schedule": each.schedule
            for key, each in {**optimizers, "tower": self.tower.optimizer}.items()
        }

    @property
    def own_modules(self) -> list[str]:
        """The code of the user's own that it names, `module:name`."""
        names = [self.model.name, self.data.source, *self.compression.own]
        return [name for name in names if ":" in name]

    @property
    def row_files(self) -> list[str]:
        """The tables whose first rows are in a file."""
        return [name for name, table in self.tables.items() if table.init is not None and table.init.name == "file"]

    @property
    def counts_figures(self) -> bool:
        """Whether somebody reads the figures of the job's processes."""
        return self.telemetry_s > 0

    @property
    def telemetry_s(self) -> float:
        """Seconds between two telemetry records of a process; 0 = no records."""
        every_s = 0.0 if self.telemetry.every_s == "off" else self.telemetry.every_s
        return record_interval_s(every_s, servers=self.servers, workers=self.workers)

    def table(self, name: str) -> TableSpec:
        """The full definition of table `name`: its own settings, then `tables.default`, then the built-in ones."""
        merged: dict[str, Any] = {"name": name}
        own = self.tables.get(name)
        for source in (self.tables.get("default"), own):
            if source is own and own is not None and own.freeze:
                merged = {key: value for key, value in merged.items() if key not in ("admit", "evict")}
            if source is not None:
                merged |= {key: value for key, value in source if value is not None}
        try:
            return TableSpec(**merged)
        except ValidationError as error:  # a name that the data has
            raise ConfigError(f"tables.{name}: {problems_of(error, TableSpec)[0]}") from error

    def all_settings(self) -> dict[str, Any]:
        """Every setting by its dotted key, also those left out; each table's in full."""
        tables = {name: self.table(name).model_dump(mode="json") for name in ("default", *self.tables)}
        return flat({**self.model_dump(mode="json"), "tables": tables})

    def agreed(self) -> dict[str, Any]:
        """What all members of a job must have alike: its settings without paths and others of one machine."""
        marks = (MayDiffer.MACHINES, Origin.FILE, Origin.DATA_ROOT)
        return without(self.model_dump(mode="json"), [keys for mark in marks for keys in marked_keys(JobConfig, mark)])

    def check_tables(self, schema: Schema) -> None:
        """Raises ConfigError for a table that no feature uses, and as `check_shared_tables`."""
        from shardkeep.workers.data.schema import check_shared_tables  # not in every role

        used = schema.tables()
        check_shared_tables(schema, [name for name in self.tables if name != "default"])
        if unused := [name for name in self.tables if name != "default" and name not in used]:
            raise ConfigError(f"tables.{unused[0]}: no feature uses this table; the tables are {', '.join(used)}")

    def to_yaml(self) -> str:
        """The resolved config as YAML, which `stored_config` reads."""
        return write_yaml(self.model_dump(mode="json"), sort_keys=False)

    def with_effect(self) -> JobConfig:
        """The config for a file that a command reads, without the settings that an override left without effect."""
        found, idle = self.model_dump(mode="json"), unused(self)
        for *groups, key in (path.split(".") for path in idle):
            functools.reduce(getitem, groups, found).pop(key)
        try:
            return JobConfig.stored(found) if idle else self
        except ValidationError:  # another setting needs one of them: the command that reads the file refuses it
            return self

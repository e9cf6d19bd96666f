"""Settings of training: optimizer and dense model, loop, evaluation, checkpoints, profile."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from shardkeep.base.config.schedule import ScheduleConfig
from shardkeep.base.plugging.plugs import Plug, by_name
from shardkeep.base.settings import DAY_S, MOST_STEPS, FilePath, MayDiffer, Named, Settings
from shardkeep.workers.data_config import ColumnName
from shardkeep.workers.label_config import LOSSES as LOSSES, LossConfig as LossConfig

_MOST_SAMPLES = 100_000_000
"""Of one batch."""


class TowerOptimizerConfig(Named):
    """Optimizer of the dense parameters (torch.optim, fused)."""

    name: Literal["sgd", "adam", "adamw"] = "adam"
    """torch.optim.SGD, Adam or AdamW."""
    lr: float = Field(0.001, gt=0.0, le=1e6)
    """Learning rate."""
    momentum: float | None = Field(None, ge=0.0, lt=1.0)
    """sgd only; default 0."""
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] | None = None
    """adam and adamw only; default (0.9, 0.999)."""
    eps: float | None = Field(None, ge=0.0, le=1e6)
    """adam and adamw only; default 1e-8."""
    weight_decay: float = Field(0.0, ge=0.0, le=1e6)
    """L2 penalty (sgd, adam) or decoupled decay (adamw)."""
    schedule: Annotated[ScheduleConfig, MayDiffer.STARTS] = ScheduleConfig()
    """Learning rate over steps."""

    @model_validator(mode="after")
    def _every_argument_is_used(self) -> TowerOptimizerConfig:
        if self.name == "sgd":
            wrong = [k for k in ("betas", "eps") if getattr(self, k) is not None]
        else:
            wrong = [k for k in ("momentum",) if self.momentum is not None]
        if wrong:
            raise ValueError(f"{' and '.join(wrong)}: has no effect with name: {self.name}")
        return self


Amp = Literal["auto", "off", "bf16", "fp16"]
"""Arithmetic of a dense model."""


class TowerConfig(Settings):
    """How the dense model trains."""

    optimizer: TowerOptimizerConfig = TowerOptimizerConfig()
    """Optimizer of the dense parameters."""
    compile: Annotated[Literal["auto", "on", "off"], MayDiffer.STARTS] = "auto"
    """torch.compile: on, off, or auto = on for training on a GPU, except in sync."""
    mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """Mode of torch.compile."""
    amp: Amp = "auto"
    """Automatic mixed precision; auto = bf16 where the hardware has it, else off; fp16 uses a GradScaler."""
    linear: Literal["auto", "torch", "onednn"] = "auto"
    """Library of fp32 matrix products in linear layers on a CPU: torch (MKL) or onednn; auto = oneDNN on AMD CPUs with
    AVX-512, which MKL does not use."""
    device: Annotated[Literal["auto", "cpu", "cuda"], MayDiffer.STARTS] = "auto"
    """Device of the dense model; auto = CUDA if a host has a device for each of its workers."""
    parallel: Annotated[Literal["ddp", "fsdp"], MayDiffer.STARTS] = "ddp"
    """What each worker holds of the dense model: ddp = all of it; fsdp = a part of each parameter, for towers of 50
    million parameters and more. fsdp keeps no state for recovery beside checkpoints."""

    pad_widths: Literal["off", 8, 16, 32, 64] = "off"
    """N = train linear layers in widths that are multiples of N, by zeros that no parameter keeps. Where that is
    faster, `shardkeep estimate` says so."""

    @model_serializer(mode="wrap")
    def _without_what_is_new(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Versions that know no shards and no padding read the settings of other towers."""
        found: dict[str, Any] = handler(self)
        new = {"parallel": "ddp", "pad_widths": "off"}
        return {key: value for key, value in found.items() if new.get(key, ...) != value}

    @model_validator(mode="after")
    def _sharded_towers_run_eager(self) -> TowerConfig:
        if self.parallel == "fsdp" and self.compile == "on":
            raise ValueError("compile: on with parallel: fsdp; allowed: auto or off")
        return self


METRIC_SIGNS = {
    "auc": 1, "gauc": 1, "accuracy": 1, "precision": 1, "recall": 1, "r2": 1,
    "logloss": -1, "normalized_entropy": -1, "mse": -1, "mae": -1, "rmse": -1,
    "ndcg": 1, "mrr": 1,
}  # fmt: skip
"""Metrics by which a model can be chosen, and whether more is better (1) or less (-1)."""


def sign_of(metric: str) -> int | None:
    """The sign of METRIC, METRIC/LABEL or METRIC@K; None = a model cannot be chosen by it."""
    return METRIC_SIGNS.get(metric.partition("/")[0].partition("@")[0])


class _Watched(Settings):
    """A metric that is to improve."""

    metric: str = "auc"
    """Metric of evaluation; more is better for auc, less for logloss. METRIC/LABEL for a model of several labels,
    recall@10 and others with a number for a retrieval model."""
    min_delta: Annotated[float, MayDiffer.STARTS] = Field(0.0, ge=0.0, le=1e6)
    """An evaluation improves if it is better than the best one by more than this."""

    @field_validator("metric")
    @classmethod
    def _can_be_compared(cls, value: str) -> str:
        if sign_of(value) is None:
            raise ValueError(f"allowed: {', '.join(METRIC_SIGNS)}, or METRIC/LABEL")
        return value


class EarlyStoppingConfig(_Watched):
    """Ends the job once evaluations no longer improve, and keeps the best model."""

    patience: Annotated[int, MayDiffer.STARTS] = Field(2, ge=1, le=1_000_000)
    """Evaluations in a row that do not improve, after which the job ends."""


class PlateauConfig(_Watched):
    """Lowers the learning rates of dense model and rows once evaluations no longer improve."""

    patience: int = Field(1, ge=1, le=1_000_000)
    """Evaluations in a row that do not improve, after which the rates fall; then the count starts at 0."""
    factor: float = Field(0.1, gt=0.0, lt=1.0)
    """Multiplies the learning rates each time they fall."""
    min_factor: float = Field(0.001, ge=1e-30, lt=1.0)
    """The least factor on the learning rates."""


class TrainConfig(Settings):
    """The training loop."""

    loss: LossConfig = LossConfig()
    """What training minimizes."""
    batch_size: int = Field(512, ge=1, le=_MOST_SAMPLES)
    """Samples per worker and micro-batch."""
    epochs: Annotated[int, MayDiffer.STARTS] = Field(1, ge=1, le=1_000_000)
    """Passes over the training data."""
    max_steps: Annotated[int | None, MayDiffer.STARTS] = Field(None, ge=1, le=MOST_STEPS)
    """Most steps of the job; left out = the epochs decide."""
    accumulate: int = Field(1, ge=1, le=1_000_000)
    """Micro-batches per step; one push and one dense update per step."""
    clip_norm: float | None = Field(None, gt=0.0, le=1e30)
    """Largest norm of the dense gradient, over all parameters; left out = no clipping."""
    order: Literal["shuffled", "stored", "time"] = "shuffled"
    """Order of the samples: shuffled = a seeded random order, a new one per epoch; stored = that of `data.time`, or of
    files and rows without it; time = as stored, where each step of the first epoch is scored before it trains."""
    report_every_s: Annotated[float, MayDiffer.STARTS] = Field(2.0, gt=0.0, le=DAY_S)
    """Seconds between two lines of metrics.jsonl."""
    early_stopping: EarlyStoppingConfig | None = None
    """When to end before the last epoch; left out = never. The checkpoint of the best model is kept."""
    plateau: PlateauConfig | None = None
    """When to lower the learning rates; left out = never. Multiplies those of `schedule`."""
    max_bad_steps: Annotated[int, MayDiffer.STARTS] = Field(20, ge=1, le=MOST_STEPS)
    """Consecutive steps with non-finite gradients after which the job fails."""


CLASS_METRICS = ("auc", "gauc", "logloss", "normalized_entropy", "calibration", "calibration_buckets", "accuracy",
              "precision", "recall")  # fmt: skip
ERRORS = ("mse", "rmse", "mae")
NUMBER_METRICS = (*ERRORS, "r2")
"""Metrics that need labels of 0 and 1, and those that take any labels."""
METRICS: dict[str, Plug[bool, Any]] = by_name(
    *(Plug(name, True, f"shardkeep.workers.metrics.quality:{name}_of") for name in CLASS_METRICS),
    *(Plug(name, False, f"shardkeep.workers.metrics.quality:{name}_of") for name in NUMBER_METRICS),
)
"""The `config` of a metric: whether it needs labels of 0 and 1."""
BASELINE = "baseline_"
"""Before the name of an error: that of the constant mean of the training labels."""
UNWEIGHTED = "unweighted_"
"""Before the name of a metric: that of samples that all weigh the same."""
DEFAULT_METRICS = ("auc", "logloss", "normalized_entropy", "calibration")
RANK_METRICS = ("recall@10", "recall@50", "ndcg@10", "mrr")
"""The default metrics of retrieval models."""
RANK_FORMS = "recall@K, ndcg@K, mrr"
_RANK = re.compile(r"(recall|ndcg)@[1-9][0-9]{0,5}|mrr")


def is_of_ranks(metric: str) -> bool:
    """Whether a metric is one of retrieval models: `RANK_FORMS`."""
    return _RANK.fullmatch(metric) is not None


def asked_of(metrics: Sequence[str], *, numbers: bool) -> tuple[str, ...]:
    """The metrics of one of several labels: those of its kind among `metrics`, or the defaults of its kind."""
    own = tuple(name for name in metrics if not numbers or not METRICS[name].config)
    return own or (NUMBER_METRICS if numbers else DEFAULT_METRICS)


_EVAL_DEFAULTS = (("exclude_seen", False), ("test", True))


class EvalConfig(Settings):
    """Evaluation on the evaluation data."""

    every_steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] | Literal["epoch"] = "epoch"
    """Steps between two evaluations; epoch = after each epoch. The end of training always evaluates."""
    batch_size: int | None = Field(None, ge=1, le=_MOST_SAMPLES)
    """Samples per worker and batch; left out = 4 times train.batch_size."""
    max_samples: int | None = Field(None, ge=1, le=MOST_STEPS)
    """Number of samples to evaluate, from the first; left out = all."""
    metrics: Annotated[list[str], Field(min_length=1, max_length=20)] | None = None
    """auc, gauc, logloss, normalized_entropy, calibration, calibration_buckets, accuracy, precision, recall, mse, rmse,
    mae, r2 (docs/reference/metrics.md); left out = auc, logloss, normalized_entropy and calibration; of
    labels that are numbers mse, rmse, mae and r2. Of retrieval models recall@K, ndcg@K and mrr; left out = recall@10,
    recall@50, ndcg@10 and mrr."""
    threshold: float = Field(0.5, ge=0.0, le=1.0)
    """Probability from which a sample counts as predicted positive, for accuracy, precision and recall."""
    group_by: ColumnName | None = None
    """gauc: the column of data.sparse whose values group the samples, such as the user."""
    exclude_seen: bool = False
    """Retrieval models: leave out the items of a sample's own lists, except its target."""
    test: bool = True
    """Score the test data (`data.test`, or those of `data.split`) once after training; false = leave them unread."""

    @field_validator("metrics")
    @classmethod
    def _known_metrics(cls, value: list[str] | None) -> list[str] | None:
        for name in value or ():
            if name not in METRICS and not is_of_ranks(name):
                known = f"{', '.join(METRICS)}; of retrieval models {RANK_FORMS}"
                raise ValueError(f"{name[:60]!r} is unknown; allowed: {known}")
        return value if value is None else list(dict.fromkeys(value))

    @model_validator(mode="after")
    def _groups_are_of_gauc(self) -> EvalConfig:
        asked = "gauc" in (self.metrics or ())
        if asked and self.group_by is None:
            raise ValueError("group_by: is missing; gauc needs the column that groups the samples")
        if self.group_by is not None and not asked:
            raise ValueError("group_by: has no effect without gauc in metrics")
        return self

    @model_serializer(mode="wrap")
    def _without_later_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Versions that know no retrieval, or test all jobs, read the settings of other jobs."""
        found: dict[str, Any] = handler(self)
        return {key: value for key, value in found.items() if (key, value) not in _EVAL_DEFAULTS}

    def asked(self, loss: LossConfig) -> tuple[str, ...]:
        """The metrics of a job with this loss."""
        defaults = NUMBER_METRICS if loss.of_numbers else DEFAULT_METRICS
        return tuple(self.metrics or (RANK_METRICS if loss.name == "sampled_softmax" else defaults))


class CheckpointConfig(Settings):
    """Checkpoints of the whole job, from which `shardkeep train --resume` continues."""

    every_steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] | Literal["auto", "off"] = "auto"
    """Steps between two checkpoints; the end of training writes one too; off = none. auto = about every ten minutes,
    and before a server's journal reaches 4 GB."""
    keep: int = Field(3, ge=1, le=1_000_000)
    """Checkpoints that are kept, with their bases; older ones are deleted."""
    full_every: int = Field(1, ge=1, le=100)
    """One in N checkpoints holds all rows, the others the rows that changed since the one before; 1 = all hold all
    rows."""
    dir: FilePath | None = None
    """Folder of the checkpoints, shared by all members, relative to the config file; left out = `checkpoints` in the
    run folder."""

    @property
    def on(self) -> bool:
        """Whether the job writes checkpoints."""
        return self.every_steps != "off"

    @property
    def period(self) -> int | None:
        """Steps between two checkpoints; 0 = there are none, None = the job chooses."""
        return None if self.every_steps == "auto" else self.every_steps if self.every_steps != "off" else 0


class ProfileConfig(Settings):
    """A torch.profiler trace of some steps, in `profile/` of the run folder: one file per worker and server."""

    start: int = Field(0, ge=0, le=MOST_STEPS)
    """First step of the trace, counted from 0."""
    steps: Annotated[int, Field(ge=1, le=1000)] | Literal["off"] = "off"
    """Steps in the trace; off = no trace."""

    @property
    def end(self) -> int:
        """The first step after the trace."""
        return self.start + (0 if self.steps == "off" else self.steps)

    @model_validator(mode="after")
    def _a_start_needs_steps(self) -> ProfileConfig:
        if self.start and self.steps == "off":
            raise ValueError(f"start: {self.start} has no effect with steps: off; allowed: steps of 1 to 1000")
        return self

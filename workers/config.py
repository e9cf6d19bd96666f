"""Settings of the workers' room: data, model, tower, training. Apart from the code: needs no torch."""

from __future__ import annotations

import difflib
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from shardkeep.base.schedule import ScheduleConfig
from shardkeep.base.settings import DAY_S, MOST_STEPS, MOST_WIDTH, FilePath, Named, Settings, Width, bare
from shardkeep.workers.early_stopping import EarlyStoppingConfig, PlateauConfig

Scaling = Literal["none", "standard", "log", "log_standard"]
SOURCES = ("csv", "parquet", "criteo", "synthetic")
FILE_SOURCES = SOURCES[:3]
_HIDDEN = ("top", "dropout", "norm", "activation", "init", "activation_checkpointing")
MODELS: dict[str, tuple[str, ...]] = {
    "lr": (),
    "fm": (),
    "dnn": _HIDDEN,
    "wide_deep": _HIDDEN,
    "deepfm": _HIDDEN,
    "xdeepfm": (*_HIDDEN, "cin"),
    "dlrm": (*_HIDDEN, "bottom"),
    "dcn_v2": (*_HIDDEN, "structure", "cross_layers", "cross_rank"),
    "autoint": (*_HIDDEN, "attention"),
    "fibinet": (*_HIDDEN, "bilinear", "reduction"),
    "masknet": (*(key for key in _HIDDEN if key != "norm"), "structure", "mask"),
    "finalmlp": (*_HIDDEN, "second_top", "fusion_heads", "gates"),
}
"""The stock models, and the options of each."""
_STRUCTURES = {"dcn_v2": ("stacked", "parallel"), "masknet": ("serial", "parallel")}
_SUFFIXES = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".pq": "parquet", ".parq": "parquet"}
_COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")
_MOST_COLUMNS = 100_000
_MOST_LAYERS = 100
_MOST_SAMPLES = 100_000_000
"""Of one batch."""


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _texts(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, list) and any(isinstance(v, bool) for v in value)):
        raise ValueError(
            'a bare yes, no, on, off, true or false is a truth value in YAML; put the text in quotes: ["yes"]'
        )
    if isinstance(value, list):
        return [str(v) if isinstance(v, int | float) else v for v in value]
    return [str(value)] if isinstance(value, str | int | float) else value


def _delimiter(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if not value or any(c in value for c in '"\r\n'):
        raise ValueError("allowed: one or more characters, none of them a quote or the end of a line")
    if len(value) == 1 and not value.isascii():
        raise ValueError("allowed: a character of ASCII, or several characters")
    return "\t" if value in ("\\t", "tab") else value


def _own_code(value: str, built_in: tuple[str, ...], form: str) -> str:
    """`value` where it is built in or has the form module:name. Raises ValueError."""
    module, colon, name = value.partition(":")
    if value in built_in or (colon and all(part.isidentifier() for part in [*module.split("."), name])):
        return value
    near = difflib.get_close_matches(value, built_in, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"allowed: {', '.join(built_in)} or {form} of your own{hint}")


Paths = Annotated[list[FilePath], BeforeValidator(_listed, json_schema_input_type=str | list[str])]
"""One name needs no list."""
Texts = Annotated[list[str], BeforeValidator(_texts)]  # YAML reads 4 as a number; a file holds texts


ColumnName = Annotated[str, Field(min_length=1)]


class DenseColumn(Settings):
    """One number per sample."""

    column: ColumnName
    """Name of the column, or a pattern with *."""
    scale: Scaling | None = None
    """none, standard = (x - mean) / std over the training data, log = sign(x) * log(1 + |x|),
    log_standard = both; left out = `data.scale`."""
    fill: float | Literal["mean"] = "mean"
    """Value of a missing entry, before scaling; mean = the mean of the training data."""


class SparseColumn(Settings):
    """One feature: the ids of a sample, looked up in a table."""

    column: ColumnName
    """Name of the column, also the feature's name; or a pattern with *."""
    table: ColumnName | None = None
    """Table with its rows; features that name one table share it; left out = a table of its own."""
    pooling: Literal["sum", "mean", "max", "weighted"] = "sum"
    """How the rows of several ids become one: sum, mean, max of each dimension, or sum weighted by `weights`."""
    separator: str | None = None
    """Text between the ids of a multi-valued field, at least one character; left out = a single value (or a list
    column)."""
    weights: ColumnName | None = None
    """Column with a weight per id; for pooling: weighted."""

    @field_validator("separator")
    @classmethod
    def _a_separator_has_characters(cls, value: str | None) -> str | None:
        if value == "":
            raise ValueError("allowed: one or more characters; left out = a single value")
        return value

    @model_validator(mode="after")
    def _weights_go_with_weighted(self) -> SparseColumn:
        if self.pooling == "max" and self.weights is not None:
            raise ValueError(
                f"pooling: max takes no weights, and weights: {self.weights} is set; leave one of them out"
            )
        if (self.pooling == "weighted") != (self.weights is not None):
            raise ValueError("pooling: weighted and weights: COLUMN go together; one is missing")
        return self


class LabelColumn(Settings):
    """The label: 0 or 1, or a number."""

    column: ColumnName
    """Name of the column."""
    positive: Texts | None = None
    """Values that mean 1; every other value means 0. Left out = the column holds 0 and 1, or true and false."""
    missing: Literal["error", "skip"] = "error"
    """What to do with rows without a label: error, or skip = leave them out."""
    kind: Literal["class", "number"] = "class"
    """class = 0 or 1; number = any number, for train.loss: mse or huber, which sets it."""

    @model_validator(mode="after")
    def _numbers_have_no_positive_ones(self) -> LabelColumn:
        if self.kind == "number" and self.positive is not None:
            raise ValueError("positive: has no effect with kind: number; leave one of them out")
        return self


class SyntheticConfig(Settings):
    """The synthetic stream: Zipf ids, and labels drawn from a planted model."""

    train_samples: int = Field(1_000_000, ge=1, le=MOST_STEPS)
    """Samples of one epoch."""
    eval_samples: int = Field(100_000, ge=2, le=100_000_000)
    """Samples of the evaluation set."""
    num_dense: int = Field(13, ge=0, le=_MOST_COLUMNS)
    """Dense columns."""
    table_sizes: Annotated[list[Annotated[int, Field(ge=1, le=2_000_000_000)]], Field(max_length=_MOST_COLUMNS)] = (
        Field(default_factory=list)
    )
    """Ids of each sparse feature; left out = 26 tables from 100 to 1 M ids."""
    zipf: float = Field(1.05, gt=0.0, le=100.0)
    """Exponent of the ids' popularity."""
    ids: Literal["hashed", "numbered"] = "hashed"
    """hashed = any 64 bits, like hashes of texts, which no code makes shorter; numbered = 0 to the table's size, in
    random order."""


def _names(value: Any) -> list[str]:
    return [name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str)]


def _suffix(name: str) -> str:
    """The suffix that says what a file holds; empty where it has none such."""
    path = PurePosixPath(name.lower())
    suffix = PurePosixPath(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix
    return suffix if suffix in _SUFFIXES else ""


class DataConfig(Settings):
    """Where samples come from and what their columns mean."""

    source: str = ""
    """csv, parquet, criteo, synthetic, or your own module:function; left out = by the suffix of the files (.csv and
    .tsv, also compressed, .parquet, .pq, .parq), or synthetic if that has settings."""
    root: FilePath = "."
    """Folder to which the paths below are relative; . = the config's folder."""
    train: Paths = Field(default_factory=list)
    """Training files, folders or glob patterns."""
    eval: Paths = Field(default_factory=list)
    """Evaluation files, folders or glob patterns."""
    test: Paths = Field(default_factory=list)
    """Test files, folders or glob patterns: scored once, after training, by the best model or the last."""
    eval_fraction: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of the training rows held out for evaluation, by a seeded hash of the row number; only without `eval`."""
    columns: list[str] | None = None
    """Names of all columns of a csv without a header; left out = the first line is the header."""
    delimiter: Annotated[str, BeforeValidator(_delimiter)] = ","
    """Between the fields of a csv; tab = "\\t"; with more than one character, quotes mean nothing."""
    decimal: Literal[".", ","] = "."
    """Decimal point of a csv's numbers."""
    missing: Texts = Field(default_factory=lambda: ["", "?", "NA", "nan", "NaN", "null"])
    """Values that mean a missing value: texts, after stripping spaces, and numbers."""
    label: Annotated[LabelColumn, bare("column")] | None = None
    """The column to predict; criteo and synthetic have their own."""
    dense: list[Annotated[DenseColumn, bare("column")]] = Field(default_factory=list)
    """Columns of numbers; criteo and synthetic have their own."""
    sparse: list[Annotated[SparseColumn, bare("column")]] = Field(default_factory=list)
    """Columns of categories; criteo and synthetic have their own."""
    scale: Scaling | None = None
    """Scaling of dense columns that name none; left out = standard (criteo: log)."""
    cache: FilePath | None = None
    """Folder of the cache, relative to `data.root`; left out = `.shardkeep-cache` beside the data, or your cache folder
    if that is read-only or others can write it."""
    synthetic: SyntheticConfig = SyntheticConfig()
    """The synthetic stream."""
    accept: str | None = None
    """Fingerprint of other training data with which `--resume` may continue; the error that refuses them names it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of your module:function."""

    @model_validator(mode="before")
    @classmethod
    def _source_by_suffix(cls, value: Any) -> Any:
        if not isinstance(value, dict) or value.get("source"):
            return value
        names = [name for key in ("train", "eval", "test") for name in _names(value.get(key))]
        if not names:  # the resolved config of a job without data says source: ""
            return {**value, "source": "synthetic" if "synthetic" in value and "source" not in value else ""}
        suffixes = {_suffix(name) for name in names}
        sources = {_SUFFIXES.get(suffix, "") for suffix in suffixes}
        tabs = {"delimiter": "tab"} if suffixes == {".tsv"} and "delimiter" not in value else {}
        return {**value, "source": sources.pop() if len(sources) == 1 else "", **tabs}

    @model_validator(mode="after")
    def _files_have_a_source(self) -> DataConfig:
        if self.source or not (names := [*self.train, *self.eval, *self.test]):
            return self
        by_suffix = {_suffix(name): name[:60] for name in names}
        why = (
            f"{by_suffix['']!r} has no suffix that says it"
            if "" in by_suffix
            else (f"the suffixes of {' and '.join(by_suffix.values())} say different ones")
        )
        raise ValueError(f"source: is missing, and {why}; allowed: {', '.join(SOURCES[:3])} or module:function")

    @field_validator("source")
    @classmethod
    def _known_source(cls, value: str) -> str:
        return value and _own_code(value, SOURCES, "module:function")


class AttentionConfig(Settings):
    """Self-attention between fields."""

    layers: int = Field(3, ge=1, le=16)
    """Number of layers."""
    heads: int = Field(2, ge=1, le=64)
    """Heads of each layer."""
    dim: int = Field(64, ge=1, le=4096)
    """Width of all heads together; a multiple of `heads`."""

    @model_validator(mode="after")
    def _heads_are_equally_wide(self) -> AttentionConfig:
        if self.dim % self.heads:
            raise ValueError(f"dim: {self.dim} with heads: {self.heads}; allowed: a multiple of heads")
        return self


class MaskConfig(Settings):
    """Blocks that multiply their input by a mask."""

    ratio: float = Field(1.0, gt=0.0, le=16.0)
    """Width of the mask's hidden layer, divided by that of the masked input."""
    blocks: int | None = Field(None, ge=1, le=64)
    """structure: parallel only: number of blocks; default 3."""
    dim: int | None = Field(None, ge=1, le=MOST_WIDTH)
    """structure: parallel only: width of a block's output; default 64."""


class GatesConfig(Settings):
    """Gates on the inputs of two streams."""

    widths: list[Width] = Field([64], max_length=_MOST_LAYERS)
    """Widths of a gate's hidden layers."""
    first: list[str] = Field(default_factory=list)
    """Features that the first stream's gate sees; none = a learned vector."""
    second: list[str] = Field(default_factory=list)
    """Features that the second stream's gate sees; none = a learned vector."""


class ModelConfig(Named):
    """The dense model over the pooled embeddings. An option that the model does not use is refused."""

    name: str = "dlrm"
    """lr, fm, dnn, wide_deep, deepfm, xdeepfm, dlrm, dcn_v2, autoint, fibinet, masknet, finalmlp, or your own
    module:Class."""
    bottom: Annotated[list[Width], Field(max_length=_MOST_LAYERS)] | None = None
    """dlrm: widths of the hidden layers over the dense columns; a layer of the default dim follows; default [512,
    256]."""
    top: Annotated[list[Width], Field(max_length=_MOST_LAYERS)] | None = None
    """Widths of the hidden layers before the logit; default [512, 256]."""
    dropout: float | None = Field(None, ge=0.0, lt=1.0)
    """Dropout after every hidden layer; default 0."""
    norm: Literal["none", "batch", "layer"] | None = None
    """Normalization in every hidden layer, before the activation (docs/guide/models.md); default none."""
    activation: Literal["relu", "gelu", "prelu", "dice"] | None = None
    """Activation of the hidden layers; default relu."""
    init: Literal["dlrm", "xavier_normal", "xavier_uniform", "kaiming_uniform"] | None = None
    """Initial values of the linear layers; default dlrm: xavier_normal with random biases."""
    structure: Literal["stacked", "parallel", "serial"] | None = None
    """dcn_v2: stacked (default) or parallel; masknet: serial (default) or parallel."""
    cross_layers: int | None = Field(None, ge=1, le=16)
    """dcn_v2: number of cross layers; default 3."""
    cross_rank: int | None = Field(None, ge=1, le=MOST_WIDTH)
    """dcn_v2: rank of the weights of the cross layers; left out = full rank."""
    cin: Annotated[list[Width], Field(min_length=1, max_length=16)] | None = None
    """xdeepfm: vectors of each layer of the compressed interaction network; default [16, 16, 16]."""
    attention: AttentionConfig | None = None
    """autoint: self-attention between fields."""
    bilinear: Literal["all", "each", "interaction"] | None = None
    """fibinet: one matrix for all fields, for each field, or for each pair; default interaction."""
    reduction: int | None = Field(None, ge=1, le=1000)
    """fibinet: fields divided by the width of SENET's hidden layer; default 3."""
    mask: MaskConfig | None = None
    """masknet: its blocks."""
    second_top: Annotated[list[Width], Field(max_length=_MOST_LAYERS)] | None = None
    """finalmlp: widths of the second stream's hidden layers; left out = `top`."""
    fusion_heads: int | None = Field(None, ge=1, le=1024)
    """finalmlp: heads of the bilinear fusion of both streams; default 1."""
    gates: GatesConfig | None = None
    """finalmlp: gates on the streams' inputs."""
    activation_checkpointing: bool = False
    """Recompute hidden layers in the backward pass to save memory."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of your module:Class."""

    @field_validator("name")
    @classmethod
    def _known_name(cls, value: str) -> str:
        return _own_code(value, tuple(MODELS), "module:Class")

    @model_validator(mode="after")
    def _every_option_is_used(self) -> ModelConfig:
        used = MODELS.get(self.name, ("options",))
        for key in type(self).model_fields:
            value = getattr(self, key)
            if not (key == "name" or key in used or value is None or value is False or value == {}):
                allowed = f"it uses {', '.join(used)}" if used else "it has no options"
                raise ValueError(f"{key}: has no effect with model.name: {self.name}; {allowed}")
        structures = _STRUCTURES.get(self.name, ())
        if self.structure is not None and self.structure not in structures:
            raise ValueError(
                f"structure: {self.structure} with model.name: {self.name}; allowed: {' or '.join(structures)}"
            )
        if self.mask is not None and self.structure != "parallel":
            for key in ("blocks", "dim"):
                if getattr(self.mask, key) is not None:
                    raise ValueError(f"mask.{key}: has no effect with structure: serial; allowed: structure: parallel")
        return self

    @property
    def kernels(self) -> tuple[str, ...]:
        """The modules of kernels that the model imports."""
        return ("shardkeep.workers.models.layers.interaction_kernels",) if self.name == "dlrm" else ()


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
    schedule: ScheduleConfig = ScheduleConfig()
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


def _on_off(value: Any) -> Any:
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


OnOff = BeforeValidator(_on_off)  # YAML 1.1 reads a bare on/off as a bool


class TowerConfig(Settings):
    """How the dense model trains."""

    optimizer: TowerOptimizerConfig = TowerOptimizerConfig()
    """Optimizer of the dense parameters."""
    compile: Annotated[Literal["auto", "on", "off"], OnOff] = "auto"
    """torch.compile: on, off, or auto = on for training on a GPU, except in sync."""
    mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """Mode of torch.compile."""
    amp: Annotated[Literal["auto", "off", "bf16", "fp16"], OnOff] = "auto"
    """Automatic mixed precision; auto = bf16 where the hardware has it, else off; fp16 uses a GradScaler."""
    linear: Literal["auto", "torch", "onednn"] = "auto"
    """Library of fp32 matrix products in linear layers on a CPU: torch (MKL) or onednn; auto = oneDNN on AMD CPUs with
    AVX-512, which MKL does not use."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the dense model; auto = CUDA if a host has a device for each of its workers."""


class LossConfig(Named):
    """What training minimizes: the mean over the samples of a step."""

    name: Literal["bce", "mse", "huber"] = "bce"
    """bce = binary cross-entropy of labels 0 and 1; mse = squared error and huber, of labels that are numbers."""
    delta: float | None = Field(None, gt=0.0, le=1e30)
    """huber: errors above it count linearly; default 1."""

    @property
    def of_numbers(self) -> bool:
        """Whether the model's output is the value itself, not a logit."""
        return self.name != "bce"

    @model_validator(mode="after")
    def _delta_is_of_huber(self) -> LossConfig:
        if self.delta is not None and self.name != "huber":
            raise ValueError(f"delta: has no effect with name: {self.name}; allowed with huber")
        return self


class TrainConfig(Settings):
    """The training loop."""

    loss: LossConfig = LossConfig()
    """What training minimizes."""
    batch_size: int = Field(512, ge=1, le=_MOST_SAMPLES)
    """Samples per worker and micro-batch."""
    epochs: int = Field(1, ge=1, le=1_000_000)
    """Passes over the training data."""
    max_steps: int | None = Field(None, ge=1, le=MOST_STEPS)
    """Most steps of the job; left out = the epochs decide."""
    accumulate: int = Field(1, ge=1, le=1_000_000)
    """Micro-batches per step; one push and one dense update per step."""
    clip_norm: float | None = Field(None, gt=0.0, le=1e30)
    """Largest norm of the dense gradient, over all parameters; left out = no clipping."""
    shuffle: bool = True
    """Visit the samples in a seeded random order, a new one per epoch."""
    report_every_s: float = Field(2.0, gt=0.0, le=DAY_S)
    """Seconds between two lines of metrics.jsonl."""
    early_stopping: EarlyStoppingConfig | None = None
    """When to end before the last epoch; left out = never. The checkpoint of the best model is kept."""
    plateau: PlateauConfig | None = None
    """When to lower the learning rates; left out = never. Multiplies those of `schedule`."""
    max_bad_steps: int = Field(20, ge=1, le=MOST_STEPS)
    """Consecutive steps with non-finite gradients after which the job fails."""


CLASS_METRICS = ("auc", "gauc", "logloss", "normalized_entropy", "calibration", "calibration_buckets", "accuracy",
              "precision", "recall")  # fmt: skip
NUMBER_METRICS = ("mse", "rmse", "mae")
"""Metrics that need labels of 0 and 1, and those that take any labels."""
DEFAULT_METRICS = ("auc", "logloss", "normalized_entropy", "calibration")


class EvalConfig(Settings):
    """Evaluation on the evaluation data."""

    every_steps: int = Field(0, ge=0, le=MOST_STEPS)
    """Steps between two evaluations; 0 = after each epoch. The end of training always evaluates."""
    batch_size: int | None = Field(None, ge=1, le=_MOST_SAMPLES)
    """Samples per worker and batch; left out = 4 times train.batch_size."""
    max_samples: int | None = Field(None, ge=1, le=MOST_STEPS)
    """Number of samples to evaluate, from the first; left out = all."""
    metrics: Annotated[list[str], Field(min_length=1, max_length=20)] | None = None
    """auc, gauc, logloss, normalized_entropy, calibration, calibration_buckets, accuracy, precision, recall, mse, rmse,
    mae (docs/reference/metrics.md); left out = auc, logloss, normalized_entropy and calibration; of
    labels that are numbers mse, rmse and mae."""
    threshold: float = Field(0.5, ge=0.0, le=1.0)
    """Probability from which a sample counts as predicted positive, for accuracy, precision and recall."""
    group_by: ColumnName | None = None
    """gauc: the column of data.sparse whose values group the samples, such as the user."""

    @field_validator("metrics")
    @classmethod
    def _known_metrics(cls, value: list[str] | None) -> list[str] | None:
        known = (*CLASS_METRICS, *NUMBER_METRICS)
        for name in value or ():
            if name not in known:
                raise ValueError(f"{name[:60]!r} is unknown; allowed: {', '.join(known)}")
        return value if value is None else list(dict.fromkeys(value))

    @model_validator(mode="after")
    def _groups_are_of_gauc(self) -> EvalConfig:
        asked = "gauc" in (self.metrics or ())
        if asked and self.group_by is None:
            raise ValueError("group_by: is missing; gauc needs the column that groups the samples")
        if self.group_by is not None and not asked:
            raise ValueError("group_by: has no effect without gauc in metrics")
        return self

    def asked(self, loss: LossConfig) -> tuple[str, ...]:
        """The metrics of a job with this loss."""
        return tuple(self.metrics or (NUMBER_METRICS if loss.of_numbers else DEFAULT_METRICS))


class CheckpointConfig(Settings):
    """Checkpoints of the whole job, from which `shardkeep train --resume` continues."""

    every_steps: Annotated[int, Field(ge=0, le=MOST_STEPS)] | Literal["auto"] = "auto"
    """Steps between two checkpoints; the end of training writes one too; 0 = none. auto = about every ten minutes, and
    before a server's journal reaches 4 GB."""
    keep: int = Field(3, ge=1, le=1_000_000)
    """Checkpoints that are kept, with their bases; older ones are deleted."""
    full_every: int = Field(1, ge=1, le=100)
    """One in N checkpoints holds all rows, the others the rows that changed since the one before; 1 = all hold all
    rows."""
    dir: FilePath | None = None
    """Folder of the checkpoints, shared by all members, relative to the config file; left out = `checkpoints` in the
    run folder."""


class ProfileConfig(Settings):
    """A torch.profiler trace of some steps, in `profile/` of the run folder: one file per worker and server."""

    start: int = Field(0, ge=0, le=MOST_STEPS)
    """First step of the trace, counted from 0."""
    steps: int = Field(0, ge=0, le=1000)
    """Steps in the trace; 0 = no trace."""

    @model_validator(mode="after")
    def _a_start_needs_steps(self) -> ProfileConfig:
        if self.start and not self.steps:
            raise ValueError(f"start: {self.start} has no effect with steps: 0; allowed: steps of 1 to 1000")
        return self

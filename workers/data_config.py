"""Settings of data: where samples come from and what their columns mean."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.base.plugging.plugs import Plug, by_name
from shardkeep.base.settings import MOST_STEPS, DataPath, FilePath, MayDiffer, Settings, bare, own_code
from shardkeep.workers.file_kinds import SUFFIXES, data_suffix, kind_of
from shardkeep.workers.label_config import (
    ColumnName as ColumnName,
    LabelColumn as LabelColumn,
    Missing as Missing,
    TaskColumn as TaskColumn,
    Text,
    Threshold as Threshold,
    check_labels,
)
from shardkeep.workers.split_config import TIME, SplitConfig, SplitRecord

Scaling = Literal["none", "standard", "log", "log_standard"]
_SOURCES = "shardkeep.workers.data.sources"
_CACHE_KERNELS = ("shardkeep.workers.data.columns.column_kernels",)
FORMS = tuple(dict.fromkeys(SUFFIXES.values()))
"""Kinds of files whose columns have names: each is a source."""
_FILES = f"{_SOURCES}.forms:open_files"
SOURCES: dict[str, Plug[bool, Any]] = by_name(
    *(Plug(name, True, _FILES, _CACHE_KERNELS + (f"{_SOURCES}.csv_kernels",) * (name == "csv")) for name in FORMS),
    Plug("criteo", True, f"{_SOURCES}.criteo:open_criteo", _CACHE_KERNELS),
    Plug(
        "synthetic", False, f"{_SOURCES}.synthetic.source:open_synthetic", (f"{_SOURCES}.synthetic.synthetic_kernels",)
    ),
)
"""The `config` of a source: whether it reads files. A job loads its own source alone: pyarrow takes 0.25 s a role."""
OWN_SOURCE: Plug[bool, Any] = Plug("module:function", False, f"{_SOURCES}.custom:open_custom", _CACHE_KERNELS)
FILE_SOURCES = tuple(name for name, source in SOURCES.items() if source.config)
DIALECT = ("columns", "delimiter", "quote", "escape", "decimal")
"""Keys that say what a csv looks like."""
_MOST_COLUMNS = 100_000
_TIME_FORMAT = re.compile(
    r"(?=.*%d|(?!.*%[HI]))(?=.*%[mbB])(?=.*%[yY])(?=.*%I.*%p|(?!.*%[Ip]))(?!.*%(?!S%z).%|.*(%.).*\1|%Y-%d)([^%]|%[aAbBdmyYHIMSpz])+"
)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _delimiter(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if not value or any(c in value for c in '"\r\n'):
        raise ValueError("allowed: one or more characters, none of them a quote or the end of a line")
    if len(value) == 1 and not value.isascii():
        raise ValueError("allowed: a character of ASCII, or several characters")
    return "\t" if value in ("\\t", "tab") else value


def _mark(value: Any) -> Any:
    if value is False or value in ("none", "off"):
        return None
    if isinstance(value, str) and not (len(value) == 1 and value.isascii() and (value.isprintable() or value == "\t")):
        raise ValueError("allowed: one character of ASCII, or none")
    return value


def _time_format(value: str) -> str:
    if not _TIME_FORMAT.fullmatch(value):
        allowed = "%d, %m or %b, %Y or %y, and %H or %I with %p, %M, %S, %z, with marks between them"
        raise ValueError(f"allowed: {allowed}, as in %m/%d/%Y %H:%M")
    return value


Delimiter = Annotated[str, BeforeValidator(_delimiter)]
"""Between the columns of a CSV."""
Mark = Annotated[str | None, BeforeValidator(_mark)]
"""A character that means something in a CSV; None = none does."""
Paths = Annotated[list[DataPath], BeforeValidator(_listed, json_schema_input_type=str | list[str])]
"""One name needs no list."""


class DenseColumn(Settings):
    """One number per sample, or a vector of numbers."""

    column: ColumnName
    """Name of the column, or a pattern with *."""
    width: int | None = Field(None, ge=1, le=_MOST_COLUMNS)
    """Numbers in each list of a column of vectors, each a dense input of its own; left out = one number."""
    scale: Scaling | None = None
    """none, standard = (x - mean) / std over the training data, log = sign(x) * log(1 + |x|),
    log_standard = both; left out = `data.scale`."""
    fill: float | Literal["mean"] = "mean"
    """Value of a missing entry, before scaling; mean = the mean of the training data."""

    def numbers(self) -> list[DenseColumn]:
        """A column of one number for each dense input: itself, or column[0], column[1] and so on of a vector."""
        if self.width is None:
            return [self]
        return [self.model_copy(update={"column": f"{self.column}[{i}]", "width": None}) for i in range(self.width)]


class SparseColumn(Settings):
    """One feature: the ids of a sample, looked up in a table."""

    column: ColumnName
    """Name of the column, also the feature's name; or a pattern with *."""
    table: ColumnName | None = None
    """Table with its rows; features that name one table share it; left out = a table of its own."""
    pooling: Literal["sum", "mean", "max", "weighted"] = "sum"
    """How the rows of several ids become one: sum, mean, max of each dimension, or sum weighted by `weights`."""
    separator: Annotated[str, Field(min_length=1)] | None = None
    """Text between the ids of a multi-valued field; left out = a single value (or a list column)."""
    weights: ColumnName | None = None
    """Column with a weight per id; for pooling: weighted."""
    pad: Text | None = None
    """Id that fills lists up to one length: lists are read without it, and in other columns of the table it is a
    missing value; left out = there is none."""

    @model_validator(mode="after")
    def _weights_go_with_weighted(self) -> SparseColumn:
        if self.pooling == "max" and self.weights is not None:
            raise ValueError(
                f"pooling: max takes no weights, and weights: {self.weights} is set; leave one of them out"
            )
        if (self.pooling == "weighted") != (self.weights is not None):
            raise ValueError("pooling: weighted and weights: COLUMN go together; one is missing")
        return self


class SequenceNumber(Settings):
    """A list column of numbers beside the ids of a sequence."""

    column: ColumnName
    """Name of the column."""
    scale: Scaling | None = None
    """As of a dense column, over all entries of the training data; left out = `data.scale`."""
    fill: float | Literal["mean"] = "mean"
    """Value of a missing entry, before scaling; mean = the mean of the training data."""


class SequenceConfig(Settings):
    """A history: list columns that have one length in each row, an entry at each place."""

    ids: dict[ColumnName, ColumnName]
    """List columns of ids, and the table that each looks its ids up in: that of a feature, or one of `tables`."""
    numbers: list[Annotated[SequenceNumber, bare("column")]] = Field(default_factory=list)
    """List columns of numbers beside them."""
    max_length: int = Field(ge=1, le=65_536)
    """Entries that are kept of each list, the newest ones."""
    newest: Literal["last", "first"] = "last"
    """Where the newest entry of a list is."""
    separator: Annotated[str, Field(min_length=1)] | None = None
    """Text between the entries of a field; left out = the columns hold lists."""
    pad: Text | None = None
    """Id that fills the lists of the first column of `ids` up to one length: its places are dropped, and in other
    columns of the table it is a missing value; left out = there is none."""

    @field_validator("ids")
    @classmethod
    def _has_ids(cls, value: dict[str, str]) -> dict[str, str]:
        if not value:
            raise ValueError("allowed: a list column of ids with its table, as in {seen_item: item}, or several")
        return value

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all its columns."""
        return (*self.ids, *(number.column for number in self.numbers))


class SyntheticConfig(Settings):
    """The synthetic stream: Zipf ids, and labels drawn from a planted model."""

    model_config = ConfigDict(
        json_schema_extra={
            "left": {"task": "clicks needs none; others are data.source: shardkeep.examples.synthetic.NAME:samples"}
        }
    )

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


MARKS, ALL = ("", "?", "NA", "nan", "NaN", "null"), "*"
"""Values that mean a missing one by default, and what represents all columns in `missing`."""


def marks_of(missing: Missing, name: str) -> tuple[str, ...]:
    """The values that mean a missing one in a column."""
    if isinstance(missing, list):
        return tuple(missing)
    return tuple(dict.fromkeys((*missing.get(ALL, MARKS), *(missing.get(name, ()) if name != ALL else ()))))


def _names(value: Any) -> list[str]:
    return [name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str)]


def _kind_there(root: Any, key: str, name: str) -> str:
    """The source of files whose name does not say it: by what is there; "" = not clear. Raises ValueError."""
    from shardkeep.workers.data.input_files import NotThere, find_files  # here: pyarrow

    try:
        kinds = {kind_of(path) for path in find_files(Path(str(root)), [name], key=key, kind="")}
    except NotThere:
        return ""
    except DataError as error:
        raise ValueError(f"source: is missing, and {str(error).replace(name, name[:60])}") from error
    return kinds.pop() if len(kinds) == 1 else ""


class DataConfig(Settings):
    """Where samples come from and what their columns mean."""

    model_config = ConfigDict(
        json_schema_extra={"left": {"eval_fraction": "use split: {by: random, eval: VALUE, test: 0}"}}
    )

    source: Annotated[str, MayDiffer.STARTS] = ""
    """csv, parquet, jsonl, arrow, orc, criteo, synthetic, or your own module:function; left out = by the suffix of the
    files, or by what a folder holds, or synthetic if that has settings. Suffixes: .csv and .tsv, .jsonl, .ndjson and
    .json, all also compressed, .parquet, .pq and .parq, .arrow, .feather and .ipc, .orc."""
    root: Annotated[FilePath, MayDiffer.STARTS] = "."
    """Folder to which the paths below are relative; . = the config's folder."""
    train: Annotated[Paths, MayDiffer.STARTS] = Field(default_factory=list)
    """Training files, folders or glob patterns."""
    eval: Annotated[Paths, MayDiffer.STARTS] = Field(default_factory=list)
    """Evaluation files, folders or glob patterns."""
    test: Annotated[Paths, MayDiffer.STARTS] = Field(default_factory=list)
    """Test files, folders or glob patterns: scored once, after training, by the best model or the last."""
    split: Annotated[SplitConfig, bare("by")] | None = None
    """Rows of the training files held out for evaluation and test, by time, by a column's values or by chance. A side
    with files of its own, `eval` or `test`, gets a share of 0."""
    columns: Annotated[list[str] | None, MayDiffer.STARTS] = None
    """Names of all columns of a csv without a header; left out = the first line is the header."""
    delimiter: Annotated[Delimiter, MayDiffer.STARTS] = ","
    """Between the fields of a csv; tab = "\\t"; with more than one character, quotes mean nothing."""
    quote: Annotated[Mark, MayDiffer.STARTS] = '"'
    """Around a csv's fields that hold delimiters or line ends, doubled inside them; none = quotes are part of the
    texts, and each line is a row."""
    escape: Annotated[Mark, MayDiffer.STARTS] = None
    """Before a csv's character that is part of a field, such as a quote inside quotes; none = there is none."""
    decimal: Annotated[Literal[".", ","], MayDiffer.STARTS] = "."
    """Decimal point of a csv's numbers."""
    missing: Missing = Field(default_factory=lambda: [*MARKS])
    """Values that mean a missing value: texts, after stripping spaces, and numbers, `inf` and `-inf` too. Or lists by
    column, as in `{rating: [-1]}`: `"*"` = those of all columns, left out = the default."""
    absent: Annotated[Literal["error", "missing"], MayDiffer.STARTS] = "error"
    """A column that some files lack: error, or missing = its values there are missing ones."""
    time_format: Annotated[list[Annotated[str, AfterValidator(_time_format)]], BeforeValidator(_listed)] = Field(
        default_factory=list
    )
    """How texts of times are written, beside the forms that are always read: patterns of strptime, as in
    `%m/%d/%Y %H:%M` or `%b-%Y`. All times of a column have one form."""
    label: Annotated[LabelColumn, bare("column")] | None = None
    """The column to predict; criteo and synthetic have their own."""
    labels: list[Annotated[TaskColumn, bare("column")]] = Field(default_factory=list)
    """Several columns to predict, in place of `label`; files and module:function."""
    weight: ColumnName | None = None
    """Column of numbers from 0 on: each multiplies the loss of its sample in training, and its sample's part in all
    metrics; of files with names of columns."""
    time: ColumnName | None = None
    """Column of numbers, dates or times by which the training samples are sorted, for `train.order: time` and
    `split: {by: time}`; files and module:function."""
    dense: list[Annotated[DenseColumn, bare("column")]] = Field(default_factory=list)
    """Columns of numbers; criteo and synthetic have their own."""
    sparse: list[Annotated[SparseColumn, bare("column")]] = Field(default_factory=list)
    """Columns of categories; criteo and synthetic have their own."""
    sequences: dict[ColumnName, SequenceConfig] = Field(default_factory=dict)
    """Histories, each a group of list columns, by a name of its own; files and module:function."""
    scale: Scaling | None = None
    """Scaling of dense columns that name none; left out = standard (criteo: log)."""
    cache: Annotated[DataPath | None, MayDiffer.STARTS] = None
    """Folder for stored columns of files, used as it is, relative to `data.root`; left out = `.shardkeep-cache` beside
    the data, with access for you alone, or your cache folder if that cannot be made."""
    synthetic: SyntheticConfig = SyntheticConfig()
    """The synthetic stream."""
    shuffle: Literal["auto", "rows", "blocks"] = "auto"
    """How `train.order: shuffled` mixes rows: rows = all with each other; blocks = blocks of 4,096 consecutive rows
    come in a random order, and up to 64 are mixed, for data larger than memory; auto = blocks if a new job of
    `shardkeep train` has more stored samples than half of its memory, else rows."""
    refit: Annotated[bool, MayDiffer.STARTS] = False
    """Fit scaling and kinds of columns again in a job that continues by `--from` or `--resume`; false = keep those of
    its model."""
    fitted: dict[str, Any] | None = None
    """What the columns of the model with which the job continues were read by; `--from` and `--resume` set it."""
    accept: Annotated[str | None, MayDiffer.STARTS] = None
    """Fingerprint of other training data with which `--resume` may continue; the error that refuses them names it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of your module:function."""

    @model_validator(mode="before")
    @classmethod
    def _source_by_suffix(cls, value: Any) -> Any:
        if not isinstance(value, dict) or value.get("source"):
            return value
        roles = [(f"data.{key}", name) for key in ("train", "eval", "test") for name in _names(value.get(key))]
        if not (names := [name for _, name in roles]):  # the resolved config of a job without data says source: ""
            return {**value, "source": "synthetic" if "synthetic" in value and "source" not in value else ""}
        if value.get("synthetic"):  # also with the values of the default
            raise ValueError(f"synthetic: has no effect beside files such as {names[0][:60]}; leave one of the two out")
        suffixes = {data_suffix(name) for name in names}
        sources = {SUFFIXES.get(data_suffix(role[1])) or _kind_there(value.get("root", "."), *role) for role in roles}
        tabs = {"delimiter": "tab"} if suffixes == {".tsv"} and "delimiter" not in value else {}
        return {**value, "source": sources.pop() if len(sources) == 1 else "", **tabs}

    @model_validator(mode="after")
    def _files_have_a_source(self) -> DataConfig:
        if self.source or not (names := [*self.train, *self.eval, *self.test]):
            return self
        by_suffix = {data_suffix(name): name[:60] for name in names}
        why = (
            f"{by_suffix['']!r} has no suffix that says it"
            if "" in by_suffix
            else (f"the suffixes of {' and '.join(by_suffix.values())} say different ones")
        )
        raise ValueError(f"source: is missing, and {why}; allowed: {', '.join(FILE_SOURCES)} or module:function")

    @model_validator(mode="after")
    def _labels_fit(self) -> DataConfig:
        if self.label is not None and self.labels:
            raise ValueError("label: is there beside labels; leave one of them out")
        check_labels(self.labels)
        return self

    @model_validator(mode="after")
    def _rows_are_held_out_once(self) -> DataConfig:
        if self.split is None:
            return self
        for key in ("eval", "test"):
            if getattr(self, key) and (share := getattr(self.split, key)):
                raise ValueError(f"split.{key}: {share:g} is there beside {key}; allowed: 0, split: null, or no {key}")
        if self.split.by == TIME and self.time is None:
            raise ValueError("split.by: time needs data.time, the column with the time of a row")
        return self

    def held_out(self, seed: int) -> SplitRecord | None:
        """How rows of the training files are held out; None = none are. `seed`: the job's."""
        if self.split is None:
            return None
        return SplitRecord(**{"seed": 0 if self.split.by == TIME else seed} | self.split.model_dump())

    @property
    def targets(self) -> tuple[LabelColumn | TaskColumn, ...]:
        """The label, or all of several; () = the source has its own."""
        return tuple(self.labels) if self.label is None else (self.label,)

    @field_validator("source")
    @classmethod
    def _known_source(cls, value: str) -> str:
        return value and own_code(value, tuple(SOURCES), "module:function")


def refuse(config: DataConfig, keys: Iterable[str], allowed: str = "") -> None:
    """Raises ConfigError for settings that differ from their default and that this source could only ignore."""
    plain = DataConfig()
    for key in keys:
        if getattr(config, key) != getattr(plain, key):
            raise ConfigError(f"data.{key}: has no effect with source: {config.source}{allowed}")

"""What settings of one room say of those of another: checks, and settings that follow from others. Needs no torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardkeep.compression.config import CompressionConfig
from shardkeep.compression.per_table import TablePush, check_table, push_of
from shardkeep.config.overrides import merged
from shardkeep.ps.config import TableSpec
from shardkeep.ps.server.table.optimizers.rowwise_adagrad import RowwiseAdagradConfig
from shardkeep.workers.config import (
    CLASS_METRICS,
    METRICS,
    NUMBER_METRICS,
    RANK_FORMS,
    EvalConfig,
    TrainConfig,
    asked_of,
    is_of_ranks,
    sign_of,
)
from shardkeep.workers.data_config import FILE_SOURCES, TaskColumn
from shardkeep.workers.label_config import LossConfig
from shardkeep.workers.model_config import RETRIEVAL
from shardkeep.workers.split_config import TIME

if TYPE_CHECKING:
    from shardkeep.config.job import JobConfig


def check_compression(tables: Iterable[TableSpec], compression: CompressionConfig) -> None:
    """Raises ValueError where a table does not go with what the job compresses, or where an update decays all rows of
    a table, but workers send only some of their gradients."""
    push = compression.push
    for table in tables:
        if table.compression is not None:
            check_table(table.name, table.compression, push)
        keep = push_of(table.compression, push).keep
        if (keep < 1.0 or push.select != "rows") and table.optimizer.decays_all_rows:
            key = f"compression.push.{f'keep: {keep:g}' if push.select == 'rows' else f'select: {push.select}'}"
            if table.compression is not None:
                key = f"tables.{table.name}.compression: {table.compression}"
            raise ValueError(
                f"tables.{table.name}.optimizer.weight_decay_on: table with {key}, which sends gradients later; "
                "allowed: touched, or no selection"
            )


def evaluated_of(labels: Sequence[TaskColumn], evaluation: EvalConfig) -> list[str]:
    """Keys of the metrics of several labels."""
    own = {each.column: asked_of(evaluation.metrics or (), numbers=each.objective.of_numbers) for each in labels}
    return [f"{metric}/{name}" for name, metrics in own.items() for metric in metrics]


def check_labels(labels: Sequence[TaskColumn], train: TrainConfig, evaluation: EvalConfig) -> None:
    """Raises ValueError where a loss, a metric or a watched metric does not go with several labels."""
    if train.loss != LossConfig():
        raise ValueError(f"train.loss: {train.loss.name} with data.labels, whose labels have losses of their own")
    of_numbers = [label.objective.of_numbers for label in labels]
    wrong = [name for name in evaluation.metrics or () if name in CLASS_METRICS]
    if all(of_numbers) and wrong:
        raise ValueError(f"eval.metrics: {wrong[0]} needs labels of 0 and 1; allowed: {', '.join(NUMBER_METRICS)}")
    asked = evaluated_of(labels, evaluation)
    for key, watched in (("early_stopping", train.early_stopping), ("plateau", train.plateau)):
        if watched is not None and watched.metric not in asked:
            same = [each for each in asked if each.partition("/")[0] == watched.metric.partition("/")[0]]
            allowed = ", ".join(same or [each for each in asked if sign_of(each) is not None])
            raise ValueError(f"train.{key}.metric: {watched.metric} is not evaluated; allowed: {allowed}")


def _has_evaluation(job: JobConfig) -> bool:
    """Whether there may be evaluation data: files say so, other sources have their own."""
    data, held = job.data, job.data.held_out(job.seed)
    return data.source not in FILE_SOURCES or bool(data.eval or (held is not None and held.eval))


def _has_hidden_layers(job: JobConfig) -> bool:
    model = job.model
    return getattr(model, "hidden", None) != [] or model.name == "dlrm" or bool(getattr(model, "second_hidden", None))


def _pushes(job: JobConfig) -> list[TablePush]:
    tables = (job.table(name) for name in (*job.tables, "default"))
    return [push_of(table.compression, job.compression.push, frozen=table.freeze) for table in tables]


def _some_table_is_as_the_job(job: JobConfig) -> bool:
    return any(job.table(name).compression is None for name in (*job.tables, "default"))


_EVALUATION = "data.eval or data.split"
_UNUSED: tuple[tuple[str, Callable[[JobConfig], bool], str, str], ...] = (
    ("data.test", lambda job: job.data.source in FILE_SOURCES, "source: {0.data.source}", ", ".join(FILE_SOURCES)),
    (
        "data.time",
        lambda job: job.train.order != "shuffled" or (job.data.split is not None and job.data.split.by == TIME),
        "train.order: shuffled",
        "train.order: time or stored, data.split.by: time, or no time",
    ),
    ("data.shuffle", lambda job: job.train.order == "shuffled", "train.order: {0.train.order}", "order: shuffled"),
    ("eval.exclude_seen", lambda job: job.items is not None, "model.name: {0.model.name}", ", ".join(RETRIEVAL)),
    (
        "eval.threshold",
        lambda job: any(name.partition("/")[0] in ("accuracy", "precision", "recall") for name in job.evaluated),
        "eval.metrics that need none",
        "accuracy, precision or recall among them",
    ),
    (
        "eval.test",
        lambda job: job.data.source == "" or bool(job.data.test or (job.data.split and job.data.split.test)),
        "no test data",
        "true",
    ),
    ("eval.max_samples", _has_evaluation, "no evaluation data", _EVALUATION),
    (
        "eval.every_steps",
        lambda job: _has_evaluation(job) or job.train.order == "time",
        "no evaluation data",
        f"{_EVALUATION}, or train.order: time",
    ),
    (
        "train.plateau",
        lambda job: job.train.epochs > 1 or job.eval.every_steps != "epoch",
        "one evaluation, at the end",
        "train.epochs above 1, or eval.every_steps",
    ),
    (
        "tower.mode",
        lambda job: job.tower.compile == "on",
        "tower.compile: {0.tower.compile}, which may compile nothing",
        "compile: on, or no mode",
    ),
    *(
        (f"checkpoint.{key}", lambda job: job.checkpoint.on, "every_steps: off", "every_steps: auto, or 1 or more")
        for key in ("keep", "full_every", "dir")
    ),
    *(
        (f"model.{key}", _has_hidden_layers, "hidden: []", "one or more hidden layers")
        for key in ("dropout", "activation", "norm", "activation_checkpointing")
    ),
    (
        "compression.push.pool_rows",
        lambda job: (
            job.compression.push.select != "rows"
            or any(push.keep < 1.0 or push.values != "fp32" for push in _pushes(job))
        ),
        "all gradients sent as fp32",
        "keep below 1, another selector, or other values",
    ),
    *(
        (
            f"compression.{way}.{key}",
            _some_table_is_as_the_job,
            "tables.default.compression, of all",
            "one of the two",
        )
        for way, key in (("push", "keep"), ("push", "values"), ("pull", "values"))
    ),
    ("recovery.max_journal_bytes", lambda job: job.recovery.journal != "off", "journal: off", "journal: os or fsync"),
    ("telemetry.max_bytes", lambda job: job.telemetry.every_s != "off", "every_s: off", "every_s above 0"),
)
"""Settings that some jobs do not use: whether a job does, what it has instead, and what is allowed."""


def unused(job: JobConfig) -> dict[str, str]:
    """Settings that have another value than their default and no effect in this job: why, and what is allowed."""
    found = {}
    for path, used, instead, allowed in _UNUSED:
        *groups, key = path.split(".")
        group = functools.reduce(getattr, groups, job)
        field = type(group).model_fields.get(key)
        default = field and field.get_default(call_default_factory=True)
        if field and getattr(group, key) != default and not used(job):
            found[path] = f"has no effect with {instead.format(job)}; allowed: {allowed}"
    return found


def check_ranks(model: str, asked: Sequence[str]) -> None:
    """Raises ValueError where the metrics of retrieval models and those of labels are mixed up."""
    ranks = model in RETRIEVAL
    if wrong := [name for name in asked if is_of_ranks(name) != ranks]:
        why = f"is of labels, and {model} finds items" if ranks else f"is of retrieval models ({', '.join(RETRIEVAL)})"
        allowed = RANK_FORMS if ranks else ", ".join(METRICS)
        raise ValueError(f"eval.metrics: {wrong[0]} {why}; allowed: {allowed}")


def with_number_label(raw: dict[str, Any]) -> dict[str, Any]:
    """A label without a kind is a number if the loss needs numbers."""
    train, data = raw.get("train"), raw.get("data")
    loss = train.get("loss") if isinstance(train, Mapping) else None
    name = loss.get("name") if isinstance(loss, Mapping) else loss
    label = data.get("label") if isinstance(data, Mapping) else None
    if name not in ("mse", "huber") or not label:
        return raw
    label = {"column": label} if isinstance(label, str) else label
    if not isinstance(label, Mapping) or "kind" in label:
        return raw
    return {**raw, "data": {**raw["data"], "label": {**label, "kind": "number"}}}


def with_kinds(tables: Mapping[Any, Any]) -> dict[Any, Any]:
    """An optimizer without a name changes some settings of the default table's, or of the built-in one."""
    built_in = {"name": RowwiseAdagradConfig().name}
    default = tables.get("default")
    below = _full_optimizer(default, built_in) or built_in
    return {
        name: {**table, "optimizer": optimizer}
        if (optimizer := _full_optimizer(table, built_in if name == "default" else below)) is not None
        else table
        for name, table in tables.items()
    }


def _full_optimizer(table: Any, below: Mapping[str, Any]) -> Any:
    """A table's optimizer with its kind; None where the table has none to complete."""
    optimizer = table.get("optimizer") if isinstance(table, Mapping) else None
    if isinstance(optimizer, str):
        return {"name": optimizer}
    if not isinstance(optimizer, Mapping):
        return None
    return optimizer if "name" in optimizer else merged(below, optimizer)

"""Every setting of a job has an effect, is refused, or has a reason here why a short job does not show it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from shardkeep.config import JobConfig
from shardkeep.ps.server.table.optimizers.registry import OPTIMIZERS
from shardkeep.workers.encoder_config import ENCODERS
from shardkeep.workers.model_config import MODELS, RETRIEVAL
from tests.support.cases import every
from tests.support.click_files import COLUMNS, click_rows, write_csv
from tests.support.settings_walk import Place, changed, models_of, outcome, settings_of, values_of

SPARE = ("hour", "watched", "bought", "w", "seen", "ages")
DATA = {
    "train": "t.csv", "split": {"by": "random", "eval": 0.2, "test": 0.0}, "label": "clicked",
    "dense": ["price", "age"],
    "sparse": ["user", "item", {"column": "tags", "separator": "|", "pooling": "mean"}],
}  # fmt: skip
LISTS = {"train": "t.parquet", "dense": ["price"], "sparse": ["user", "item"]}
SEEN = {"ids": {"seen": "item"}, "numbers": ["ages"], "max_length": 3}
DECAY = {"warmup_steps": 2, "decay": "linear", "decay_steps": 9, "final_factor": 0.1}
ROWS = {"default": {"dim": 4}}
MLP: dict[str, Any] = {"hidden": [6]}
JOB = {"servers": 0, "workers": 1, "seed": 3, "tables": ROWS, "tower": {"amp": "off"}, "train": {"batch_size": 32},
       "checkpoint": {"every_steps": 2}}  # fmt: skip
JOBS: dict[str, dict[str, Any]] = {
    "clicks": {"data": DATA, "model": {"name": "dlrm", "bottom": [7], **MLP}},
    "lists": {
        "data": DATA | LISTS | {"dense": ["price", {"column": "v", "width": 2}], "sequences": {"seen": SEEN}},
        "model": {"name": "din", **MLP},
    },
    "numbers": {
        "data": DATA | {"label": "watched"}, "model": {"name": "deepfm", **MLP},
        "train": {"batch_size": 32, "loss": {"name": "huber", "delta": 2.0}},
    },
    "labels": {
        "data": {k: v for k, v in DATA.items() if k != "label"}
        | {"labels": ["clicked", {"column": "bought", "after": "clicked"}, {"column": "watched", "loss": "huber"}]},
        "model": {"name": "mmoe", "hidden": [9], "task_hidden": [4], "experts": 2},
    },
    "items": {
        "data": DATA | LISTS | {"sequences": {"seen": SEEN}},
        "model": {"name": "two_tower", "item": ["item"], "dim": 6, **MLP},
        "train": {"batch_size": 32, "loss": {"negatives": {"batch": 5, "uniform": 7}}},
    },
    "next": {"data": DATA | LISTS | {"dense": [], "sparse": ["item"], "sequences": {"seen": SEEN}}, "model": "sasrec"},
    "synthetic": {
        "data": {"synthetic": {"train_samples": 200, "eval_samples": 50, "table_sizes": [100, 50], "num_dense": 3}},
        "model": {"name": "dlrm", "bottom": [7], **MLP},
    },
    "much": {
        "data": DATA
        | {"weight": "w", "split": {"by": "random", "eval": 0.3, "test": 0.0},
           "label": {"column": "hour", "positive": {"above": 9, "below": 20}}},
        "model": {"name": "dnn", **MLP},
        "tables": {"default": {"dim": 4, "optimizer": {"name": "adam", "schedule": DECAY}, "admit": {"min_count": 2},
                   "init": {"name": "normal"}, "evict": {"ttl_steps": 1, "sweep_steps": 1}},
                   "user": {"compression": "fp16"}},
        "tower": {"amp": "off", "optimizer": {"schedule": DECAY}},
        "train": {"batch_size": 32, "epochs": 2, "clip_norm": 0.01, "plateau": {"metric": "logloss", "min_delta": 0.01},
                  "early_stopping": {"metric": "logloss", "min_delta": 0.01}},
        "eval": {"every_steps": 3, "metrics": ["auc", "gauc", "accuracy", "logloss"], "group_by": "user"},
        "consistency": {"mode": "bounded", "staleness": 1},
        "compression": {"ids": "coded", "push": {"keep": 0.3, "pool_rows": 40, "values": "int8",
                        "second_moment": True}, "pull": {"values": "int8", "cache_rows": 50, "lease": 3, "drift": 0.1}},
        "checkpoint": {"every_steps": 3, "keep": 1},
    },
    "values": {
        "data": DATA, "model": {"name": "dnn", **MLP}, "tables": {"default": {"dim": 4, "optimizer": "sgd"}},
        "compression": {"push": {"select": "top_k", "keep": 0.3, "pool_rows": 99},
                        "tower": {"name": "topk", "keep": 0.1, "values": "int8", "warmup_steps": 2}},
    },
}  # fmt: skip
"""Jobs over a file of 160 rows, in each of which every setting takes other values."""
KINDS: list[tuple[str, Place, list[Any]]] = [
    ("clicks", ("tables", "default", "optimizer"), [{"name": name, "schedule": DECAY} for name in OPTIMIZERS]),
    ("clicks", ("tower", "optimizer"), [{"name": "sgd", "momentum": 0.9}, {"name": "adamw"}]),
    ("lists", ("model",), [{"name": "dnn", "encoder": name, **MLP} for name in ENCODERS]),
    ("lists", ("model",), [{"name": "bst", **MLP}]),
    ("next", ("model",), ["hstu"]),
    ("labels", ("model",), [{"name": "ple", "hidden": [6], "task_hidden": [4]}]),
    ("clicks", ("model",), [{"name": n, **MLP} for n in sorted({*MODELS} - {*RETRIEVAL, "lr", "fm", "din", "bst"})]),
]  # fmt: skip
"""Groups of several kinds: the job in which each kind takes its place, whose own settings are walked."""
VALUES: dict[str, list[Any]] = {
    "data.train": ["t.parquet"], "data.eval": ["e.csv"], "data.test": ["e.csv"], "data.delimiter": [";"],
    "data.time_format": ["%d.%m.%Y"],
    "data.quote": ["'"], "data.escape": ["1"], "data.decimal": [","], "data.sparse.*.separator": ["|"],
    "data.columns": [["a"]], "data.missing": [["u1"]],
    "data.label.column": ["bought"], "data.labels": [["clicked", "bought"]],
    "data.weight": ["w"], "data.time": ["hour"],
    "data.dense.*.column": ["hour"],
    "data.sparse.*.column": ["hour"], "data.sparse.*.table": ["user"], "data.sparse.*.weights": ["w"],
    "data.sequences": [{"seen": {**SEEN, "separator": " "}}], "data.sequences.*.ids": [{"seen": "user"}],
    "data.sequences.*.separator": [" "], "data.sequences.*.numbers": [[]], "data.labels.*.column": ["hour"],
    "data.sequences.*.numbers.*.column": ["seen"], "data.label": ["clicked"], "data.dense": [["age"]],
    "data.sparse": [["user"]], "data.labels.*.given": ["clicked"], "data.labels.*.after": ["clicked"],
    "*.pad": ["0"], "data.label.positive": [["1"]], "data.labels.*.positive": [["1"]], "data.split": ["user"],
    "data.split.by": ["user"],
    "data.synthetic.table_sizes": [[60, 40]], "data.options": [{"a": 1}], "data.source": ["parquet"],
    "model.hidden": [[5]], "model.bottom": [[5]], "model.task_hidden": [[5]], "model.second_hidden": [[5]],
    "model.gates.*": [[5], ["user"]], "model.cin": [[3]], "model.item": [["user"]], "model.encoder.hidden": [[5]],
    "model.encoder": ["transformer"], "*.betas": [[0.5, 0.6]],
    "eval.metrics": [["auc", "mse", "mrr"], ["auc"], ["mse"], ["mrr"]], "eval.group_by": ["user"],
    "tables.*.optimizer": ["adam"],
    "tables.*.evict": [{"ttl_steps": 2, "sweep_steps": 1}], "tables.*.admit": [{"min_count": 2}],
    "tables.*.init": ["zeros"],
    "tables.*.init.path": ["x.npy"], "train.loss.negatives": [{"batch": 3}],
    "tables.*.compression": ["safe"], "train.report_every_s": [1e-9],
    "compression.tower.name": ["fp16"], "compression.tower.options": [{"a": 1}],
    "compression.push.select": ["rows"], "tables": [{"user": {"dim": 5}}], "consistency.mode": ["bounded"],
}  # fmt: skip
"""Other values of texts and lists, and those that a small job shows."""
REASONS = {
    "name|data.root|data.cache|checkpoint.dir": "places and names",
    "servers|workers|launch.*|transport.*|liveness.*|recovery.*": "of several processes",
    "threads|tower.device|tower.linear|tower.pad_widths|tower.compile|*.activation_checkpointing": "speed and memory",
    "web.*|telemetry.*": "watch a job",
    "data.accept|data.fitted|data.refit": "of jobs that continue",
    "data.quote|data.label.missing|data.labels.*.missing|*.fill": "this file has no such value",
    "train.max_bad_steps": "of jobs that diverge",
    "train.early_stopping.metric|train.plateau.metric": "no evaluation of this job improves by any metric",
    "compression.tower.*": "of several workers",
    "model.encoder.target": "names the only feature that it may name",
}
"""Settings that a short job need not show."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("every-setting")
    for name, count in (("t", 160), ("e", 40)):
        rows, drawn = click_rows(count), np.random.default_rng(count)
        for row in rows:
            entries = int(drawn.integers(1, 6))
            row |= {"hour": str(drawn.integers(0, 24)), "watched": str(drawn.integers(0, 90) / 10)}
            row |= {
                "bought": str(int(row["clicked"] == "1" and drawn.random() < 0.4)),
                "w": str(drawn.integers(1, 9) / 4),
            }
            row |= {key: " ".join(map(str, drawn.integers(0, 50, entries))) for key in ("seen", "ages")}
        write_csv(folder / f"{name}.csv", rows, COLUMNS + SPARE)
        columns: dict[str, Any] = {
            key: [int(row[key]) for row in rows] for key in ("clicked", "item", "age", "hour", "bought")
        }
        columns |= {key: [float(row[key] or "nan") for row in rows] for key in ("price", "watched", "w")}
        columns |= {key: [[int(n) for n in row[key].split()] for row in rows] for key in ("seen", "ages")}
        columns |= {"user": [row["user"] for row in rows], "tags": [row["tags"].split("|") for row in rows]}
        columns["v"] = [[float(row["age"]), float(row["hour"])] for row in rows]
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    return folder


def raw_of(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    data = job["data"] if "synthetic" in job["data"] else job["data"] | {"root": str(folder)}
    return {**JOB, **job, "data": data}


def walked(folder: Path) -> Iterator[tuple[str, dict[str, Any], Place, type[Any], Any]]:
    """Each setting of each job: the job's name and raw settings, the setting's place, class and value."""
    for name, job in JOBS.items():
        raw = raw_of(job, folder)
        yield from ((name, raw, *each) for each in settings_of(JobConfig.model_validate(raw)))
    for name, place, kinds in KINDS:
        for kind in kinds:
            raw = changed(raw_of(JOBS[name], folder), place, kind)
            found = settings_of(JobConfig.model_validate(raw))
            yield from ((f"{name} with {kind}", raw, *each) for each in found if each[0][: len(place)] == place)


def key_of(place: Place) -> str:
    return ".".join(map(str, place))


def matching(key: str, table: dict[str, Any]) -> Any:
    return next((value for patterns, value in table.items() if any(fnmatch(key, p) for p in patterns.split("|"))), None)


def without_effect(
    raw: dict[str, Any], place: Place, kind: type[Any], value: Any, base: Any, folders: Iterator[Path]
) -> list[Any]:
    """The values that a setting accepts and that change nothing; [] = one does, or it accepts none."""
    tried, before = list[Any](), JobConfig.model_validate(raw).all_settings()
    values = matching(key_of(place), VALUES) or values_of(kind.model_fields[place[-1]].annotation)
    assert values, f"{key_of(place)}: has no value in VALUES"
    for other in values:
        job = changed(raw, place, other)
        after = outcome(job, next(folders))
        if isinstance(after, str) or JobConfig.model_validate(job).all_settings() == before:
            continue
        if after != base:
            return []
        tried.append(other)
    return tried


def check(settings: list[Any], folder: Path, tmp_path: Path) -> None:
    folders, bases, wrong = (tmp_path / str(n) for n in itertools.count()), dict[str, Any](), []
    for name, raw, place, kind, value in settings:
        if matching(key_of(place), REASONS) is not None:
            continue
        if name not in bases:
            bases[name] = outcome(raw, next(folders))
            assert not isinstance(bases[name], str), (name, bases[name])
        if unused := without_effect(raw, place, kind, value, bases[name], folders):
            wrong.append(f"{name}: {key_of(place)}: {value} as {unused}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_settings_that_a_job_accepts_change_something(folder: Path, tmp_path: Path) -> None:
    check(random.Random(60).sample(list(walked(folder)), 60), folder, tmp_path)


@pytest.mark.chaos
def test_every_setting_that_a_job_accepts_changes_something(folder: Path, tmp_path: Path) -> None:
    check(list(walked(folder)), folder, tmp_path)


@every(
    ("changes", "key"),
    [
        ({"compression": {"push": {"pool_rows": 9}}}, "compression.push.pool_rows"),
        (
            {
                "compression": {"pull": {"values": "int8"}},
                "tables": {"default": {"compression": "fp16"}},
            },
            "compression.pull.values",
        ),
        ({"recovery": {"journal": "off", "max_journal_bytes": 5_000_000}}, "recovery.max_journal_bytes"),
        ({"model": {"name": "deepfm", "hidden": [], "norm": "layer"}}, "model.norm"),
        ({"data": {"time": "hour"}}, "data.time"),
        ({"data": {"shuffle": "rows"}, "train": {"order": "time"}}, "data.shuffle"),
    ],
)
def test_a_setting_is_refused_beside_another_that_leaves_it_no_effect(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError, match=f"{key}: has no effect with"):
        JobConfig.model_validate(changes)
    JobConfig.model_validate({"data": {"time": "hour"}, "train": {"order": "stored"}})
    JobConfig.model_validate({"model": {"name": "dlrm", "hidden": [], "bottom": [], "norm": "layer"}})


def test_the_walk_visits_every_group_of_settings(folder: Path) -> None:
    left = {each.__name__ for each in models_of(JobConfig) - {kind for _, _, _, kind, _ in walked(folder)}}
    assert left == {"OwnConfig", "OwnModelConfig", "LrConfig", "FmConfig"}, "have no settings of their own"

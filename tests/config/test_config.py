"""The config: the sample of the design, every line of validation, overrides, the round trip."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.config.schedule import ScheduleConfig
from shardkeep.base.errors import CheckpointError, ConfigError, UserError
from shardkeep.base.plugging.own import OwnConfig
from shardkeep.base.yaml_text import write_yaml
from shardkeep.config import JobConfig, load_config, parse_config, stored_config
from shardkeep.ps.config import TableSpec
from shardkeep.ps.control.agreement import check_settings
from shardkeep.ps.control.records import Member
from shardkeep.ps.server.table.optimizers.adam import AdamConfig
from shardkeep.ps.server.table.optimizers.rowwise_adagrad import RowwiseAdagradConfig
from shardkeep.ps.server.table.optimizers.sgd import SgdConfig
from shardkeep.workers.label_config import NegativesConfig
from shardkeep.workers.model_config import MODELS, TwoTowerConfig, keys_of
from tests.support.cases import every
from tests.support.import_path import ROOT

SAMPLE = """
name: adult-dlrm
seed: 7
servers: 2
workers: 2
data:
  source: csv                  # csv | parquet | criteo | synthetic | module:function
  root: .                      # relative paths below resolve against it; . = the config's folder
  train: [adult.data]
  eval: [adult.test]
  label: {column: salary, positive: [">50K", ">50K."]}
  dense: [age, education-num, capital-gain, capital-loss, hours-per-week]
  sparse: [workclass, education, occupation, native-country]   # or {column: C1, table: user, pooling: mean}
model: {name: dlrm, bottom: [64], hidden: [64]}   # bottom's final D is added; other dims are projected to the default
tables:                        # default is a reserved name; a table is named after its feature unless told otherwise
  default: {dim: 16, optimizer: {name: rowwise_adagrad, lr: 0.05}}
  occupation: {dim: 32}
tower: {optimizer: {name: adam, lr: 0.001}, compile: auto, amp: auto}
train: {batch_size: 512, epochs: 3}            # batch_size per worker; also max_steps, accumulate, clip_norm
eval: {every_steps: epoch}                     # after each epoch
consistency: {mode: bounded, staleness: 2}
compression:
  push: {keep: 1.0, values: fp32}
  pull: {values: fp32}
  tower: {name: none}
checkpoint: {every_steps: 1000, keep: 3}
"""


def test_the_sample_of_the_design_is_read_as_it_is_meant() -> None:
    config = parse_config(SAMPLE)
    assert config.data.label is not None
    assert config.data.label.positive == [">50K", ">50K."]
    assert [c.column for c in config.data.sparse] == ["workclass", "education", "occupation", "native-country"]
    assert config.table("workclass").dim == 16
    assert config.table("occupation").dim == 32
    assert config.table("occupation").optimizer.name == "rowwise_adagrad"
    assert config.tower.compile == "auto"
    assert parse_config(config.to_yaml()) == config


def test_a_bare_name_stands_for_a_mapping_in_files_and_settings() -> None:
    text = "{consistency: sync, model: dcn_v2, tower: {optimizer: sgd}, compression: {tower: fp16}}"
    tables = "tables: {default: {optimizer: adam, init: zeros}}"
    in_tables = ["tables.default.optimizer=adam", "tables.default.init=zeros"]
    for config in (
        parse_config(f"{text[:-1]}, {tables}}}"),
        parse_config(
            "seed: 0", ["consistency=sync", "model=dcn_v2", "tower.optimizer=sgd", "compression.tower=fp16", *in_tables]
        ),
    ):
        assert (config.consistency.mode, config.model.name, config.tower.optimizer.name) == ("sync", "dcn_v2", "sgd")
        assert config.compression.tower.name == "fp16"
        assert config.table("any").optimizer == AdamConfig() and config.table("any").init.name == "zeros"
        assert config.consistency.staleness == 0
        assert parse_config(config.to_yaml()) == config  # as the members read it


@every(
    ("given", "values"),
    [
        ("int4", "int4"),
        ("{name: int4}", "int4"),
        ("'mine:Codec'", OwnConfig(name="mine:Codec")),
        ("{name: 'mine:Codec', options: {bits: 3}}", OwnConfig(name="mine:Codec", options={"bits": 3})),
    ],
)
def test_a_number_format_is_a_built_in_name_or_a_class_with_options(given: str, values: Any) -> None:
    own = isinstance(values, OwnConfig)
    job = parse_config(f"compression: {{pull: {{values: {given}}}}}")
    assert job.compression.pull.values == values and job.own_modules == (["mine:Codec"] if own else [])
    assert parse_config(job.to_yaml()) == job
    other = parse_config("compression: {pull: {values: 'mine:Other'}}").agreed()
    with pytest.raises(
        UserError, match=r"^worker 0 has another config than the coordinator: compression\.pull\.values"
    ):
        check_settings(Member("worker", 0, "", 0), other, job.agreed())


@every(
    ("file", "override", "expected"),
    [
        ("seed: 1", "tables.default.optimizer.lr=0.5", RowwiseAdagradConfig(lr=0.5)),
        ("tables: {default: {optimizer: adam}}", "tables.default.optimizer.lr=0.5", AdamConfig(lr=0.5)),
        ("tables: {user: {optimizer: {name: sgd}}}", "tables.user.optimizer.lr=0.5", SgdConfig(lr=0.5)),
        (
            "tables: {default: {optimizer: {name: adam, eps: 0.1, schedule: {warmup_steps: 3}}}}",
            "tables.user.optimizer.schedule.decay=none",
            AdamConfig(eps=0.1, schedule=ScheduleConfig(warmup_steps=3)),
        ),
        ("tables: {user: {optimizer: adam}}", "tables.user.optimizer=sgd", SgdConfig()),
        (
            "tables: {user: {optimizer: {name: sgd, schedule: {decay: cosine, decay_steps: 9}}}}",
            "tables.user.optimizer.schedule.decay=inverse_sqrt",
            SgdConfig(schedule=ScheduleConfig(decay="inverse_sqrt", decay_steps=9)),
        ),
    ],
    ids=["built-in", "default", "table", "of-the-default", "whole", "no-final-factor"],
)
def test_an_override_of_one_field_keeps_the_kind(file: str, override: str, expected: Any) -> None:
    table = "user" if "user" in override else "any"
    config = parse_config(file, [override])
    assert config.table(table).optimizer == expected and parse_config(config.to_yaml()) == config


@every(
    ("data", "source"),
    [
        ("train: [a.csv]", "csv"),
        ("train: a.csv.gz", "csv"),
        ("train: a.tsv.gz", "csv"),
        ("train: [days/*.parquet], eval: b.PQ", "parquet"),
        ("train: [a.csv], source: criteo", "criteo"),
        ("synthetic: {train_samples: 5}", "synthetic"),
        ("root: a", ""),
    ],
)
def test_a_source_that_is_left_out_follows_from_the_files(data: str, source: str) -> None:
    config = parse_config(f"data: {{{data}}}")
    assert config.data.source == source
    assert parse_config(config.to_yaml()) == config
    assert (config.data.delimiter == "\t") == ("tsv" in data)


@every(
    ("text", "mode"),
    [
        ("{servers: 0, workers: 1, consistency: {}}", "sync"),
        ("{servers: 0, workers: 1, consistency: bounded}", "bounded"),
        ("{servers: 0, workers: 1, consistency: {staleness: 1}}", "bounded"),
        ("{servers: 0}", "sync"),
        ("{servers: 1}", "bounded"),
        ("{consistency: sync}", "sync"),
    ],
)
def test_one_process_runs_sync_unless_told_otherwise(text: str, mode: str) -> None:
    config = parse_config(text)
    assert config.consistency.mode == mode
    assert config.consistency.staleness == (0 if mode == "sync" else 1 if "staleness" in text else 2)
    assert f"mode: {mode}" in config.to_yaml() and parse_config(config.to_yaml()) == config
    assert config.workers == (2 if config.servers else 1)


def test_the_file_or_the_setting_is_blamed_that_the_problem_names() -> None:
    for override in ("seed=3", "train.epochs=2", "tower.compile=off"):
        with pytest.raises(ConfigError, match=r"^config: tower\.optimizer\.eps: has no effect"):
            parse_config("tower: {optimizer: {name: sgd, eps: 1.0}}", [override])
    file = "compression: {pull: {cache_rows: 9, lease: 2}}"
    with pytest.raises(ConfigError, match=r"^--set consistency=sync: compression\.pull\.cache_rows: 9 with"):
        parse_config(file, ["seed=2", "consistency=sync", "train.epochs=2"])
    both = r"^--set web\.metrics=127\.0\.0\.1:0 --set telemetry\.every_s=off: telemetry\.every_s: off with"
    with pytest.raises(ConfigError, match=both):
        parse_config("seed: 1", ["seed=2", "web.metrics=127.0.0.1:0", "telemetry.every_s=off"])


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        load_config(tmp_path / "nowhere.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(ConfigError, match=r"bytes\.yaml: is not a text file in UTF-8"):
        load_config(tmp_path / "bytes.yaml")


def test_every_setting_has_a_description() -> None:
    text = (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    assert not [line for line in text.splitlines() if line.startswith("| `") and line.endswith("|  |")]


def test_thousands_of_problems_take_no_longer_than_reading_them() -> None:
    text = f"data: {{synthetic: {{table_sizes: [{', '.join(['0'] * 2_000)}]}}}}"
    began = time.process_time()
    with pytest.raises(ConfigError, match=r"and 1981 more problems$"):
        parse_config(text, ["train.epochs=0"])
    assert time.process_time() - began < 3.0


def test_stored_settings_that_left_count_as_absent_where_they_had_no_effect_and_others_are_one_line(
    tmp_path: Path,
) -> None:
    text = "model: {{name: dnn, sync_norm: {}}}\n"
    table: dict[str, Any] = {"admit": {"min_count": 2, "probability": 1.0}}
    (tmp_path / "config.yaml").write_text(f"{text.format('false')}tables: {json.dumps({'user': table})}")
    assert stored_config(tmp_path).tables["user"].admit == TableSpec.of_record({"name": "user", **table}).admit
    table["admit"]["probability"] = 0.5
    with pytest.raises(CheckpointError, match=r"^table 'user': stored settings .*admit.probability[^\n]*wrote them$"):
        TableSpec.of_record({"name": "user", **table})
    (tmp_path / "config.yaml").write_text(text.format("true"))
    with pytest.raises(ConfigError, match=r"config.yaml: model.sync_norm: unknown key with name: dnn"):
        stored_config(tmp_path)


def test_a_setting_without_effect_is_refused_where_a_person_gave_it(tmp_path: Path) -> None:
    """An override may switch off what the file has; what a run stores has been judged."""
    text, off = "checkpoint: {keep: 4}\n", "checkpoint.every_steps=off"
    (tmp_path / "config.yaml").write_text(text + "tower: {compile: off, mode: max-autotune}\n")
    assert parse_config(text, [off]).checkpoint.keep == 4
    assert stored_config(tmp_path, [off]).checkpoint.keep == 4
    for file, override in (text, off), ("eval: {threshold: 0.3, metrics: [accuracy]}", "eval.metrics=[auc]"):
        job = parse_config(file, [override]).with_effect()
        assert parse_config(job.to_yaml()).all_settings() == parse_config("", [override]).all_settings()
    for refused, at in (
        (
            lambda: parse_config("", [off, "checkpoint.keep=2"]),
            "--set checkpoint.keep=2: checkpoint.keep: has no effect",
        ),
        (lambda: parse_config(text, [off, "checkpoint={every_steps: off, keep: 4}"]), "--set checkpoint={"),
        (lambda: parse_config(text + "  # off\n", ["checkpoint.dir=c", off]), "--set checkpoint.dir=c: checkpoint.dir"),
        (
            lambda: parse_config(text + "data: {train: a.csv}\neval: {test: false}", [off]),
            "config: eval.test: has no effect with no test",
        ),
        (
            lambda: stored_config(tmp_path, ["telemetry.every_s=off", "telemetry.max_bytes=9999999"]),
            "--set telemetry.m",
        ),
        (lambda: load_config(tmp_path / "config.yaml"), "config.yaml: tower.mode: has no effect"),
    ):
        with pytest.raises(ConfigError, match=re.escape(at)) as caught:
            refused()
        assert len(str(caught.value).splitlines()) == 1


# ---- the model of a job ----


CHANGED: dict[str, Any] = {
    "cin": [4], "bottom": [5], "hidden": [7], "structure": "parallel", "cross_layers": 2, "cross_rank": 3,
    "attention": {"dim": 8}, "bilinear": "all", "reduction": 2, "mask": {"ratio": 2.0}, "second_hidden": [6],
    "fusion_heads": 2, "gates": {"hidden": [3]}, "dropout": 0.2, "norm": "layer", "activation": "gelu",
    "init": "xavier_normal", "activation_checkpointing": True,
    "encoder": {"name": "transformer"}, "task_hidden": [5], "experts": 3, "levels": 1, "shared_experts": 3,
    "task_experts": 3, "similarity": "dot", "item": ["item"], "dim": 5, "layers": 3, "heads": 2,
}  # fmt: skip


MODELS_OF_ALL = [*MODELS, "own:Net"]


@pytest.mark.parametrize("distances", [(1, 6), pytest.param(range(len(MODELS_OF_ALL)), marks=pytest.mark.slow)])
def test_the_name_of_a_model_may_change_from_any_base(distances: Sequence[int]) -> None:
    """Of the pairs of models, those that are so far apart in the list, or all."""
    for number, before in enumerate(MODELS_OF_ALL):
        for distance in distances:
            check_change(before, MODELS_OF_ALL[(number + distance) % len(MODELS_OF_ALL)].replace("Net", "Other"))


def check_change(before: str, name: str) -> None:
    changed = CHANGED | ({"encoder": {}} if before in ("din", "bst") else {})
    changed |= {"hidden": 7} if before == "sasrec" else {}
    base = {key: changed.get(key, {}) for key in keys_of(before)}
    text = write_yaml({"model": {"name": before, **base}, "tables": {"default": {"dim": 1 if before == "lr" else 8}}})
    model = parse_config(text, [f"model.name={name}"]).model
    assert model.name == name, before
    kept = {key for key in base if keys_of(name).get(key) == keys_of(before)[key]}
    assert {key for key in kept if getattr(model, key) != parse_config(text).model.model_dump()[key]} <= {
        "attention", "mask", "gates", "encoder",
    }, (before, name)  # fmt: skip


def test_what_a_model_lacks_is_dropped_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    text = "model: {bottom: [4], hidden: [5]}\ntables: {default: {dim: 4}, a: {dim: 3}}"
    with caplog.at_level(logging.WARNING):
        config = parse_config(text, ["model.name=lr"])
    assert config.tables["a"].dim is None
    said = "model.name: lr goes without these keys: model.hidden, model.bottom, tables.default.dim, tables.a.dim"
    assert caplog.messages == [said]


def test_a_key_that_was_given_beside_the_name_is_refused() -> None:
    overrides = ["model.cross_layers=2", "model.name=deepfm"]
    for given in (overrides, overrides[::-1]):
        with pytest.raises(ConfigError) as refused:
            parse_config("model: {bottom: [4]}", given)
        said = "--set model.cross_layers=2: model.cross_layers: unknown key with name: deepfm"
        assert str(refused.value).startswith(said) and "\n" not in str(refused.value)


def test_a_retrieval_model_has_its_loss_without_a_word_and_may_be_given_as_its_class() -> None:
    config = JobConfig(model=TwoTowerConfig(item=["item"]))
    assert config.train.loss.name == "sampled_softmax" and parse_config(config.to_yaml()) == config
    loss = parse_config("model: sasrec\ntrain: {loss: {negatives: {uniform: 3}}}").train.loss
    assert (loss.name, loss.negatives) == ("sampled_softmax", NegativesConfig(uniform=3))


def test_another_model_goes_without_the_loss_of_the_first(caplog: pytest.LogCaptureFixture) -> None:
    text = parse_config("model: sasrec\ntrain: {loss: {temperature: 2}}").to_yaml()
    with caplog.at_level(logging.WARNING):
        assert parse_config(text, ["model.name=dnn"]).train.loss.name == "bce"
        assert parse_config(text, ["model.name=hstu"]).train.loss.temperature == 2
        assert parse_config("train: {loss: bce}", ["model.name=sasrec"]).train.loss.name == "sampled_softmax"
    assert [message.endswith("train.loss") for message in caplog.messages] == [True, True]

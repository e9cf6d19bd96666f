"""The config: the sample of the design, every line of validation, overrides, the round trip."""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.config.schedule import ScheduleConfig
from shardkeep.base.errors import ConfigError
from shardkeep.config import load_config, parse_config
from shardkeep.ps.server.table.optimizers.adam import AdamConfig
from shardkeep.ps.server.table.optimizers.rowwise_adagrad import RowwiseAdagradConfig
from shardkeep.ps.server.table.optimizers.sgd import SgdConfig
from tests.support.cases import every

ROOT = Path(__file__).resolve().parent.parent.parent

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
  push: {keep_rows: 1.0, values: fp32}
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


@every("text", ["", "# nothing\n", "---\n", "{}"], ids=["empty", "comment", "dashes", "braces"])
def test_an_empty_file_is_an_error_that_names_data(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^config: is empty; a job needs data, as in data: \{train: "):
        parse_config(text)


def test_the_resolved_config_reads_back_equal() -> None:
    config = parse_config(SAMPLE)
    assert parse_config(config.to_yaml()) == config


def test_relative_data_is_found_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("data: {root: files}\n")
    assert load_config(tmp_path / "job.yaml").data.root == str(tmp_path / "files")


@every("key", ["data.root", "checkpoint.dir"])
def test_a_relative_folder_is_below_the_file_that_names_it_or_below_the_shell_that_overrides_it(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, name = key.split(".")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "shell").mkdir()
    monkeypatch.chdir(tmp_path / "shell")
    path = tmp_path / "jobs" / "job.yaml"
    path.write_text(f"{group}: {{{name}: ../kept}}\n")

    def found(*overrides: str) -> str:
        return str(getattr(getattr(load_config(path, overrides), group), name))

    assert found() == str(tmp_path / "kept")
    assert found(f"{key}=below") == found(f"{group}={{{name}: below}}") == str(tmp_path / "shell" / "below")
    assert found(f"{key}={tmp_path / 'else'}") == str(tmp_path / "else")
    again = parse_config(load_config(path).to_yaml(), folder=tmp_path / "elsewhere")  # members, and a resumed run
    assert getattr(getattr(again, group), name) == str(tmp_path / "kept")


@every(
    ("text", "line"),
    [
        ("servres: 2", "config: servres: unknown key; did you mean servers?"),
        ("train: {batchsize: 4}", "config: train.batchsize: unknown key; did you mean batch_size?"),
        ("tables: {user: {dimm: 4}}", "config: tables.user.dimm: unknown key; did you mean dim?"),
        ("checkpoint: {zzz: 1}", "config: checkpoint.zzz: unknown key; known keys: dir, every_steps, full_every, keep"),
    ],
    ids=["top", "below", "table", "no-near-one"],
)
def test_an_unknown_key_names_the_nearest_known_one(text: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    assert str(caught.value) == line


@every(
    ("text", "expected"),
    [
        ("servers: two", ["servers", "'two'", "a whole number from 0 to 1,024"]),
        ("workers: 0", ["workers", "0 is not allowed", "a whole number from 1 to 1,024"]),
        ("name: a b", ["name", "'a b'", "letters, digits, dots"]),
        ("{servers: 0, workers: 2}", ["workers", "2", "servers: 0", "allowed: 1"]),
        ("tower: {compile: maybe}", ["tower.compile", "'maybe'", "auto, on or off"]),
        ("tower: {optimizer: {name: sgd, eps: 1.0}}", ["tower.optimizer.eps: has no effect with name: sgd"]),
        ("tower: {optimizer: {name: adam, momentum: 0.9}}", ["momentum: has no effect with name: adam"]),
        (
            "{tower: {parallel: fsdp}, consistency: {mode: sync}}",
            ["tower.parallel: fsdp with consistency.mode: sync", "allowed: ddp, or mode: bounded or async"],
        ),
        (
            "{servers: 0, tower: {parallel: fsdp}}",
            ["tower.parallel: fsdp", "servers: 0 runs sync unless a mode is set"],
        ),
        (
            "{tower: {parallel: fsdp}, compression: {tower: {name: int8}}}",
            ["tower.parallel: fsdp with compression.tower.name: int8", "allowed: ddp, or none"],
        ),
        (
            "{workers: 1, tower: {parallel: fsdp}}",
            ["tower.parallel: fsdp with workers: 1, which splits nothing; allowed: ddp, or 2 and more"],
        ),
        ("tower: {pad_widths: 12}", ["tower.pad_widths", "12", "off, 8, 16, 32 or 64"]),
        ("tower: {parallel: fsdp, compile: on}", ["tower.compile: on with parallel: fsdp; allowed: auto or off"]),
        ("tower: {optimizer: {lr: .nan}}", ["tower.optimizer.lr", "nan", "a number above 0"]),
        ("tower: {optimizer: {schedule: {decay: cosine}}}", ["decay_steps: 0 with decay: cosine"]),
        ("tower: {optimizer: {schedule: {decay_steps: 5}}}", ["decay_steps: has no effect with decay: none"]),
        (
            "tower: {optimizer: {schedule: {decay: exponential, decay_steps: 5}}}",
            ["final_factor: 0 with decay: exponential"],
        ),
        (
            "tower: {optimizer: {schedule: {decay: inverse_sqrt, decay_steps: 5, final_factor: 0.5}}}",
            ["final_factor: has no effect with decay: inverse_sqrt"],
        ),
        ("tables: {t: {optimizer: {name: adagrat}}}", ["tables.t.optimizer", "adagrat", "rowwise_adagrad"]),
        ("tables: {t: {optimizer: {name: sgd, eps: 1.0}}}", ["tables.t.optimizer.eps: unknown key with name: sgd"]),
        (
            "tables: {t: {init: {name: uniform, low: 1}}}",
            ["tables.t.init", "low: 1 with name: uniform; allowed: scale, or high and low"],
        ),
        (
            "tables: {t: {init: {name: normal, scale: 1, std: 2}}}",
            ["tables.t.init", "scale: 1, std: 2 with name: normal; allowed: scale, or std, or mean and std"],
        ),
        ("tables: {t: {init: {name: uniform, low: 2, high: 1}}}", ["low: 2, high: 1; allowed: low below high"]),
        ("tables: {t: {init: constant}}", ["tables.t.init", "no other key with name: constant; allowed: value"]),
        ("tables: {t: {init: {name: constant, std: 1}}}", ["std: 1 with name: constant; allowed: value"]),
        ("consistency: {mode: sync, staleness: 2}", ["staleness: 2 with mode: sync", "allowed: 0"]),
        ("compression: {push: {values: fp16, scale: pow2}}", ["push.scale: has no effect with values: fp16"]),
        (
            "compression: {push: {values: int4, keep_values: 0.1, pool_rows: 9}}",
            ["push", "values: int4 does not go with keep_values; allowed: fp32"],
        ),
        ("compression: {push: {select: random}}", ["push", "select: random has no effect where all is sent"]),
        (
            "compression: {push: {select: random, keep_values: 0.1, pool_rows: 9}}",
            ["push", "select: random has no effect with keep_values"],
        ),
        ("compression: {pull: {drift: 0.1}}", ["pull", "drift: has no effect with lease: 0"]),
        ("compression: {pull: {cache_rows: 9, lease: 2, drift: 0}}", ["drift", "a number above 0"]),
        (
            "{consistency: {mode: sync}, compression: {pull: {cache_rows: 9, lease: 2}}}",
            ["cache_rows: 9 with consistency.mode: sync", "allowed: 0, or mode: bounded or async"],
        ),
        (
            "compression: {push: {keep_values: 0.1, pool_rows: 9, dgc: {momentum: 0.9}}}",
            ["dgc: has momentum of its own, and tables have the optimizer", "allowed: sgd"],
        ),
        (
            "tables: {t: {optimizer: {name: adam, weight_decay_on: table}}}",
            ["tables.t.optimizer", "weight_decay_on: table with weight_decay: 0; allowed: touched, or weight_decay"],
        ),
        (
            "tables: {t: {optimizer: {name: ftrl, weight_decay_on: table}}}",
            ["tables.t.optimizer", "weight_decay_on"],
        ),
        (
            "tables: {t: {optimizer: {name: lars_sgd, weight_decay_on: table}}}",
            ["tables.t.optimizer", "weight_decay_on"],
        ),
        (
            "tables: {t: {optimizer: {name: lamb, weight_decay_on: table}}}",
            ["tables.t.optimizer", "weight_decay_on"],
        ),
        (
            "tables: {t: {optimizer: {name: adadelta, eps: 0}}}",
            ["tables.t.optimizer", "eps"],
        ),
        (
            "{tables: {t: {optimizer: {name: sgd, weight_decay: 1, weight_decay_on: table}}}, "
            "compression: {push: {keep_rows: 0.1}}}",
            ["tables.t.optimizer.weight_decay_on: table with compression.push.keep_rows: 0.1", "allowed: touched, or"],
        ),
        (
            "{tables: {default: {optimizer: {weight_decay: 1, weight_decay_on: table}}}, "
            "compression: {push: {keep_values: 1, pool_rows: 9}}}",
            ["tables.default.optimizer.weight_decay_on: table with compression.push.keep_values: 1, which"],
        ),
        ("compression: {pull: {lease: 8}}", ["cache_rows: 0 with lease: 8; allowed: both 0, or both above 0"]),
        ("compression: {push: {rounding: nearest}}", ["push", "rounding: has no effect with values: fp32"]),
        (
            "compression: {push: {scale: fp16, rounding: stochastic}}",
            ["scale and rounding: has no effect with values: fp32"],
        ),
        ("compression: {pull: {values: bf16, scale: fp16}}", ["pull", "scale: has no effect with values: bf16"]),
        ("compression: {pull: {values: int8, rounding: nearest}}", ["compression.pull.rounding"]),
        ("compression: {push: {values: int3}}", ["compression.push.values", "int3", "int4"]),
        ("compression: {push: {values: int4, scale: fp32}}", ["compression.push.scale", "fp32", "pow2"]),
        ("compression: {push: {keep_rows: 0}}", ["compression.push.keep_rows", "0", "a number above 0"]),
        ("data: {sparse: [{column: a, pooling: weighted}]}", ["data.sparse.0", "weights: COLUMN", "missing"]),
        (
            "data: {sparse: [{column: a, pooling: max, weights: w}]}",
            ["data.sparse.0", "max takes no weights", "weights: w"],
        ),
        ("data: {delimiter: ''}", ["data.delimiter", "''", "one or more characters"]),
        ("profile: {start: -1, steps: 1}", ["profile.start", "-1", "a whole number from 0"]),
        ("profile: {steps: 1001}", ["profile.steps", "1001", "from 1 to 1,000"]),
        ("profile: {start: 5}", ["profile.start: 5 has no effect with steps: off", "allowed: steps of 1 to 1000"]),
        ("data: 7", ["data", "7 is not allowed"]),
        ("[1, 2]", ["config: holds [1, 2]", "a mapping"]),
        ("a: [1", ["config: is not YAML", "line 1"]),
    ],
    ids=lambda value: value.replace(" ", "")[:34] if isinstance(value, str) else "",
)
def test_a_wrong_value_is_one_line_with_the_key_the_value_and_what_is_allowed(text: str, expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    message = str(caught.value)
    assert "\n" not in message
    for part in expected:
        assert part in message


@every(
    ("override", "line"),
    [
        ("train.batch_size", "--set train.batch_size: is not of the form a.b=value"),
        ("train..x=1", "--set train..x=1: is not of the form a.b=value"),
        ("name.first=1", "--set name.first=1: name holds 'job', which has no keys"),
        ("seed=[1", "--set seed=[1: is not YAML"),
        ("train.epochs=three", "--set train.epochs=three: train.epochs: 'three' is not allowed"),
        ("train.epoch=3", "--set train.epoch=3: train.epoch: unknown key; did you mean epochs?"),
    ],
    ids=["no-value", "empty-part", "below-a-value", "not-yaml", "wrong-type", "unknown"],
)
def test_a_wrong_override_is_refused_and_named(override: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config("name: job", [override])
    assert str(caught.value).startswith(line)


def test_the_file_is_blamed_for_what_no_override_has_set() -> None:
    for override in ("seed=3", "train.epochs=2", "tower.compile=off"):
        with pytest.raises(ConfigError, match=r"^config: tower\.optimizer\.eps: has no effect"):
            parse_config("tower: {optimizer: {name: sgd, eps: 1.0}}", [override])


def test_a_resolved_config_can_be_read_again_in_each_consistency_mode() -> None:
    for mode in ("sync", "bounded", "async"):
        config = parse_config("seed: 1", [f"consistency.mode={mode}"])
        assert parse_config(config.to_yaml()) == config
        assert config.consistency.staleness == (0 if mode == "sync" else 2)


def test_a_bare_name_stands_for_a_mapping_in_files_and_settings() -> None:
    text = "{consistency: sync, model: dcn_v2, tower: {optimizer: sgd}, compression: {tower: bf16}}"
    tables = "tables: {default: {optimizer: adam, init: zeros}}"
    in_tables = ["tables.default.optimizer=adam", "tables.default.init=zeros"]
    for config in (
        parse_config(f"{text[:-1]}, {tables}}}"),
        parse_config(
            "seed: 0",
            ["consistency=sync", "model=dcn_v2", "tower.optimizer=sgd", "compression.tower=bf16", *in_tables],
        ),
    ):
        assert (config.consistency.mode, config.model.name, config.tower.optimizer.name) == ("sync", "dcn_v2", "sgd")
        assert config.compression.tower.name == "bf16"
        assert config.table("any").optimizer == AdamConfig() and config.table("any").init.name == "zeros"
        assert config.consistency.staleness == 0
        assert parse_config(config.to_yaml()) == config  # as the members read it


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
    ],
    ids=["built-in", "default", "table", "of-the-default", "whole"],
)
def test_an_override_of_one_field_keeps_the_kind(file: str, override: str, expected: Any) -> None:
    table = "user" if "user" in override else "any"
    assert parse_config(file, [override]).table(table).optimizer == expected


@every(
    ("data", "source"),
    [
        ("train: [a.csv]", "csv"),
        ("train: a.csv.gz", "csv"),
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


def test_files_of_tabs_have_tabs_between_fields() -> None:
    assert parse_config("data: {train: a.tsv.gz}").data.delimiter == "\t"


@every(
    ("text", "mode"),
    [
        ("{servers: 0, workers: 1}", "sync"),
        ("{servers: 0, workers: 1, consistency: {}}", "sync"),
        ("{servers: 0, workers: 1, consistency: bounded}", "bounded"),
        ("{servers: 0, workers: 1, consistency: {staleness: 1}}", "bounded"),
        ("{servers: 0}", "sync"),
        ("{servers: 1}", "bounded"),
    ],
)
def test_one_process_runs_sync_unless_told_otherwise(text: str, mode: str) -> None:
    config = parse_config(text)
    assert config.consistency.mode == mode
    assert f"mode: {mode}" in config.to_yaml()
    assert config.workers == (2 if config.servers else 1)


def test_the_setting_is_blamed_that_the_problem_names() -> None:
    file = "compression: {pull: {cache_rows: 9, lease: 2}}"
    with pytest.raises(ConfigError, match=r"^--set consistency=sync: compression\.pull\.cache_rows: 9 with"):
        parse_config(file, ["seed=2", "consistency=sync", "train.epochs=2"])
    both = r"^--set web\.metrics=127\.0\.0\.1:0 --set telemetry\.every_s=off: telemetry\.every_s: off with"
    with pytest.raises(ConfigError, match=both):
        parse_config("seed: 1", ["seed=2", "web.metrics=127.0.0.1:0", "telemetry.every_s=off"])


def test_overrides_win_over_the_file_and_may_name_new_tables() -> None:
    config = parse_config("seed: 1", ["seed=2", "tables.user.dim=8", "data.sparse=[a, b]"])
    assert (config.seed, config.table("user").dim, len(config.data.sparse)) == (2, 8, 2)


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        load_config(tmp_path / "nowhere.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(ConfigError, match=r"bytes\.yaml: is not a text file in UTF-8"):
        load_config(tmp_path / "bytes.yaml")


def test_every_setting_has_a_description() -> None:
    text = (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    assert not [line for line in text.splitlines() if line.startswith("| `") and line.endswith("|  |")]


def test_the_page_of_all_settings_has_not_drifted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gen-config-docs", "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "scripts" / "gen-config-docs"), run_name="__main__")
    assert not ended.value.code


@every(
    "path", sorted(set((ROOT / "examples").glob("*.yaml")) - {ROOT / "examples" / "sweep.yaml"}), ids=lambda p: p.name
)
def test_every_example_is_a_valid_config(path: Path) -> None:
    load_config(path)


def test_a_config_of_many_columns_is_read_back_as_members_read_it() -> None:
    columns = ", ".join(f"c{i}" for i in range(400))
    config = parse_config(f"data: {{train: [a.csv], label: y, dense: [{columns}]}}")
    assert parse_config(config.to_yaml()) == config


def test_thousands_of_problems_take_no_longer_than_reading_them() -> None:
    text = f"data: {{synthetic: {{table_sizes: [{', '.join(['0'] * 5_000)}]}}}}"
    began = time.process_time()
    with pytest.raises(ConfigError, match=r"and 4981 more problems$"):
        parse_config(text, ["train.epochs=0"])
    assert time.process_time() - began < 3.0

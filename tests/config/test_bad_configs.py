"""Wrong configs: a list of hand-written ones, and some hundreds that are made from the models' schema, so that a new
setting is covered from its first day."""

from __future__ import annotations

import itertools
import random
import re
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from shardkeep.base.errors import ConfigError
from shardkeep.config import JobConfig, parse_config
from shardkeep.config.schema import Schema, branches, schema_of
from tests.support.cases import every

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 15)
)
MULTIPLY = (
    (LAUGHS, "line 1: an ampersand begins a value, and anchors are not allowed"),
    ("data: &a {options: {b: *a}}", "line 1: an ampersand begins a value"),
    ("seed: " + "[" * 500 + "]" * 500, "line 1: more than 100 levels of nesting"),
    ("".join(f"{' ' * k}a:\n" for k in range(1_000)), "line 100: more than 100 levels"),
    ("data: {synthetic: {table_sizes: [18446744073709551616]}}", "data.synthetic.table_sizes.0"),
    ("data: {synthetic: {num_dense: 1000000000}}", "data.synthetic.num_dense"),
    ("model: {hidden: [1000000000000000000]}", "model.hidden.0"),
    ("data: {sequences: {s: {ids: {a: b}, max_length: 65537}}}", "from 1 to 65,536"),
)
"""What would take much memory."""
TOWERS = "model: {name: two_tower, item: [a]}"
SPLIT = "data: {train: a.csv, label: y, sparse: [user]"
FSDP = "tower: {parallel: fsdp}"


def _labels(*others: str) -> str:
    return f"data: {{train: a.csv, labels: [clicked, {', '.join(others)}]}}"


def _split(settings: str) -> str:
    return f"{SPLIT}, split: {settings}}}"


def _table(settings: str) -> str:
    return f"tables: {{t: {{{settings}}}}}"


def _cores(affinity: str) -> str:
    return f"launch: {{affinity: {affinity}}}"


CORES = "allowed: none, auto, or cores by role, as in {workers: [[0], [1]], servers: [[2, 3]]}"
BAD: tuple[tuple[str, ...], ...] = (
    *MULTIPLY,
    # YAML
    ("", "config: is empty; a job needs data, as in data: {train: "),
    ("- 1\n- 2\n", "config: holds [1, 2]; allowed: a mapping of keys to values"),
    ("data: {split: {by: user, eval: 2026-13-45}}", "data.split.eval: '2026-13-45'"),
    ("data: {synthetic: {task: tasks}}", "data.synthetic.task: unknown key; clicks needs none; others are data.source"),
    ("data: {eval_fraction: 0.25}", "eval_fraction: unknown key; use split: {by: random, eval: 0.25, test: 0}"),
    (f"seed: {'9' * 5000}", "line 1: a whole number of 5,000 digits"),
    ("name: a", "--set seed=9999", f"seed={'9' * 5000}"),
    ("seed: 1\nservers: 2\nseed: 2\n", "line 3: the key seed stands here and in line 1"),
    ("{[a]: 1}", "line 1: a list or a mapping stands where a key belongs"),
    ("tables: {7: {dim: 4}}", "tables: the key 7 is not allowed"),
    ("name: !!python/object:os.system {}", "line 1: the tag '!!python/object:os.system'"),
    ("seed: [1", "is not YAML in line 1"),
    ('name: "a', "a quote is not closed"),
    ("data:\n\tsource: csv\n", "is not YAML in line 2"),
    ("seed: 1\ndata: {<<: {root: a}}", "data.<<: unknown key"),
    ("---\nseed: 1\n---\nseed: 2\n", "a second document"),
    ("name: a\0b", "line 1: holds the character 0x0"),
    ('data: {options: {a: "\\ud800"}}', "line 1: half of a pair"),
    # keys
    ("train: {batchsize: 4}", "config: train.batchsize: unknown key; did you mean batch_size?"),
    ("checkpoint: {zzz: 1}", "checkpoint.zzz: unknown key; known keys: dir, every_steps, full_every, keep"),
    # paths
    ('data: {root: "a\\0b"}', "data.root"),
    (f"checkpoint: {{dir: {'d/' * 3000}}}", "checkpoint.dir"),
    (f"data: {{cache: {'é' * 200}}}", "data.cache"),
    ("data: {root: ~no-such-user/data}", "data.root: '~no-such-user/data'"),
    # values
    ("servers: two", "servers: 'two' is not allowed; allowed: a whole number from 0 to 1,024"),
    ("{servers: 0, workers: 2}", "workers: 2 is not allowed: with servers: 0 everything runs in one process; allowed:"),
    (f"name: {'n' * 300}", "name"),
    ("name: a b", "name: 'a b' is not allowed; allowed: text of at most 100 letters, digits, dots"),
    (f"tables: {{{'t' * 300}: {{}}}}", "tables: the key"),
    ("profile: {start: -1, steps: 1}", "profile.start: -1 is not allowed; allowed: a whole number from 0"),
    ("profile: {start: 5}", "profile.start: 5 has no effect with steps: off"),
    (
        "tables: {t: {init: zeros, optimizer: lamb}}",
        "tables.t: init.name: zeros with optimizer.name: lamb, which keeps",
    ),
    ("eval: {threshold: 0.3}", "eval.threshold: has no effect with eval.metrics that need none"),
    ("{data: {train: a.csv}, eval: {test: false}}", "eval.test: has no effect with no test data"),
    ("data: {train: a.csv, label: y}\neval: {max_samples: 5}", "eval.max_samples: has no effect with no evaluation"),
    ("data: {train: a.csv, label: y}\neval: {every_steps: 5}", "eval.every_steps: has no effect with no evaluation"),
    ("eval: {metrics: [auk]}", "'auk' is unknown; allowed: auc, gauc"),
    ("eval: {metrics: [gauc]}", "group_by: is missing"),
    ("eval: {group_by: user}", "group_by: has no effect without gauc"),
    ("{train: {loss: mse}, eval: {metrics: [mse, auc]}}", "eval.metrics: auc needs labels of 0 and 1"),
    ("{train: {plateau: {}}, eval: {metrics: [logloss]}}", "train.plateau.metric: auc is not evaluated"),
    ("train: {loss: {name: mse, delta: 2}}", "delta: has no effect with name: mse"),
    ("train: {plateau: {}}", "train.plateau: has no effect with one evaluation, at the end"),
    ("tower: {compile: off, mode: max-autotune}", "tower.mode: has no effect with tower.compile: off"),
    ("servers: 0\ntower: {mode: max-autotune}", "tower.mode: has no effect with tower.compile: auto"),
    ("checkpoint: {every_steps: off, keep: 2}", "checkpoint.keep: has no effect with every_steps: off"),
    ("telemetry: {every_s: off, max_bytes: 2000000}", "telemetry.max_bytes: has no effect with every_s: off"),
    ("data: {labels: [a, b]}\nmodel: dnn\neval: {metrics: [mrr]}", "eval.metrics: mrr is of retrieval models"),
    ("data: {delimiter: ''}", "one or more characters"),
    # kinds
    ("consistency: sycn", "consistency.mode: 'sycn'"),
    ("model: dlmr", "did you mean dlrm?"),
    (_table("optimizer: 7"), "tables.t.optimizer: 7"),
    (_table("optimizer: {name: adagrat}"), "'adagrat'"),
    (_table("optimizer: {name: sgd, eps: 1}"), "tables.t.optimizer.eps: unknown key with name: sgd"),
    ("data: {train: [a.csv, b.parquet]}", "data.source: is missing, and the suffixes of a.csv"),
    ("data: {train: adult.data}", "data.source: is missing, and 'adult.data' has no suffix"),
    ("data: {sequences: {seen: {ids: {a: b}}}}", "seen.max_length: is missing; allowed: a whole"),
    ("data: {sequences: {seen: {ids: {}, max_length: 9}}}", "seen.ids: allowed: a list column of ids"),
    ("data: {source: ':f'}", "data.source"),
    ("model: '..a:F'", "model.name"),
    ("data: {train: a.csv, synthetic: {zipf: 1.05}}", "data.synthetic: has no effect beside"),
    ("data: {sparse: [{column: a, pooling: weighted}]}", "data.sparse.0.pooling: weighted and weights: COLUMN go"),
    ("data: {sparse: [{column: a, pooling: max, weights: w}]}", "max takes no weights"),
    # labels
    ("data: {train: a.csv, labels: [a]}", "data.labels: has one label; allowed: two or more"),
    ("data: {train: a.csv, labels: [a, b, a]}", "data.labels: names a twice"),
    ("data: {train: a.csv, label: c, labels: [a, b]}", "data.label: is there beside labels"),
    (_labels("{column: bought, after: cliked}"), "bought: after: cliked is no label; did you mean"),
    (_labels("{column: bought, given: zzz}"), "given: zzz is no label; the labels are clicked"),
    (_labels("{column: bought, after: bought}"), "after: bought is the label itself"),
    (_labels("{column: bought, after: x}", "x"), "bought: after: x comes later in the list"),
    (_labels("{column: a, after: b}", "{column: b, after: a}"), "data.labels: a: after: b comes later in the list"),
    (_labels("{column: s, loss: mse}", "{column: b, after: s}"), "b: after: s is a number"),
    (_labels("{column: s, loss: mse, after: clicked}"), "after: clicked with loss: mse"),
    (_labels("{column: b, after: clicked, given: clicked}"), "given: clicked and after: clicked"),
    (_labels("{column: s, kind: number, loss: bce}"), "kind: number with loss: bce"),
    (_labels("{column: b, missing: skip}"), "b: missing: skip leaves the row out for all labels"),
    (_labels("{column: b, weight: 0}"), "data.labels.1.weight: 0"),
    (_labels("b") + "\ntrain: {loss: mse}", "train.loss: mse with data.labels"),
    (_labels("b") + "\nmodel: lr", "model.name: lr predicts one label; allowed with data.labels: dnn"),
    (_labels("b") + "\ntrain: {early_stopping: {}}", "early_stopping.metric: auc is not evaluated; allowed:"),
    (_labels("{column: s, loss: mse}") + "\ntrain: {plateau: {metric: auc/s}}", "plateau.metric: auc/s is not"),
    # settings of the command
    ("name: job", "--set name.first=1: name holds 'job', which has no keys", "name.first=1"),
    ("name: job", "--set seed: is not of the form a.b=value", "seed"),
    ("name: job", "--set train..x=1: is not of the form a.b=value", "train..x=1"),
    ("name: job", "--set seed=[1: is not YAML", "seed=[1"),
    ("name: job", "--set train.batch_size=: train.batch_size: an empty value", "train.batch_size="),
    ("name: job", "--set train.epochs=three: train.epochs: 'three' is not allowed", "train.epochs=three"),
    ("consistency: sync", "--set consistency.staleness=2", "consistency.staleness=2"),
    # retrieval
    (f"{TOWERS}\ntrain: {{loss: bce}}", "train.loss: bce with model.name: two_tower"),
    ("train: {loss: sampled_softmax}", "sampled_softmax with model.name: dlrm; allowed"),
    (_labels("{column: b, loss: sampled_softmax}"), "data.labels.1.loss: sampled_softmax"),
    (f"{_labels('b')}\n{TOWERS}", "data.labels: with model.name: two_tower"),
    (f"{TOWERS}\ntower: {{compile: on}}", "tower.compile: on with model.name: two_tower"),
    (f"{TOWERS}\ntrain: {{order: time}}", "train.order: time with model.name: two_tower"),
    (f"{TOWERS}\ndata: {{train: a.csv, label: {{column: b, kind: number}}}}", "data.label.kind: number with"),
    (f"{SPLIT}, split: user, eval: b.csv}}", "split.eval: 0.1 is there beside eval; allowed: 0, split: null, or no"),
    (f"{SPLIT}, split: user, test: b.csv}}", "split.test: 0.1 is there beside test"),
    (_split("{by: user, eval: 0.5, test: 0.5}"), "eval: 0.5 and test: 0.5; allowed: a sum"),
    (_split("{by: user, eval: 0, test: 0}"), "eval: 0 and test: 0; allowed: a sum"),
    (_split("time"), "split.by: time needs data.time"),
    (_split("{eval: 0.1}"), "data.split.by: is missing"),
    (f"{SPLIT}, split: user, time: ts}}", "data.time: has no effect with train.order"),
    (f"{_split('user')}\ncheckpoint: {{every_steps: off}}", "no model for data.split.test"),
    # tower
    ("tower: {compile: maybe}", "tower.compile: 'maybe' is not allowed; allowed: auto, on or off"),
    ("tower: {optimizer: {lr: .nan}}", "tower.optimizer.lr: nan is not allowed; allowed: a number above 0"),
    ("tower: {optimizer: {name: sgd, eps: 1.0}}", "tower.optimizer.eps: has no effect with name: sgd"),
    (f"{FSDP}\nconsistency: sync", "tower.parallel: fsdp with consistency.mode: sync"),
    (f"{FSDP}\nservers: 0", "servers: 0 runs sync unless a mode is set"),
    (f"{FSDP}\ncompression: {{tower: {{name: fp16}}}}", "tower.parallel: fsdp with compression.tower.name: fp16"),
    (f"{FSDP}\nworkers: 1", "fsdp with workers: 1, which splits nothing; allowed: ddp, or 2 and more"),
    ("tower: {parallel: fsdp, compile: on}", "tower.compile: on with parallel: fsdp; allowed: auto or off"),
    ("tower: {pad_widths: 12}", "off, 8, 16, 32 or 64"),
    ("tower: {optimizer: {schedule: {decay: cosine}}}", "decay_steps: 0 with decay: cosine"),
    ("tower: {optimizer: {schedule: {decay_steps: 5}}}", "decay_steps: has no effect with decay: none"),
    ("tower: {optimizer: {schedule: {decay: exponential, decay_steps: 5}}}", "final_factor: 0 with decay: exponential"),
    (
        "tower: {optimizer: {schedule: {decay: inverse_sqrt, decay_steps: 5, final_factor: 0.5}}}",
        "final_factor: has no effect with decay: inverse_sqrt",
    ),
    # tables
    (_table("init: {name: uniform, low: 1}"), "low: 1 with name: uniform; allowed: scale, or high and low"),
    (_table("init: {name: normal, scale: 1, std: 2}"), "scale: 1, std: 2 with name: normal; allowed: scale, or std,"),
    (_table("init: {name: uniform, low: 2, high: 1}"), "low: 2, high: 1; allowed: low below high"),
    (_table("init: {name: file}"), "tables.t.init: no other key with name: file; allowed: path, or path and"),
    (_table("init: {name: file, path: a.npy, std: 1}"), "std: 1, path: a.npy with name: file"),
    (_table("init: {path: a.npy}"), "path: a.npy with name: uniform"),
    ("tables: {default: {init: {name: file, path: a}}}", "tables.default.init.name: file; allowed in the entry"),
    (_table("init: {name: file, path: a}") + "\ncheckpoint: {every_steps: off}", "checkpoint.every_steps: off"),
    (_table("init: constant"), "no other key with name: constant; allowed: value"),
    (_table("init: {name: constant, std: 1}"), "std: 1 with name: constant; allowed: value"),
    (_table("optimizer: {name: adam, weight_decay_on: table}"), "weight_decay_on: table with weight_decay: 0; allowed"),
    (_table("optimizer: {name: ftrl, weight_decay_on: table}"), "weight_decay_on"),
    (
        "tables: {t: {optimizer: {name: sgd, weight_decay: 1, weight_decay_on: table}}}\n"
        "compression: {push: {keep: 0.1, pool_rows: 9}}",
        "tables.t.optimizer.weight_decay_on: table with compression.push.keep: 0.1",
    ),
    ("model: lr\ntables: {item: {dim: 4}}", "tables.item.dim: 4 has no effect with model.name: lr"),
    # consistency and compression
    ("consistency: {mode: sync, staleness: 2}", "staleness: 2 with mode: sync"),
    ("compression: {push: {values: fp16, scale: pow2}}", "push.scale: has no effect with values: fp16"),
    (
        "compression: {push: {select: topk}}",
        "push.select: 'topk' is not allowed; allowed: rows, top_k or modul",
    ),
    ("compression: {push: {select: top_k}}", "push.select: top_k has no effect without pool_rows"),
    ("compression: {push: {keep_rows: 0.1}}", "compression.push.keep_rows: unknown key; use keep"),
    (
        "compression: {push: {keep_values: 0.1}}",
        "compression.push.keep_values: unknown key; use select: top_k, and",
    ),
    (
        "compression: {push: {dgc: {}}}",
        "compression.push.dgc: unknown key; use select: {name: shardkeep.exam",
    ),
    ("compression: {push: {max_age: 3}}", "compression.push.max_age: unknown key; leave it out, a row waits until"),
    ("compression: {push: {keep: 0.25}}", "keep: 0.25 drops gradients without pool_rows; allowed: pool_rows"),
    ("compression: {tower: {name: fp16, keep: 0.1}}", "tower.keep: has no effect with name: fp16"),
    ("compression: {tower: {name: none, warmup_steps: 5}}", "warmup_steps: has no effect with name: none"),
    ("compression: {tower: {name: topk, rank: 2}}", "rank: has no effect with name: topk"),
    (
        "compression: {push: {rounding: stochastic}}",
        "compression.push.rounding: unknown key; leave it out, every value",
    ),
    ("compression: {push: {scale: fp16}}", "scale: has no effect with values: fp32"),
    (
        "compression: {tower: int8}",
        "name: 'int8' is not allowed; allowed: none, fp16, topk, powersgd or module:Class of",
    ),
    ("compression: {tower: lossless}", "allowed: shardkeep.examples.compression.lossless:Lossless"),
    ("compression: {tower: {name: fp16, options: {a: 1}}}", "options: has no effect with name: fp16"),
    ("compression: {tower: {name: 'm:F', rank: 2}}", "rank: has no effect with name: m:F"),
    ("compression: {pull: {values: fp8-e4m3}}", "allowed: fp32, fp16, int8, int4, int2 or module:Class of your own"),
    (
        "compression: {pull: {values: {name: int5}}}",
        "allowed: fp32, fp16, int8, int4, int2 or module:Class of your own",
    ),
    ("compression: {pull: {values: {name: int4, options: {bits: 3}}}}", "values.name: 'int4' is not allowed; allowed"),
    ("compression: {pull: {values: {options: {bits: 3}}}}", "compression.pull.values.name: is missing"),
    ("compression: {push: {values: 'mine:C', scale: pow2}}", "push.scale: has no effect with values: mine:C"),
    ("compression: {pull: {drift: 0.1}}", "drift: has no effect with lease: 0"),
    ("compression: {pull: {cache_rows: 9, lease: 2, drift: 0}}", "a number above 0"),
    ("compression: {pull: {lease: 8}}", "cache_rows: 0 with lease: 8; allowed: both 0, or both above 0"),
    ("compression: {pull: {values: fp16, scale: fp16}}", "scale: has no effect with values: fp16"),
    ("consistency: sync\ncompression: {pull: {cache_rows: 9, lease: 2}}", "compression.pull.cache_rows: 9 with"),
    # truth values are no numbers, and words no truth values
    ("train: {epochs: true}", "train.epochs: true is not allowed; allowed: a whole number"),
    ("train: {clip_norm: true}", "train.clip_norm: true is not allowed; allowed: a number"),
    (_table("freeze: 1"), "tables.t.freeze: 1 is not allowed; allowed: true or false"),
    ("name: job", "tower.compile: true is not allowed; allowed: auto, on or off", "tower.compile=true"),
    ("name: job", "line 1: 010 is 8 in YAML 1.1 and 10 in YAML 1.2", "train.batch_size=010"),
    # cores
    (_cores("sometimes"), f"launch.affinity: 'sometimes' is not allowed; {CORES}"),
    (_cores("[[0]]"), f"launch.affinity: [[0]] is not allowed; {CORES}"),
    (_cores("{worker: [[0]]}"), "launch.affinity.worker: unknown key; did you mean workers?"),
    (_cores("{workers: [[0], []]}"), "affinity.workers: [[0], []] is not allowed: a list is empty; allowed: at least"),
    (_cores("{servers: [[0, 0]]}"), "affinity.servers: [[0, 0]] is not allowed: [0, 0]; allowed: numbers of cores"),
    (_cores("{workers: [0]}"), "launch.affinity.workers.0: 0 is not allowed; allowed: a list, each a whole number"),
    (_cores("{auto: true, workers: [[0]]}"), "launch.affinity: auto chooses the cores; allowed: auto, or lists"),
    (_cores("{servers: [[0], [1]]}") + "\nservers: 1", "affinity.servers: lists of cores for 2, there are 1; allowed:"),
)


FOREIGN = re.compile(
    r"Traceback|<class|Input should be|discriminator|pydantic|yaml\.|object at 0x|function-|validator|\[key\]|\$defs"
    r"|\b(None|NoneType|True|False|dict|str|int|float|bool|[A-Za-z]*Error)\b"
)
"""Words of Python, pydantic and PyYAML."""
ODD: tuple[Any, ...] = (
    None, True, "no-such-word", "", "a\0b", "\u202e\U0001f600\u00e9 \n", "x" * 5_000, -1, 0.5, float("nan"),
    float("-inf"), 2**64, 1e-320, [], [[[None]], {"a": 1}], {}, {"no_such_key": {"name": "adam"}}, {1: 2}, ["x"] * 60,
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """One setting: its keys, and the kind of its group, where that has one."""

    keys: tuple[str | int, ...]
    kind: str | None
    known: bool = True
    """False: no model has this key."""

    def text(self, value: Any) -> str:
        *above, last = self.keys
        raw: Any = {last: value} if self.kind is None else {"name": self.kind, last: value}
        if isinstance(last, int):
            raw = [value]
        for key in reversed(above):
            raw = [raw] if isinstance(key, int) else {key: raw}
        return yaml.safe_dump(raw, allow_unicode=True, sort_keys=False)


def inputs(values_per_place: int) -> Iterator[tuple[Place, str]]:
    """Configs with odd values at every setting of a job and at an unknown one in each group, all values in turn."""
    values, schema = itertools.cycle(ODD), schema_of(JobConfig)
    for place in _below(schema, schema["$defs"], ()):
        for value in itertools.islice(values, values_per_place if place.known else 1):
            yield place, place.text(value)


def _below(schema: Schema, definitions: Schema, keys: tuple[str | int, ...]) -> Iterator[Place]:
    for branch in branches(schema, definitions):
        properties = branch.get("properties", {})
        kind = properties.get("name", {}).get("const")
        for key, below in properties.items():
            if kind is None or key != "name":
                yield Place((*keys, key), kind)
                yield from _below(below, definitions, (*keys, key))
        if properties:
            yield Place((*keys, f"{next(iter(properties))}_x"), kind, known=False)
        if isinstance(branch.get("additionalProperties"), Mapping):
            yield from _below(branch["additionalProperties"], definitions, (*keys, "some"))
        if isinstance(branch.get("items"), Mapping):
            yield Place((*keys, 0), None)
            yield from _below(branch["items"], definitions, (*keys, 0))


def refused(text: str, *settings: str) -> str | None:
    """The error that a user gets; None if the config is accepted. Fails if it is no plain lines, or takes long."""
    began = time.process_time()
    try:
        config = parse_config(text, settings)
    except ConfigError as error:
        assert error.exit_code == 2
        message = str(error)
    else:
        assert parse_config(config.to_yaml()) == config, "what is accepted can be written and read again"
        return None
    assert time.process_time() - began < 5.0
    lines = message.splitlines()
    assert 0 < len(lines) <= 21
    for line in lines:
        assert line.isprintable() and 20 < len(line) < 500, line
        assert not FOREIGN.search(re.sub(r"'[^']*'", "", line)), line
    return message


@every("bad", BAD)
def test_a_wrong_config_is_told_in_plain_lines(bad: tuple[str, ...]) -> None:
    text, says, *settings = bad
    message = refused(text, *settings)
    assert message is not None and says in message


@pytest.mark.parametrize(("values_per_place", "stride"), [(1, 3), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_odd_values_of_every_setting_are_refused_in_plain_lines_or_accepted(values_per_place: int, stride: int) -> None:
    """By default one value of every third setting, else three of each."""
    cases = list(inputs(values_per_place))[::stride]
    assert len(cases) > 200
    wrong = 0
    for place, text in cases:
        message = refused(text)
        if message is not None:
            wrong += 1
            assert any(key in message for key in place.keys if isinstance(key, str)), f"{text:.200}: {message}"
        else:
            assert place.known, f"{text}: an unknown key is accepted"
    assert wrong > len(cases) / 2


def test_several_odd_settings_at_once_are_told_at_once_and_cut_to_a_screen() -> None:
    texts = [text for place, text in inputs(1) if len(place.keys) > 1 and not place.known]
    chosen = {text.split(":")[0]: text for text in random.Random(7).sample(texts, len(texts))}
    message = refused("".join(chosen.values()))
    assert message is not None and len(message.splitlines()) >= min(len(chosen), 20)
    message = refused("".join(f"unknown{k}: 1\n" for k in range(50)))
    assert message is not None and message.splitlines()[-1] == "config: and 30 more problems"


def test_a_config_that_would_multiply_costs_little_memory() -> None:
    tracemalloc.start()
    try:
        for text, says in MULTIPLY:
            with pytest.raises(ConfigError, match=re.escape(says)):
                parse_config(text)
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()

"""Configs that users and attackers wrote, and that once ended in a traceback, a hang, or pydantic's words.

Add a case here when another is found: tests/config/test_bad_configs.py runs the list.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bad:
    """A config that is refused."""

    name: str
    text: str
    says: str
    """What the error names: the key, or the line."""
    settings: tuple[str, ...] = ()
    """`--set` options."""


_LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 15)
)


def _labels(*others: str) -> str:
    """A job with the label `clicked` and others, as YAML."""
    return f"data: {{train: a.csv, labels: [clicked, {', '.join(others)}]}}"


_SPLIT = "data: {train: a.csv, label: y, sparse: [user]"
_TOWERS = "model: {name: two_tower, item: [a]}"
BAD = (
    # YAML
    Bad("empty", "", "data"),
    Bad("no-mapping", "- 1\n- 2\n", "a mapping of keys to values"),
    Bad("text", "just words", "a mapping of keys to values"),
    Bad("date", "data: {eval_fraction: 2026-13-45}", "data.eval_fraction: '2026-13-45'"),
    Bad("long-integer", f"seed: {'9' * 5000}", "line 1: a whole number of 5,000 digits"),
    Bad("long-hexadecimal", f"seed: 0x{'f' * 5000}", "line 1: a whole number of 5,002 digits"),
    Bad("long-override", "name: a", "--set seed=9999", (f"seed={'9' * 5000}",)),
    Bad("deep-list", "seed: " + "[" * 500 + "]" * 500, "line 1: more than 100 levels of nesting"),
    Bad("deep-mapping", "".join(f"{' ' * k}a:\n" for k in range(1_000)), "line 100: more than 100 levels"),
    Bad("billion-laughs", _LAUGHS, "line 1: an ampersand begins a value, and anchors are not allowed"),
    Bad("alias-of-itself", "data: &a {options: {b: *a}}", "line 1: an ampersand begins a value"),
    Bad("key-twice", "seed: 1\nservers: 2\nseed: 2\n", "line 3: the key seed stands here and in line 1"),
    Bad("key-twice-below", "data:\n  source: csv\n  source: parquet\n", "line 3: the key source stands here and in"),
    Bad("list-as-key", "{[a]: 1}", "line 1: a list or a mapping stands where a key belongs"),
    Bad("number-as-key", "1: 2", "the key 1 is not allowed; allowed: text; put a number or a truth value in quotes"),
    Bad("number-as-table", "tables: {7: {dim: 4}}", "tables: the key 7 is not allowed"),
    Bad("unknown-tag", "name: !mine a", "line 1: the tag '!mine' is not allowed"),
    Bad("python-tag", "name: !!python/object:os.system {}", "line 1: the tag '!!python/object:os.system'"),
    Bad("binary-tag", "data: {options: {a: !!binary aGk=}}", "line 1: the tag '!!binary'"),
    Bad("wrong-tag", "seed: !!int x", "line 1: the tag '!!int' is not allowed"),
    Bad("wrong-truth-tag", "seed: !!bool x", "line 1: the tag '!!bool' is not allowed"),
    Bad("open-bracket", "seed: [1", "is not YAML in line 1"),
    Bad("open-quote", 'name: "a', "a quote is not closed"),
    Bad("tab", "data:\n\tsource: csv\n", "is not YAML in line 2"),
    Bad("alias", "name: *x", "line 1: an asterisk begins a value, and aliases are not allowed"),
    Bad("merge", "seed: 1\ndata: {<<: {root: a}}", "data.<<: unknown key"),
    Bad("own-tag", "name: ! a", "line 1: the tag '!' is not allowed"),
    Bad("two-documents", "---\nseed: 1\n---\nseed: 2\n", "a second document"),
    Bad("nul-byte", "name: a\0b", "line 1: holds the character 0x0"),
    Bad("half-a-surrogate", 'data: {options: {a: "\\ud800"}}', "line 1: half of a pair"),
    # paths
    Bad("nul-in-root", 'data: {root: "a\\0b"}', "data.root"),
    Bad("nul-in-cache", 'data: {cache: "a\\0b"}', "data.cache"),
    Bad("nul-in-train", 'data: {source: csv, train: ["a\\0b.csv"]}', "data.train.0"),
    Bad("nul-in-checkpoint-dir", 'checkpoint: {dir: "a\\0b"}', "checkpoint.dir"),
    Bad("long-root", f"data: {{root: {'r' * 300}}}", "data.root"),
    Bad("long-cache", f"data: {{cache: {'c' * 300}}}", "data.cache"),
    Bad("long-train", f"data: {{source: csv, train: [{'t' * 300}]}}", "data.train.0"),
    Bad("long-checkpoint-dir", f"checkpoint: {{dir: {'d/' * 3000}}}", "checkpoint.dir"),
    Bad("long-in-bytes", f"data: {{cache: {'é' * 200}}}", "data.cache"),
    Bad("nobody-root", "data: {root: ~no-such-user/data}", "data.root: '~no-such-user/data'"),
    Bad("nobody-checkpoint-dir", "checkpoint: {dir: ~no-such-user/a}", "there is no home folder of no-such-user"),
    # sizes
    Bad("table-of-2-64", "data: {synthetic: {table_sizes: [18446744073709551616]}}", "data.synthetic.table_sizes.0"),
    Bad("samples-2-64", "data: {synthetic: {train_samples: 18446744073709551616}}", "data.synthetic.train_samples"),
    Bad("eval-samples-2-64", "data: {synthetic: {eval_samples: 18446744073709551616}}", "data.synthetic.eval_samples"),
    Bad("dense-columns-10-9", "data: {synthetic: {num_dense: 1000000000}}", "data.synthetic.num_dense"),
    Bad("form-timeout-10-18", "liveness: {form_timeout_s: 1000000000000000000}", "liveness.form_timeout_s"),
    Bad("lease-10-18", "liveness: {lease_s: 1000000000000000000}", "liveness.lease_s"),
    Bad("layer-10-18", "model: {hidden: [1000000000000000000]}", "model.hidden.0"),
    Bad("infinite-rate", "tower: {optimizer: {lr: .inf}}", "tower.optimizer.lr: inf is not allowed"),
    Bad("long-name", f"name: {'n' * 300}", "name"),
    Bad("long-table", f"tables: {{{'t' * 300}: {{}}}}", "tables: the key"),
    # kinds
    Bad("kind-misspelt", "consistency: sycn", "consistency.mode: 'sycn'"),
    Bad("model-misspelt", "model: dlmr", "did you mean dlrm?"),
    Bad("source-misspelt", "data: {source: cvs}", "did you mean csv?"),
    Bad("kind-of-a-number", "tables: {a: {optimizer: 7}}", "tables.a.optimizer: 7"),
    Bad("setting-of-another-kind", "tables: {a: {optimizer: {name: sgd, eps: 1}}}", "unknown key with name: sgd"),
    Bad("suffixes-differ", "data: {train: [a.csv, b.parquet]}", "data.source: is missing, and the suffixes of a.csv"),
    Bad("no-suffix", "data: {train: adult.data}", "data.source: is missing, and 'adult.data' has no suffix"),
    Bad("no-max-length", "data: {sequences: {seen: {ids: {a: b}}}}", "seen.max_length: is missing; allowed: a whole"),
    Bad("max-length-0", "data: {sequences: {seen: {ids: {a: b}, max_length: 0}}}", "a whole number from 1 to 65,536"),
    Bad("no-ids", "data: {sequences: {seen: {ids: {}, max_length: 9}}}", "seen.ids: allowed: a list column of ids"),
    Bad("max-length-65537", "data: {sequences: {s: {ids: {a: b}, max_length: 65537}}}", "from 1 to 65,536"),
    Bad("import-of-nothing", "data: {source: ':f'}", "data.source"),
    Bad("import-of-a-relative", "model: '..a:F'", "model.name"),
    Bad(
        "synthetic-beside-files",
        "data: {train: a.csv, synthetic: {zipf: 1.05}}",
        "data.synthetic: has no effect beside",
    ),
    Bad("synthetic-override", "data: {train: a.csv}", "synthetic: has no effect", ("data.synthetic.num_dense=3",)),
    # labels
    Bad("one-of-several", "data: {train: a.csv, labels: [a]}", "data.labels: has one label; allowed: two or more"),
    Bad("label-twice", "data: {train: a.csv, labels: [a, b, a]}", "data.labels: names a twice"),
    Bad("label-and-labels", "data: {train: a.csv, label: c, labels: [a, b]}", "data.label: is there beside labels"),
    Bad("after-unknown", _labels("{column: bought, after: cliked}"), "bought: after: cliked is no label; did you mean"),
    Bad("given-unknown", _labels("{column: bought, given: zzz}"), "given: zzz is no label; the labels are clicked"),
    Bad("after-itself", _labels("{column: bought, after: bought}"), "after: bought is the label itself"),
    Bad("after-later", _labels("{column: bought, after: x}", "x"), "bought: after: x comes later in the list"),
    Bad(
        "after-in-a-circle",
        _labels("{column: a, after: b}", "{column: b, after: a}"),
        "data.labels: a: after: b comes later in the list",
    ),
    Bad("after-a-number", _labels("{column: s, loss: mse}", "{column: b, after: s}"), "b: after: s is a number"),
    Bad("after-of-a-number", _labels("{column: s, loss: mse, after: clicked}"), "after: clicked with loss: mse"),
    Bad(
        "after-with-given", _labels("{column: b, after: clicked, given: clicked}"), "given: clicked and after: clicked"
    ),
    Bad("number-with-bce", _labels("{column: s, kind: number, loss: bce}"), "kind: number with loss: bce"),
    Bad("skip-later", _labels("{column: b, missing: skip}"), "b: missing: skip leaves the row out for all labels"),
    Bad("weight-zero", _labels("{column: b, weight: 0}"), "data.labels.1.weight: 0"),
    Bad("loss-of-several", _labels("b") + "\ntrain: {loss: mse}", "train.loss: mse with data.labels"),
    Bad(
        "lr-of-several",
        _labels("b") + "\nmodel: lr",
        "model.name: lr predicts one label; allowed with data.labels: dnn",
    ),
    Bad(
        "metric-of-no-label",
        _labels("b") + "\ntrain: {early_stopping: {}}",
        "early_stopping.metric: auc is not evaluated; allowed: auc/clicked, auc/b",
    ),
    Bad(
        "plateau-of-no-label",
        _labels("{column: s, loss: mse}") + "\ntrain: {plateau: {metric: auc/s}}",
        "plateau.metric: auc/s is not evaluated; allowed: auc/clicked",
    ),
    # settings
    Bad("below-text", "name: job", "--set name.first=1: name holds 'job', which has no keys", ("name.first=1",)),
    Bad("setting-without-value", "name: job", "--set seed: is not of the form a.b=value", ("seed",)),
    Bad("nothing", "name: job", "--set train.batch_size=: train.batch_size: an empty value", ("train.batch_size=",)),
    Bad("stale-sync", "consistency: sync", "--set consistency.staleness=2", ("consistency.staleness=2",)),
    # retrieval
    Bad(
        "loss-of-retrieval",
        f"{_TOWERS}\ntrain: {{loss: bce}}",
        "train.loss: bce with model.name: two_tower",
    ),
    Bad(
        "loss-of-no-retrieval",
        "train: {loss: sampled_softmax}",
        "sampled_softmax with model.name: dlrm; allowed",
    ),
    Bad(
        "loss-of-a-label",
        _labels("{column: b, loss: sampled_softmax}"),
        "data.labels.1.loss: sampled_softmax",
    ),
    Bad(
        "labels-of-retrieval",
        f"{_labels('b')}\n{_TOWERS}",
        "data.labels: with model.name: two_tower",
    ),
    Bad("compiled-retrieval", f"{_TOWERS}\ntower: {{compile: on}}", "tower.compile: on with model.name: two_tower"),
    Bad("retrieval-in-time", f"{_TOWERS}\ntrain: {{order: time}}", "train.order: time with model.name: two_tower"),
    Bad(
        "number-of-retrieval",
        f"{_TOWERS}\ndata: {{train: a.csv, label: {{column: b, kind: number}}}}",
        "data.label.kind: number with model.name: two_tower, whose label is 0 or 1",
    ),
    Bad(
        "split-and-eval",
        f"{_SPLIT}, split: user, eval: b.csv}}",
        "split: is there beside eval; leave one of the two out",
    ),
    Bad("split-and-test", f"{_SPLIT}, split: user, test: b.csv}}", "split: is there beside test"),
    Bad("split-and-fraction", f"{_SPLIT}, split: user, eval_fraction: 0.1}}", "split: is there beside eval_fraction"),
    Bad(
        "split-of-all",
        f"{_SPLIT}, split: {{by: user, eval: 0.5, test: 0.5}}}}",
        "eval: 0.5 and test: 0.5; allowed: a sum",
    ),
    Bad("split-of-none", f"{_SPLIT}, split: {{by: user, eval: 0, test: 0}}}}", "eval: 0 and test: 0; allowed: a sum"),
    Bad("split-above-one", f"{_SPLIT}, split: {{by: user, eval: 1.5}}}}", "data.split.eval: 1.5"),
    Bad("split-below-zero", f"{_SPLIT}, split: {{by: user, test: -0.1}}}}", "data.split.test: -0.1"),
    Bad("split-without-time", f"{_SPLIT}, split: time}}", "split.by: time needs data.time"),
    Bad("split-by-nothing", f"{_SPLIT}, split: {{eval: 0.1}}}}", "data.split.by: is missing"),
    Bad("split-by-users-with-time", f"{_SPLIT}, split: user, time: ts}}", "data.time: has no effect with train.order"),
    Bad(
        "split-without-model",
        f"{_SPLIT}, split: user}}\ncheckpoint: {{every_steps: off}}",
        "no model for data.split.test",
    ),
)

"""A model that begins with the values of a model of other columns: its first outputs are those of before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardkeep.assembly.model import build_dense_model, row_spec
from shardkeep.config import JobConfig
from shardkeep.workers.data.schema import Feature, Schema, SequenceColumns
from shardkeep.workers.data.sides import sides_of_model
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.embeddings.sequence import Sequence
from shardkeep.workers.models.layers.axes import Match, changes, matches
from shardkeep.workers.models.registry import adds_rows
from tests.support.cases import every

LENGTHS = torch.tensor([3, 0, 1, 2, 4, 4])


def schema_of(dense: str, features: str, *groups: tuple[str, str, str], labels: str = "y") -> Schema:
    found = tuple(Feature(name, name) for name in features.split())
    lists = tuple(
        SequenceColumns(name, tuple(Feature(i, i[0], "none") for i in ids.split()), tuple(numbers.split()), 4)
        for name, ids, numbers in groups
    )
    return Schema(tuple(dense.split()), found, tuple(labels.split()), lists)


OLD, MORE = (
    schema_of("p q", "a b.x", ("h", "a1", "n")),
    schema_of("o p r q", "c a d b.x", ("g", "c1", ""), ("h", "d1 a1", "m n")),
)
PLAIN, PLAIN_MORE = schema_of("p q", "a b.x"), schema_of("o p r q", "c a d b.x")
MLP: dict[str, Any] = {"hidden": [7, 5]}
RANKED = [
    {"name": "lr"}, {"name": "fm"},
    *({"name": name, **MLP} for name in ("dnn", "wide_deep", "deepfm", "masknet", "finalmlp")),
    {"name": "xdeepfm", "cin": [3, 2], **MLP}, {"name": "dlrm", "bottom": [6], **MLP}, {"name": "dlrm", "hidden": []},
    {"name": "dcn_v2", "cross_rank": 2, **MLP}, {"name": "dcn_v2", "structure": "parallel", **MLP},
    *({"name": "fibinet", "bilinear": kind, "reduction": 2, **MLP} for kind in ("all", "each", "interaction")),
    {"name": "masknet", "structure": "parallel", **MLP}, {"name": "finalmlp", "gates": {"first": ["a"]}, **MLP},
    {"name": "deepfm", "norm": "batch", "activation": "dice", **MLP},
]  # fmt: skip
SEVERAL: list[dict[str, Any]] = [{"name": "mmoe", "experts": 2, **MLP}, {"name": "ple", **MLP}]


def job(model: dict[str, Any], schema: Schema, new: tuple[str, ...] = ("c", "d")) -> JobConfig:
    zeros = adds_rows(model["name"], schema.num_dense) or model["name"] == "dnn"  # whose weights must not be 0 as well
    tables: dict[str, Any] = {} if model["name"] == "lr" else {"default": {"dim": 4}, "b.x": {"dim": 6}}
    return JobConfig.model_validate(
        {"model": model, "tables": tables | {name: {"init": "zeros"} for name in new if zeros}}
    )


def users_of(config: JobConfig, schema: Schema) -> Schema:
    return schema if config.items is None else sides_of_model(config.items, schema).users


def embeddings(config: JobConfig, schema: Schema) -> Embeddings:
    return Embeddings(users_of(config, schema), {name: row_spec(config, name) for name in schema.tables()})


def carried(
    config: JobConfig, before: JobConfig, old: Schema, new: Schema
) -> tuple[list[Any], dict[str, Match | None]]:
    """Models of both schemas, the second with the values of the first, and where it had them."""
    layouts, models = [], []
    for each, schema in ((before, old), (config, new)):
        with torch.device("meta"):
            layouts.append(build_dense_model(each, schema, embeddings(each, schema)))
        models.append(build_dense_model(each, schema, embeddings(each, schema)).eval())
        for tensor in models[-1].state_dict().values():
            tensor.uniform_(0.1, 0.6)
    silent = {c.name for c in new.looked_up if row_spec(config, c.table).init.name == "zeros"}
    found = matches(*layouts, silent)
    theirs, own = (model.state_dict() for model in models)
    models[1].load_state_dict(
        own | {name: each.moved(theirs[each.name], own[name]) for name, each in found.items() if each is not None}
    )
    return models, found


def inputs_of(config: JobConfig, schema: Schema) -> tuple[torch.Tensor, dict[str, Any]]:
    """Six samples, whose columns have the same values under any schema; the rows of tables that begin at 0 are 0."""

    def drawn(name: str, rows: int, width: int) -> torch.Tensor:
        return torch.randn(rows, width, generator=torch.Generator().manual_seed(sum(map(ord, name))))

    def rows(column: Feature, count: int) -> torch.Tensor:
        spec = row_spec(config, column.table)
        return (drawn(column.name, count, spec.dim) * (spec.init.name != "zeros")).requires_grad_()

    inputs: dict[str, Any] = {feature.name: rows(feature, 6) for feature in schema.features}
    for group in schema.sequences:
        count = int(LENGTHS.sum())
        numbers = torch.cat([torch.empty(count, 0), *(drawn(name, count, 1) for name in group.numbers)], 1)
        inputs[group.name] = Sequence({c.name: rows(c, count) for c in group.ids}, numbers, LENGTHS, group.max_length)
    return torch.cat([torch.empty(6, 0), *(drawn(name, 6, 1) for name in schema.dense)], 1), inputs


def first_outputs(
    model: dict[str, Any], old: Schema, new: Schema, before: dict[str, Any] | None = None
) -> tuple[list[Any], list[torch.Tensor], list[tuple[torch.Tensor, dict[str, Any]]], dict[str, Match | None]]:
    """Both models, their outputs and inputs, and where the second found its values."""
    torch.manual_seed(0)
    config, before = job(model, new), before or model
    models, found = carried(config, job(before, old, ()), old, new)
    inputs = [inputs_of(config, users_of(job(each, schema), schema)) for each, schema in ((before, old), (model, new))]
    return models, [each(*columns) for each, columns in zip(models, inputs, strict=True)], inputs, found


def check_first_scores(model: dict[str, Any], *, sequences: bool) -> None:
    """New columns change no first score and learn."""
    old, new = (OLD, MORE) if sequences else (PLAIN, PLAIN_MORE)
    if model in SEVERAL:
        old, new = (replace(schema, labels=("y", "z")) for schema in (old, new))
    encoder = {"encoder": {"name": "din", "hidden": [3], "target": {"a1": "a"}}}
    models, (before, after), inputs, found = first_outputs(
        model | (encoder if sequences and "hidden" in model else {}), old, new
    )
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    assert None not in found.values()
    after.square().sum().backward()
    dense, leaves = inputs[1]
    rows = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    with torch.no_grad():
        for value in (*models[1].parameters(), *rows.values()):
            value -= 1e-3 * value.grad.sign() if value.grad is not None else 0.0
        trained = models[1](dense, leaves)
        for name in ("c", "d"):
            assert not torch.equal(trained, models[1](dense, leaves | {name: rows[name] + 1.0})), name
        for column in (0, 2):
            assert not torch.equal(trained, models[1](dense + torch.eye(4)[column], leaves)), new.dense[column]


@every(
    ("model", "new", "says"),
    [
        ({"name": "fibinet", "reduction": 2, **MLP}, schema_of("q p", "b.x a"), "Bilinear multiplies columns in"),
        ({"name": "fibinet", "reduction": 2, **MLP}, PLAIN_MORE, ""),
        ({"name": "masknet", **MLP}, schema_of("q p", "b.x a"), ""),
        ({"name": "autoint"}, PLAIN_MORE, "Attention weighs all columns"),
    ],
)
def test_scores_that_change_at_first_have_a_line(model: dict[str, Any], new: Schema, says: str) -> None:
    models, (before, after), _, found = first_outputs(model, PLAIN, new)
    lines = changes(models[1], found)
    assert torch.allclose(before, after, rtol=1e-4, atol=1e-4) == (not says)
    assert len(lines) == bool(says) and all(line.startswith(says) for line in lines)


@every("model", RANKED[7:11])
def test_new_columns_change_no_first_score_and_learn(model: dict[str, Any]) -> None:
    check_first_scores(model, sequences=True)


@pytest.mark.slow
@every("sequences", [False, True])
@every("model", [*RANKED, *SEVERAL])
def test_new_columns_change_no_first_score_of_any_model_and_learn(model: dict[str, Any], sequences: bool) -> None:
    check_first_scores(model, sequences=sequences)


@every(
    ("model", "old", "new", "before"),
    [
        ({"name": "two_tower", "item": ["a", "i", "q"], **MLP}, schema_of("p q", "a b"), schema_of("p o q", "u a i b"),
         {"name": "two_tower", "item": ["a", "q"], **MLP}),
        *(
            ({"name": name, "item": ["a"]}, *(schema_of("", "a", ("h", *each))
             for each in (("a1", "n"), ("a1 c1", "m n"))), None) for name in ("sasrec", "hstu")
        ),
    ],
)  # fmt: skip
def test_new_columns_change_no_first_vector_of_a_user(
    model: dict[str, Any], old: Schema, new: Schema, before: dict[str, Any] | None
) -> None:
    _, (users, same), _, found = first_outputs(model, old, new, before)
    torch.testing.assert_close(same, users, rtol=1e-4, atol=1e-4)
    assert None not in found.values()


@every(
    ("model", "old", "new", "tensors"),
    [
        ({"name": "dnn", "encoder": {"name": "transformer", "target": {"a1": "a"}}}, OLD, MORE, ["encoders.1"]),
        ({"name": "dlrm"}, schema_of("", "a b.x"), PLAIN, ["bottom"]),
    ],
)
def test_what_takes_all_columns_together_begins_new_by_name(
    model: dict[str, Any], old: Schema, new: Schema, tensors: list[str]
) -> None:
    _, _, _, found = first_outputs(model, old, new)
    assert {
        ".".join(name.split(".")[: tensors[0].count(".") + 1]) for name, each in found.items() if each is None
    } == set(tensors)

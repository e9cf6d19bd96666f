"""Stock models over sequences: every model and encoder, what a column's vector stands for, targets, and refusals."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

from shardkeep.assembly.model import build_dense_model
from shardkeep.base.errors import ConfigError, UserError
from shardkeep.base.yaml_text import write_yaml
from shardkeep.config import JobConfig, parse_config
from shardkeep.ps.config import TableSpec
from shardkeep.workers.data.schema import Feature, Schema, SequenceColumns
from shardkeep.workers.dense import onednn
from shardkeep.workers.dense.compile import Switch, why_no_compiler
from shardkeep.workers.dense.products import Products
from shardkeep.workers.embeddings.inputs import leaves_of, pad_rows, padded
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.embeddings.sequence import Sequence, SequenceShape
from shardkeep.workers.encoder_config import targets_of
from shardkeep.workers.model_config import MODELS, keys_of
from shardkeep.workers.models.registry import build_model, row_dim, start_at
from tests.support.cases import every
from tests.support.towers import CPU, RANKING, model_config

LONGEST = 17
LENGTHS = (0, 1, 15, 16, 17, 3)
FEATURES = {"user": 4, "item": 8, "category": 4}
COLUMNS = {"seen_item": "item", "seen_category": "category"}
ENCODERS = ("mean", "din", "transformer", "hstu")
WITH_ENCODER = [name for name in RANKING if "encoder" in keys_of(name) and MODELS[name].config().encoder is None]


def schema_of(*, numbers=2, features=FEATURES):
    """A group `seen` whose columns share the tables of two features."""
    ids = tuple(Feature(column, table, "none") for column, table in COLUMNS.items())
    group = SequenceColumns("seen", ids, tuple(f"number{n}" for n in range(numbers)), LONGEST)
    return Schema(("price", "age"), tuple(Feature(name, name) for name in features), sequences=(group,))


def dims_of(name):
    return {table: row_dim(name, dim) for table, dim in FEATURES.items()}


def sequence_model(name="dnn", *, numbers=2, **settings):
    settings = ({"hidden": [8]} if name not in ("lr", "fm") else {}) | settings
    config, dims = model_config(name=name, **settings), dims_of(name)
    shape = SequenceShape({column: dims[table] for column, table in COLUMNS.items()}, numbers, LONGEST)
    targets = targets_of(config, schema_of(numbers=numbers))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build_model(
            config, num_dense=2, features=dims, default_dim=4, sequences={"seen": shape}, targets=targets
        )


def inputs_of(lengths=LENGTHS, *, name="dnn", numbers=2):
    drawn, dims, lengths_B = torch.Generator().manual_seed(1), dims_of(name), torch.tensor(lengths, dtype=torch.int64)

    def rows(count, width):
        return torch.randn(count, width, generator=drawn)

    found = {feature: rows(len(lengths), dims[feature]).requires_grad_() for feature in FEATURES}
    ids = {column: rows(sum(lengths), dims[table]).requires_grad_() for column, table in COLUMNS.items()}
    found["seen"] = Sequence(ids, rows(sum(lengths), numbers), lengths_B, LONGEST)
    return rows(len(lengths), 2), found


@every(
    ("name", "settings"),
    [
        *((name, {}) for name in RANKING),
        *((name, {"encoder": ENCODERS[number % 4]}) for number, name in enumerate(WITH_ENCODER)),
    ],
)
def test_gradients_reach_all_parameters_and_rows(name, settings):
    model = sequence_model(name, **settings)
    dense, embeddings = inputs_of(name=name)
    logits = model(dense, embeddings)
    assert logits.shape == (len(LENGTHS), 1)
    logits.square().sum().backward()
    for key, value in [*model.named_parameters(), *enumerate(leaves_of(embeddings))]:
        assert value.grad is not None and value.grad.abs().sum() > 0, key


@every("encoder", ENCODERS)
@every("lengths", [(0, 0, 0), (1, 1, 1)])
def test_few_entries_give_finite_gradients_to_every_parameter(encoder, lengths):
    model = sequence_model(encoder=encoder, norm="batch")
    model(*inputs_of(lengths)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@every("name", RANKING)
def test_a_column_of_a_sequence_stands_where_a_feature_would_and_a_model_starts_at_a_mean(name):
    model = sequence_model(name, numbers=0, **({"encoder": "mean"} if name in WITH_ENCODER else {})).eval()
    dense, embeddings = inputs_of(name=name, numbers=0)
    features = {key: value for key, value in embeddings.items() if key != "seen"}
    vectors, _ = model.encoders[0](embeddings["seen"], features)
    assert list(vectors) == list(COLUMNS)
    torch.testing.assert_close(model(dense, embeddings), model.model(dense, features | vectors))
    start_at(model, [0.0])
    before = model(dense, embeddings)
    start_at(model, [2.5])
    torch.testing.assert_close(model(dense, embeddings), before + 2.5)


def test_first_order_weights_are_summed_and_the_vector_is_encoded():
    model = sequence_model("deepfm", encoder="mean")
    sequence = inputs_of(name="deepfm")[1]["seen"]
    for column, found in model.encoders[0](sequence, {})[0].items():
        rows = torch.split(sequence.ids[column], list(LENGTHS))
        torch.testing.assert_close(found[:, -1], torch.stack([part[:, -1].sum() for part in rows]))
        means = [part[:, :-1].sum(0) / max(len(part), 1) for part in rows]
        torch.testing.assert_close(found[:, :-1], torch.stack(means))


def test_numbers_that_mean_does_not_take_become_dense_columns():
    model = sequence_model("lr")
    dense, embeddings = inputs_of(name="lr")
    sequence = embeddings["seen"]
    changed = replace(sequence, numbers=sequence.numbers + 1.0)
    difference = model(dense, embeddings | {"seen": changed}) - model(dense, embeddings)
    weight_S = dict(model.named_parameters())["model.first_order.dense_weight_I1"][-2:, 0]
    torch.testing.assert_close(difference, weight_S.sum() * (sequence.lengths > 0)[:, None])


@every("encoder", ENCODERS[1:])
def test_the_target_and_every_number_count(encoder):
    group, (_, embeddings) = sequence_model(encoder={"name": encoder}).encoders[0], inputs_of()
    sequence, features = embeddings["seen"], {name: embeddings[name] for name in FEATURES}
    before = group(sequence, features)[0]["seen_item"]
    for feature in FEATURES:
        after = group(sequence, features | {feature: features[feature] + 1.0})[0]["seen_item"]
        counts = [length > 0 and feature != "user" for length in LENGTHS]
        assert ((before - after).abs().sum(1) > 0).tolist() == counts, feature
    for number in torch.eye(2):
        changed = replace(sequence, numbers=sequence.numbers + number)
        assert not torch.equal(before, group(changed, features)[0]["seen_item"])


@every("encoder", ENCODERS)
def test_a_sample_has_its_bits_beside_any_others_and_beside_padding(encoder):
    """As scoring pads them: samples to a multiple of 16, and entries to one of 32, by samples of zeros."""
    model, lengths = sequence_model(encoder=encoder).eval(), list(range(16))
    with torch.no_grad(), onednn.rows_alone(model):
        dense, embeddings = inputs_of(lengths)
        sequence = embeddings["seen"]
        order = torch.cat(list(reversed(torch.split(torch.arange(120), lengths))))
        ids = {column: rows[order] for column, rows in sequence.ids.items()}
        flipped = Sequence(ids, sequence.numbers[order], sequence.lengths.flip(0), sequence.max_length)
        other = {name: flipped if name == "seen" else value.flip(0) for name, value in embeddings.items()}
        pairs = ((dense, embeddings), (dense.flip(0), other))
        scores, moved = (model(pad_rows(dense_BI, 16), padded(inputs, 16))[:16] for dense_BI, inputs in pairs)
        assert torch.equal(moved.flip(0), scores)


class Own(nn.Module):
    def __init__(self, num_dense, features, sequences):
        super().__init__()
        self.asked = sequences
        self.layer = nn.Linear(sum(sequences["seen"].ids.values()), 1)


def test_a_class_of_the_users_gets_the_sequences_and_names_stand_for_dnn_with_an_encoder(monkeypatch):
    for name, encoder in (("din", "din"), ("bst", "transformer")):
        found = sequence_model(name)(*inputs_of())
        assert torch.equal(found, sequence_model("dnn", encoder=encoder)(*inputs_of()))
    monkeypatch.setattr("tests.support.towers.Own", Own, raising=False)
    seen = SequenceColumns("seen", (Feature("seen_item", "item", "none"),), ("age",), 7)
    schema, config = Schema((), (), sequences=(seen,)), JobConfig(model=model_config(name="tests.support.towers:Own"))
    model = build_dense_model(config, schema, Embeddings(schema, {"item": TableSpec(name="item", dim=4)}))
    assert isinstance(model, Own) and model.asked == {"seen": SequenceShape({"seen_item": 4}, 1, 7)}


@pytest.mark.slow
@every("encoder", ENCODERS)
def test_a_model_becomes_a_program_for_any_number_of_entries(encoder):
    model = sequence_model(encoder=encoder).eval()
    batch, of_entries = torch.export.Dim("batch", min=2), {0: torch.export.Dim.DYNAMIC}
    with torch.no_grad():
        shapes = {name: {0: batch} for name in FEATURES}
        shapes["seen"] = [dict.fromkeys(COLUMNS, of_entries), of_entries, {0: batch}, None]
        program = torch.export.export(model, inputs_of(), dynamic_shapes=({0: batch}, shapes), strict=False)
        for lengths in ((0, 0), (1, 0), (17,) * 60):
            torch.testing.assert_close(program.module()(*inputs_of(lengths)), model(*inputs_of(lengths)))


@pytest.mark.chaos
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor's own imports
@pytest.mark.skipif(why_no_compiler(CPU) is not None, reason="torch.compile cannot run here")
@every("encoder", ["din", "transformer", "hstu"])
def test_a_compiled_encoder_gives_what_the_eager_one_gives(encoder):
    import torch._dynamo.config

    model = sequence_model(encoder=encoder)
    switch = Switch(model, len(LENGTHS))
    torch._dynamo.reset()  # other towers are compiled from the same function
    assert switch.compile_for(inputs_of(), mode="default", context=nullcontext, products=Products(CPU)) is None
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in (LENGTHS, (2, 0, 0, 1, 17, 5)):
            found = []
            for switch.enabled in (True, False):
                dense, embeddings = inputs_of(lengths)
                logits = switch(dense, embeddings)
                trained = [*model.parameters(), *leaves_of(embeddings)]
                found.append([logits, *torch.autograd.grad(logits.square().sum(), trained)])
            torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


# Which features a history is compared with, and what does not fit the data or the model.


def schema(*features, columns="item"):
    """The features that are named, `name` or `name:table`, and a list with columns of some tables."""
    parts = [each.partition(":") for each in features]
    group = SequenceColumns("seen", tuple(Feature(f"seen_{t}", t, "none") for t in columns.split()), (), 5)
    found = tuple(Feature(name, table or name) for name, _, table in parts)
    return Schema((), found, sequences=(group,) if columns else ())


def test_a_column_is_compared_with_the_feature_of_its_table_or_the_one_that_is_named():
    found = targets_of(model_config("din"), schema_of())
    assert found == {"seen": {"seen_item": "item", "seen_category": "category"}}
    assert targets_of(model_config("dnn"), schema_of()) == targets_of(model_config("lr"), schema_of()) == {"seen": {}}
    assert targets_of(model_config("dnn", encoder="hstu"), schema_of(features=["user"])) == {"seen": {}}
    beside = schema("item", columns="item action")
    assert targets_of(model_config("din"), beside) == {"seen": {"seen_item": "item"}}, "action has no target"
    named = model_config("dnn", encoder={"name": "din", "target": {"seen_item": "basket"}})
    assert targets_of(named, schema("item", "basket:item")) == {"seen": {"seen_item": "basket"}}
    weighted = replace(beside, features=(Feature("item", "item"), Feature("basket", "item", "weighted")))
    assert targets_of(model_config("din"), weighted) == {"seen": {"seen_item": "item"}}


@every(
    ("name", "settings", "data", "said"),
    [
        ("din", {}, schema("item", "basket:item"), "target: features item, basket share table item with seen_item"),
        ("din", {}, schema("user"), "din compares the entries of seen with a feature, and no feature has table item"),
        (
            "hstu",
            {"target": {"seen_itm": "item"}},
            schema("item"),
            "seen_itm is no column of a sequence; allowed: seen",
        ),
        ("din", {"target": {"seen_item": "user"}}, schema("item", "user"), "seen_item: user is no feature of table"),
        ("mean", {}, schema("item", columns=""), "mean has no effect: the data has no sequences"),
    ],
)
def test_an_encoder_that_does_not_fit_the_data_is_refused_in_one_line(name, settings, data, said):
    with pytest.raises(ConfigError) as refused:
        targets_of(model_config("dnn", encoder={"name": name, **settings}), data)
    text = str(refused.value)
    assert text.startswith("model.encoder") and said in text and "\n" not in text


@every(
    ("settings", "said"),
    [
        ({"name": "lr", "encoder": "din"}, "model.encoder: unknown key with name: lr; known keys: name"),
        ({"name": "dnn", "encoder": {}}, "model.encoder.name: is missing; allowed: din, hstu, mean or transformer"),
        ({"name": "dnn", "encoder": "dinn"}, "allowed: din, hstu, mean or transformer"),
        ({"name": "dnn", "encoder": {"name": "mean", "heads": 2}}, "model.encoder.heads: unknown key"),
        ({"name": "din", "encoder": {"name": "hstu"}}, "'hstu' is not allowed; allowed: din"),
    ],
)
def test_a_setting_that_no_encoder_takes_is_refused_by_name(settings, said):
    with pytest.raises(ConfigError) as refused:
        parse_config(write_yaml({"model": settings}))
    assert said in str(refused.value) and "\n" not in str(refused.value)


@every(
    ("encoder", "width", "said"),
    [
        ({"name": "din", "hidden": [10**6, 10**6]}, 8, "model.encoder: a layer from 1,000,000 to 1,000,000 asks for 4"),
        ({"name": "transformer"}, 10**6, "model.encoder: a layer from 1,000,000 to 4,000,000 asks for 16"),
        ({"name": "transformer", "heads": 4}, 6, "model.encoder.heads: 4 does not divide 6, the values of the rows of"),
        ({"name": "hstu", "heads": 4}, 6, "model.encoder.heads: 4 does not divide 6, the values of the rows of an ent"),
    ],
)
def test_an_encoder_that_cannot_be_built_is_refused(encoder, width, said):
    config, shape = model_config("dnn", encoder=encoder), SequenceShape({"seen_item": width}, 0, 5)
    with pytest.raises(UserError, match=f"^{said}"):
        build_model(config, num_dense=1, features={}, default_dim=4, sequences={"seen": shape})


def test_a_config_without_an_encoder_is_written_as_before_and_the_name_may_change_to_one_with_another():
    assert "encoder" not in model_config().model_dump() and "encoder" not in parse_config("model: dnn").to_yaml()
    config = parse_config("model: {name: dnn, encoder: {name: din, hidden: [3]}}")
    assert parse_config(config.to_yaml()) == config and config.model.encoder.hidden == [3]
    before = "model: {name: dnn, hidden: [4], encoder: {name: hstu, layers: 1}}"
    for text, change, encoder in (
        (before, "name=dlrm", "hstu"),
        (before, "name=din", "din"),
        ("model: dnn", "encoder=din", "din"),
    ):
        assert parse_config(text, [f"model.{change}"]).model.encoder.name == encoder

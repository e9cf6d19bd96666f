"""Stock models over sequences: every model and encoder, what a column's vector stands for, and what has no effect."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from shardkeep.assembly.model import build_dense_model
from shardkeep.base.errors import UserError
from shardkeep.config import JobConfig
from shardkeep.ps.config import TableSpec
from shardkeep.workers.data.schema import Feature, Schema, SequenceColumns
from shardkeep.workers.dense import onednn
from shardkeep.workers.dense.compile import Switch, why_no_compiler
from shardkeep.workers.dense.products import Products
from shardkeep.workers.embeddings.inputs import pad_rows, padded
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.embeddings.sequence import Sequence, SequenceShape
from shardkeep.workers.model_config import MODELS, keys_of
from shardkeep.workers.models.encoders.encoded import Encoded
from shardkeep.workers.models.registry import build_model, start_at
from tests.support.cases import every
from tests.support.sequences import COLUMNS, LENGTHS, inputs_of, leaves_of, schema_of, sequence_model
from tests.support.towers import RANKING, model_config

ENCODERS = ("mean", "din", "transformer", "hstu")
WITH_ENCODER = [name for name in RANKING if "encoder" in keys_of(name) and MODELS[name].config().encoder is None]  # type: ignore[attr-defined]
CASES = [(name, {}) for name in RANKING] + [(name, {"encoder": e}) for name in WITH_ENCODER for e in ENCODERS]


@every(("name", "settings"), CASES)
def test_gradients_reach_all_parameters_and_rows(name: str, settings: dict[str, Any]) -> None:
    model = sequence_model(name, **settings)
    dense, embeddings = inputs_of(name=name)
    logits = model(dense, embeddings)
    assert logits.shape == (len(LENGTHS), 1)
    logits.square().sum().backward()
    for key, value in [*model.named_parameters(), *leaves_of(embeddings).items()]:
        assert value.grad is not None and value.grad.abs().sum() > 0, key


@every("encoder", ENCODERS)
def test_few_entries_give_finite_gradients_to_every_parameter(encoder: str) -> None:
    for lengths in ((0, 0, 0), (1, 1, 1)):
        model = sequence_model(encoder=encoder, hidden=[8], norm="batch")
        dense, embeddings = inputs_of(lengths)
        model(dense, embeddings).square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def parts_of(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The stock model and the encoder of the group."""
    assert isinstance(model, Encoded)
    return model.model, model.encoders[0]


@every("name", RANKING)
def test_a_column_of_a_sequence_stands_where_a_feature_would(name: str) -> None:
    settings = {"encoder": "mean"} if name in WITH_ENCODER else {}
    model = sequence_model(name, schema=schema_of(numbers=0), **settings).eval()
    dense, embeddings = inputs_of(name=name, schema=schema_of(numbers=0))
    stock, encoder = parts_of(model)
    features = {key: value for key, value in embeddings.items() if key != "seen"}
    vectors, _ = encoder(embeddings["seen"], features)
    assert list(vectors) == list(COLUMNS)
    torch.testing.assert_close(model(dense, embeddings), stock(dense, features | vectors))


def test_first_order_weights_are_summed_and_the_vector_is_encoded() -> None:
    model = sequence_model("deepfm", encoder="mean")
    _, embeddings = inputs_of(name="deepfm")
    (vectors, _), sequence = parts_of(model)[1](embeddings["seen"], {}), embeddings["seen"]
    for column, found in vectors.items():
        rows = torch.split(sequence.ids[column], list(LENGTHS))
        torch.testing.assert_close(found[:, -1], torch.stack([part[:, -1].sum() for part in rows]))
        means = [part[:, :-1].sum(0) / max(len(part), 1) for part in rows]
        torch.testing.assert_close(found[:, :-1], torch.stack(means))


def test_numbers_that_mean_does_not_take_become_dense_columns() -> None:
    model = sequence_model("lr")
    dense, embeddings = inputs_of(name="lr")
    before = model(dense, embeddings)
    sequence = embeddings["seen"]
    changed = Sequence(sequence.ids, sequence.numbers + 1.0, sequence.lengths, sequence.max_length)
    after = model(dense, embeddings | {"seen": changed})
    weight_S = dict(model.named_parameters())["model.first_order.dense_weight_I1"][-2:, 0]
    torch.testing.assert_close(after - before, weight_S.sum() * (sequence.lengths > 0)[:, None])


@every("encoder", ENCODERS[1:])
def test_the_target_and_every_number_count(encoder: str) -> None:
    model = sequence_model(encoder={"name": encoder})
    _, embeddings = inputs_of()
    group, sequence = parts_of(model)[1], embeddings["seen"]
    features = {name: value for name, value in embeddings.items() if name != "seen"}
    before = group(sequence, features)[0]["seen_item"]
    for feature in ("item", "category"):
        after = group(sequence, features | {feature: features[feature] + 1.0})[0]["seen_item"]
        assert ((before - after).abs().sum(1) > 0).tolist() == [length > 0 for length in LENGTHS], feature
    after = group(sequence, features | {"user": features["user"] + 1.0})[0]["seen_item"]
    assert torch.equal(before, after)
    for number in range(2):
        numbers = sequence.numbers.clone()
        numbers[:, number] += 1.0
        changed = Sequence(sequence.ids, numbers, sequence.lengths, sequence.max_length)
        assert not torch.equal(before, group(changed, features)[0]["seen_item"])


@every("encoder", ENCODERS)
def test_a_sample_has_its_bits_beside_any_others_and_beside_padding(encoder: str) -> None:
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


@every("name", ["dnn", "fm", "lr", "finalmlp"])
def test_a_model_over_sequences_starts_at_a_mean(name: str) -> None:
    model, (dense, embeddings) = sequence_model(name).eval(), inputs_of(name=name)
    start_at(model, [0.0])
    before = model(dense, embeddings)
    start_at(model, [2.5])
    torch.testing.assert_close(model(dense, embeddings), before + 2.5)


class Own(nn.Module):
    def __init__(self, num_dense: int, features: dict[str, int], sequences: dict[str, SequenceShape]) -> None:
        super().__init__()
        self.asked = sequences
        self.layer = nn.Linear(sum(sequences["seen"].ids.values()), 1)


def test_a_class_of_the_users_gets_the_sequences_and_names_stand_for_dnn_with_an_encoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, encoder in (("din", "din"), ("bst", "transformer")):
        dense, embeddings = inputs_of()
        found = sequence_model(name)(dense, embeddings)
        assert torch.equal(found, sequence_model("dnn", encoder=encoder)(dense, embeddings))
    monkeypatch.setattr("tests.support.towers.Own", Own, raising=False)
    seen = SequenceColumns("seen", (Feature("seen_item", "item", "none"),), ("age",), 7)
    schema, config = Schema((), (), sequences=(seen,)), JobConfig(model=model_config(name="tests.support.towers:Own"))
    model = build_dense_model(config, schema, Embeddings(schema, {"item": TableSpec(name="item", dim=4)}))
    assert isinstance(model, Own) and model.asked == {"seen": SequenceShape({"seen_item": 4}, 1, 7)}


@pytest.mark.slow
@every("encoder", ENCODERS)
def test_a_model_becomes_a_program_for_any_number_of_entries(encoder: str) -> None:
    model = sequence_model(encoder=encoder).eval()
    batch, any_number = torch.export.Dim("batch", min=2), torch.export.Dim.DYNAMIC
    with torch.no_grad():
        dense, embeddings = inputs_of()
        shapes = {name: {0: batch} for name in embeddings if name != "seen"}
        of_entries = {0: any_number}
        shapes["seen"] = [dict.fromkeys(COLUMNS, of_entries), of_entries, {0: batch}, None]  # type: ignore[assignment]
        program = torch.export.export(model, (dense, embeddings), dynamic_shapes=({0: batch}, shapes), strict=False)
        for lengths in ((0, 0), (1, 0), (17,) * 60):
            dense, embeddings = inputs_of(lengths)
            torch.testing.assert_close(program.module()(dense, embeddings), model(dense, embeddings))


@every(
    ("encoder", "width", "said"),
    [
        ({"name": "din", "hidden": [10**6, 10**6]}, 8, "model.encoder: a layer from 1,000,000 to 1,000,000 asks for 4"),
        ({"name": "transformer"}, 10**6, "model.encoder: a layer from 1,000,000 to 4,000,000 asks for 16"),
    ],
)
def test_an_encoder_beyond_the_machines_memory_is_refused(encoder: dict[str, Any], width: int, said: str) -> None:
    config, shape = model_config("dnn", encoder=encoder), SequenceShape({"seen_item": width}, 0, 5)
    with pytest.raises(UserError, match=said):
        build_model(config, num_dense=1, features={}, default_dim=4, sequences={"seen": shape})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor's own imports
@pytest.mark.skipif(why_no_compiler(torch.device("cpu")) is not None, reason="torch.compile cannot run here")
@every("encoder", ["din", "transformer", "hstu"])
def test_a_compiled_encoder_gives_what_the_eager_one_gives(encoder: str) -> None:
    import torch._dynamo.config

    model = sequence_model(encoder=encoder)
    switch = Switch(model, len(LENGTHS))
    torch._dynamo.reset()  # other towers are compiled from the same function
    products = Products(torch.device("cpu"))
    assert switch.compile_for(inputs_of(), mode="default", context=nullcontext, products=products) is None
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in (LENGTHS, (2, 0, 0, 1, 17, 5)):
            found = []
            for switch.enabled in (True, False):
                dense, embeddings = inputs_of(lengths)
                logits = switch(dense, embeddings)
                trained = [*model.parameters(), *leaves_of(embeddings).values()]
                found.append([logits, *torch.autograd.grad(logits.square().sum(), trained)])
            torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)

"""A sample's logits have the same bits at every place of a block, for every model and odd widths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import JaggedRows
from shardkeep.workers.blocks import BlockScorer
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.schema import Feature, Schema
from shardkeep.workers.dense import onednn
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.model_config import keys_of
from shardkeep.workers.models.registry import build_model
from tests.support.cases import every
from tests.support.towers import RANKING, model_config, tower_of

NUM_DENSE, DIM = 5, 7
SCHEMA = Schema(tuple(f"d{i}" for i in range(NUM_DENSE)), tuple(Feature(n, n) for n in "abc"))


def scorer(model: str, *, size: int, linear: str = "torch") -> tuple[BlockScorer, Embeddings]:
    embeddings = Embeddings(SCHEMA, {name: TableSpec(name=name, dim=DIM) for name in "abc"})
    torch.manual_seed(4)
    config = model_config(model, **({"hidden": [9, 3]} if "hidden" in keys_of(model) else {}))  # odd widths
    built = build_model(config, num_dense=NUM_DENSE, features=embeddings.feature_dims, default_dim=DIM)
    return BlockScorer(embeddings, tower_of(model=built, config={"linear": linear}, sync=False), size), embeddings


def samples(count: int) -> Batch:
    random = np.random.default_rng(1)
    dense_BI = random.normal(size=(count, NUM_DENSE)).astype(np.float32)
    ids = {name: Ragged(random.integers(0, 40, count)) for name in "abc"}
    return Batch(dense_BI, ids, np.zeros((count, 1), np.float32))


def taken(batch: Batch, order: np.ndarray) -> Batch:
    ids = {name: Ragged(np.ascontiguousarray(ragged.values_N[order])) for name, ragged in batch.ids.items()}
    return Batch(np.ascontiguousarray(batch.dense_BI[order]), ids, batch.label_BT[order])


def logits(blocks: BlockScorer, embeddings: Embeddings, batch: Batch) -> np.ndarray:
    plan = embeddings.plan(batch)
    rows = JaggedRows.zeros(plan.unique)
    for name in rows:  # a row depends on its id alone
        rows[name][...] = np.sin(np.outer(plan.unique[name] + 1, np.arange(1, DIM + 1)))
    return blocks.logits(batch, plan, rows)


@pytest.mark.skipif(onednn.why_not(torch.device("cpu")) is not None, reason="needs oneDNN")
@every(
    ("model", "size", "linear"),
    [
        *((name, 17, ("torch", "onednn")[number % 2]) for number, name in enumerate(RANKING)),
        *(("dlrm", size, linear) for size in (1, 100) for linear in ("torch", "onednn")),
    ],
)
def test_a_sample_has_the_same_bits_at_every_place_and_beside_every_other(model: str, size: int, linear: str) -> None:
    blocks, embeddings = scorer(model, size=size, linear=linear)
    batch = samples(size)
    whole = logits(blocks, embeddings, batch)
    assert whole.shape == (size, 1) and (size == 1 or whole.std() > 1e-4)
    order = np.random.default_rng(2).permutation(size)
    assert np.array_equal(logits(blocks, embeddings, taken(batch, order)), whole[order])
    for at in {0, size // 2, size - 1}:
        assert np.array_equal(logits(blocks, embeddings, taken(batch, np.array([at]))), whole[[at]])


def test_a_block_leaves_training_as_it_was_and_takes_1_to_its_size_of_samples() -> None:
    blocks, embeddings = scorer("dlrm", size=20)
    model = blocks.dense.model
    before = [vars(layer).keys() for layer in model.modules()]
    model.train()
    logits(blocks, embeddings, samples(20))
    assert model.training and [vars(layer).keys() for layer in model.modules()] == before
    for count in (0, 21):
        with pytest.raises(ValueError, match=f"{count} samples; allowed: 1 to 20"):
            logits(blocks, embeddings, samples(count))

"""`model.sync_norm`: several ranks normalize as one rank with all samples would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from shardkeep import JobConfig
from shardkeep.workers.collectives.collective import Collective, ThreadCollective
from shardkeep.workers.dense.synced import SyncedLayers
from tests.support.cases import every
from tests.support.ranks import run_ranks
from tests.support.towers import seeded_model, tower_of, train, values_of

SGD = {"optimizer": {"name": "sgd", "lr": 0.3}}  # Adam would enlarge the rounding errors of gradients that are 0
Found = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], bytes]
LAYERS: dict[str, Any] = {
    "batch norm": {"norm": "batch"},
    "dice": {"activation": "dice"},
    "both, recomputed": {"norm": "batch", "activation": "dice", "activation_checkpointing": True},
}


def trained(splits: list[tuple[int, int]], *, steps: int = 2, **layers: Any) -> list[Found]:
    """Parameters, gradients of a feature, running statistics and digest of each rank after some steps."""

    def work(collective: Collective) -> Found:
        tower = tower_of(model=models[collective.rank], collective=collective, config=SGD)
        grads = train(tower, splits, steps=steps)
        start, stop = splits[collective.rank]
        buffers = {name: buffer.clone() for name, buffer in tower.model.named_buffers() if buffer.is_floating_point()}
        return values_of(tower), torch.stack(grads)[:, : stop - start], buffers, tower.digest_bytes()

    models = [seeded_model(sync_norm=True, **layers) for _ in splits]
    return run_ranks(ThreadCollective.group(len(splits)), work)


SPLITS = [
    [(0, 12), (12, 24)], [(0, 20), (20, 24)], [(0, 0), (0, 24)], [(0, 23), (23, 24)], [(0, 9), (9, 9), (9, 24)]
]  # fmt: skip


@every("layers", LAYERS.values(), ids=LAYERS)
def test_ranks_train_as_one_with_all_samples_and_again_with_the_same_bits(layers: dict[str, Any]) -> None:
    (whole,) = trained([(0, 24)], **layers)
    for splits in SPLITS:
        ranks = trained(splits, **layers)
        for rank in ranks:
            torch.testing.assert_close(rank[0], whole[0], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(rank[2], whole[2], rtol=1e-4, atol=1e-6)
            assert rank[3] == ranks[0][3], splits
        torch.testing.assert_close(torch.cat([rank[1] for rank in ranks], dim=1), whole[1], rtol=1e-3, atol=1e-6)
    assert [rank[3] for rank in trained(splits, **layers)] == [rank[3] for rank in ranks]


def test_without_it_ranks_differ_from_one() -> None:
    (whole,), ranks = trained([(0, 24)], norm="batch"), trained([(0, 12), (12, 24)], norm="batch")
    torch.testing.assert_close(ranks[0][0], whole[0], rtol=1e-4, atol=1e-6)

    def alone(collective: Collective) -> torch.Tensor:
        tower = tower_of(model=models[collective.rank], collective=collective, config=SGD)
        train(tower, [(0, 12), (12, 24)])
        return values_of(tower)

    models = [seeded_model(norm="batch") for _ in range(2)]
    assert (run_ranks(ThreadCollective.group(2), alone)[0] - whole[0]).abs().max() > 1e-3


def test_it_is_off_by_default_and_on_for_all_layers() -> None:
    assert not SyncedLayers(seeded_model(norm="batch", activation="dice"))
    assert len(SyncedLayers(seeded_model(norm="batch", activation="dice", sync_norm=True))) == 6


@every(
    ("changes", "text"),
    [
        ({"model": {"sync_norm": True}}, "sync_norm: has no effect; allowed with norm: batch or activation: dice"),
        ({"train": {"accumulate": 2}}, "train.accumulate: 2 with model.sync_norm"),
        ({"tower": {"compile": "on"}}, "tower.compile: on with model.sync_norm; allowed: auto or off"),
    ],
)
def test_what_does_not_go_with_it_is_refused(changes: dict[str, Any], text: str) -> None:
    job = {"data": {"source": "synthetic"}, "model": {"norm": "batch", "sync_norm": True}}
    with pytest.raises(ValidationError) as told:
        JobConfig.model_validate(job | changes)
    assert text in str(told.value)

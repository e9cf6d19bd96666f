"""Collections with feature processors beside plain PyTorch. Needs torchrec (installed as CONTRIBUTING.md says)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shardkeep import EmbeddingClient, SgdConfig
from shardkeep.torchrec import load, save, shard, tables_of, unshard
from tests.support.cases import every
from tests.support.late_import import late_import

torchrec = late_import("torchrec")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LR, ROWS, STEPS = 0.1, 40, 6
FEATURES = {"t0": ["f0", "shared"], "t1": ["shared"]}


class Model(nn.Module):
    """Bags whose ids have trained weights by their position, in one of TorchRec's two forms."""

    def __init__(self, form: str) -> None:
        from torchrec.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
        from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

        super().__init__()
        torch.manual_seed(1)
        configs = [
            torchrec.EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=ROWS, feature_names=features)
            for name, features in FEATURES.items()
        ]
        bags = torchrec.EmbeddingBagCollection(configs, is_weighted=True)
        longest = {"f0": 6, "shared": 6}
        processors: Any = PositionWeightedModuleCollection(longest)
        if form == "dict":
            processors = {name: PositionWeightedModule(max_feature_length=length) for name, length in longest.items()}
        self.bags = FeatureProcessedEmbeddingBagCollection(bags, processors)
        self.top = nn.Linear(24, 1)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        bags = self.bags(batch.sparse_features)
        keys = ("f0", "shared@t0", "shared@t1")  # theirs have another order
        loss = self.top(torch.cat([bags[key] for key in keys], dim=1)).square().mean()
        return loss, loss.detach()


def batches(form: str, steps: int = STEPS) -> Iterator[Any]:
    from torchrec.datasets.utils import Batch

    random = torch.Generator().manual_seed(3)
    keys = ["shared", "f0"] if form == "collection" else ["other", "shared", "f0"]  # a collection takes its own only
    for _ in range(steps):
        lengths = torch.randint(0, 6, (len(keys) * 16,), generator=random)
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=random)
        features = torchrec.KeyedJaggedTensor.from_lengths_sync(keys, values, lengths=lengths)
        yield Batch(torch.zeros(16, 1), features, torch.zeros(16))


def losses_of(model: Any, form: str) -> list[float]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=LR), []
    for batch in batches(form):
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@every(("form", "ahead"), [("dict", False), ("collection", True)])
def test_position_weights_train_as_in_plain_pytorch(form: str, ahead: bool, tmp_path: Any) -> None:
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    plain = Model(form)
    with EmbeddingClient.local(tables_of(plain, optimizer=SgdConfig(lr=LR)), consistency="sync") as client:
        load(plain, client)
        model = shard(Model(form), client)
        names = [name for name, _ in model.named_parameters()]
        assert names and all("_feature_processors" in name or "top" in name for name in names)
        if ahead:
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            pipeline, coming = TrainPipelineSparseDist(model, optimizer, torch.device("cpu")), batches(form)
            found = [pipeline.progress(coming).item() for _ in range(STEPS)]
        else:
            found = losses_of(model, form)
        assert found == pytest.approx(losses_of(plain, form), rel=1e-6) and client.step == STEPS
        expected = plain.state_dict()
        moved = [name for name in expected if "position_weight" in name]
        assert moved and all(not torch.equal(expected[name], torch.ones(6)) for name in moved)
        save(model, tmp_path / "model.pt")
        for state in (torch.load(tmp_path / "model.pt"), unshard(model).state_dict()):
            assert state.keys() == expected.keys()
            for name, weight in expected.items():
                torch.testing.assert_close(state[name], weight, rtol=1e-5, atol=1e-6, msg=name)

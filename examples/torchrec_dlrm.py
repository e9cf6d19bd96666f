"""A TorchRec script in which two lines put the tables on parameter servers. Run it where torchrec is installed:

shardkeep with --servers 2 -- torchrun --nproc-per-node 2 examples/torchrec_dlrm.py
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import shardkeep
from shardkeep.torchrec import shard, tables_of

FEATURES, ROWS, DENSE, BATCH, STEPS = ["user", "item", "tags"], 20_000, 4, 256, 300


def batches(rank: int) -> Iterator[Batch]:
    """Clicks that follow from a hidden value of each id."""
    hidden = torch.randn(len(FEATURES), ROWS, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(rank + 1)
    for _ in range(STEPS):
        lengths = torch.tensor([[1], [1], [5]]).expand(-1, BATCH)
        ids = [(ROWS * torch.rand(int(one.sum()), generator=random) ** 3).long() for one in lengths]
        dense = torch.randn(BATCH, DENSE, generator=random)
        score = dense.sum(1) + sum(h[i].view(BATCH, -1).mean(1) * 2 for h, i in zip(hidden, ids, strict=True))
        features = KeyedJaggedTensor.from_lengths_sync(FEATURES, torch.cat(ids), lengths=lengths.flatten())
        yield Batch(dense, features, (score > 0).long())


dist.init_process_group("gloo")
rank, device = dist.get_rank(), torch.device("cpu")
tables = [
    EmbeddingBagConfig(name=f"t_{name}", embedding_dim=16, num_embeddings=ROWS, feature_names=[name])
    for name in FEATURES
]
model = DLRMTrain(
    DLRM(
        EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        dense_in_features=DENSE,
        dense_arch_layer_sizes=[32, 16],
        over_arch_layer_sizes=[32, 1],
        dense_device=device,
    )
)
apply_optimizer_in_backward(RowWiseAdagrad, model.model.sparse_arch.parameters(), {"lr": 0.1})

client = shardkeep.connect(tables=tables_of(model))  # new
model = shard(model, client)  # new

model = DistributedModelParallel(module=model, device=device)
dense_optimizer = KeyedOptimizerWrapper(
    dict(in_backward_optimizer_filter(model.named_parameters())), lambda params: torch.optim.Adam(params, lr=0.003)
)
pipeline = TrainPipelineSparseDist(model, CombinedOptimizer([model.fused_optimizer, dense_optimizer]), device)
data = batches(rank)
for step in range(STEPS):
    loss, _logits, _labels = pipeline.progress(data)
    if rank == 0 and step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
client.close()
dist.destroy_process_group()

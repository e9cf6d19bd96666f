"""TorchRec: an EmbeddingBagCollection under DistributedModelParallel, tables split among the workers (table-wise) by
TorchRec's own planner, fused row-wise Adagrad, gloo; the tower under the DDP that DistributedModelParallel makes."""

# B = batch, F = features, D = embedding dim

from __future__ import annotations

import logging
import warnings

import torch
import torch.distributed as dist
from data import NUM_FEATURES, ROW_EPS, ROW_LR, ROW_SCALE, TABLE_SIZES, Batch, pool
from groups import form_workers, leave
from measurement import Options, changed, options
from processes import Link, together
from torch import nn
from tower import Tower, loss, optimizer

NAMES = [f"C{f}" for f in range(NUM_FEATURES)]


class Model(nn.Module):
    def __init__(self, dim: int, device: torch.device) -> None:
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=name, embedding_dim=dim, num_embeddings=size, feature_names=[name],
                init_fn=lambda weights: nn.init.uniform_(weights, -ROW_SCALE, ROW_SCALE),
            )
            for name, size in zip(NAMES, TABLE_SIZES, strict=True)
        ]  # fmt: skip
        self.tables = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        self.tower = Tower(dim).to(device)
        self.dim = dim

    def forward(self, dense_BI: torch.Tensor, ids: object) -> torch.Tensor:
        emb_BFD = self.tables(ids).values().view(len(dense_BI), NUM_FEATURES, self.dim)
        return self.tower(dense_BI, emb_BFD)


def parallel(options: Options, device: torch.device) -> nn.Module:
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.types import ShardingEnv, ShardingType
    from torchrec.optim import RowWiseAdagrad

    model = Model(options.dim, device)
    _apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": ROW_LR, "eps": ROW_EPS})
    only = ParameterConstraints(
        sharding_types=[ShardingType.TABLE_WISE.value], compute_kernels=[EmbeddingComputeKernel.FUSED.value]
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=options.workers, compute_device=device.type, local_world_size=options.workers),
        batch_size=options.batch,
        constraints=dict.fromkeys(NAMES, only),
    )
    sharder = EmbeddingBagCollectionSharder()
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    return DistributedModelParallel(
        model, env=ShardingEnv.from_process_group(dist.group.WORLD), device=device, plan=plan, sharders=[sharder]
    )


def keyed(batch: Batch) -> object:
    from torchrec import KeyedJaggedTensor

    ids_FB = batch.ids_FB
    lengths = torch.ones(ids_FB.numel(), dtype=torch.int32, device=ids_FB.device)
    return KeyedJaggedTensor.from_lengths_sync(keys=NAMES, values=ids_FB.flatten(), lengths=lengths)


def rows(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A copy of this rank's rows of the batch."""
    state = model.state_dict()
    parts = []
    for f, name in enumerate(NAMES):
        for shard in state[f"tables.embedding_bags.{name}.weight"].local_shards():
            parts.append(shard.tensor[batch.ids_FB[f].unique()])
    return torch.cat(parts).detach().clone()


def worker(options: Options, link: Link, rank: int) -> None:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    device = torch.device("cuda", rank) if options.device == "cuda" else torch.device("cpu")
    form_workers(link, rank, options.workers, even_alone=True, backend="nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(options.seed)
    batches = pool(options.batch, seed=options.seed + rank, device=str(device))
    ids = [keyed(batch) for batch in batches]
    model = parallel(options, device)
    sgd = optimizer(model.module.tower)

    def train(i: int) -> torch.Tensor:
        batch = batches[i % len(batches)]
        sgd.zero_grad()
        value = loss(model(batch.dense_BI, ids[i % len(ids)]), batch.label_B1)
        value.backward()
        sgd.step()
        return value

    before = rows(model, batches[0])
    figures = link.window(options, rank).run(train)
    if rank == 0:
        link.done(figures, changed(before, rows(model, batches[0])))
    leave()


def main(options: Options) -> None:
    together(
        options,
        {f"worker{r}": (worker, (r,), [options.cores[r % len(options.cores)]]) for r in range(options.workers)},
    )


if __name__ == "__main__":
    main(options(__doc__, workloads=("w1",), max_workers=8))

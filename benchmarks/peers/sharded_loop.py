"""One TorchRec script whose tables TorchRec shards (table-wise, gloo) or shardkeep. Arguments: side, figures, options.

`w1` trains the tower of all opponents over 26 tables; `sequences` reads 200 ids a sample as rows, not pooled, and
trains one matrix over them. Both sides train in TrainPipelineSparseDist, each rank on its own core with one thread.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data import NUM_FEATURES, ROW_EPS, ROW_LR, ROW_SCALE, TABLE_SIZES, pool
from measurement import Options, Window
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from tower import LR, Tower, loss

NAMES = [f"C{f}" for f in range(NUM_FEATURES)]
SEQUENCE, SEQUENCES, ITEMS = 200, 64, 1_000_000
CPU = torch.device("cpu")
SHARDERS: Any = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
BOUNDS = {"weight_init_min": -ROW_SCALE, "weight_init_max": ROW_SCALE}


class Pooled(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=name, embedding_dim=dim, num_embeddings=size, feature_names=[name], **BOUNDS)
            for name, size in zip(NAMES, TABLE_SIZES, strict=True)
        ]
        self.tables = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        self.tower, self.dim = Tower(dim), dim

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        emb_BFD = self.tables(batch.sparse_features).values().view(-1, NUM_FEATURES, self.dim)
        value = loss(self.tower(batch.dense_features, emb_BFD), batch.labels)
        return value, value.detach()


class Sequences(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        config = EmbeddingConfig(name="item", embedding_dim=dim, num_embeddings=ITEMS, feature_names=["item"], **BOUNDS)
        self.tables = EmbeddingCollection(tables=[config], device=torch.device("meta"))
        self.mix, self.dim = nn.Linear(dim, 1), dim

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        rows_ND = self.tables(batch.sparse_features)["item"].values()
        score_B1 = torch.tanh(self.mix(rows_ND)).view(-1, SEQUENCE).mean(1, keepdim=True)
        value = loss(score_B1, batch.labels)
        return value, value.detach()


def batches(options: Options, rank: int) -> list[Batch]:
    if options.workload == "w1":
        found = []
        for one in pool(options.batch, seed=options.seed + rank):
            lengths = torch.ones(one.ids_FB.numel(), dtype=torch.int32)
            features = KeyedJaggedTensor.from_lengths_sync(NAMES, one.ids_FB.flatten(), lengths=lengths)
            found.append(Batch(one.dense_BI, features, one.label_B1))
        return found
    random = torch.Generator().manual_seed(options.seed + rank)
    lengths = torch.full((options.batch,), SEQUENCE, dtype=torch.int32)
    found = []
    for _ in range(64):
        ids = (ITEMS * torch.rand(options.batch * SEQUENCE, generator=random) ** 4).long()  # some come often
        labels = (ids.view(options.batch, -1) % 2).float().mean(1, keepdim=True).round()
        features = KeyedJaggedTensor.from_lengths_sync(["item"], ids, lengths=lengths)
        found.append(Batch(torch.zeros(options.batch, 1), features, labels))
    return found


def by_torchrec(model: nn.Module, batch: int, tables: Sequence[str]) -> nn.Module:
    kernels = [EmbeddingComputeKernel.FUSED.value]
    only = ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE.value], compute_kernels=kernels)
    world = dist.get_world_size()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world, compute_device="cpu", local_world_size=world),
        batch_size=batch,
        constraints=dict.fromkeys(tables, only),
    )
    plan = planner.collective_plan(model, SHARDERS, dist.group.WORLD)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return DistributedModelParallel(model, env=env, device=CPU, plan=plan, sharders=SHARDERS)


def main(side: str, options: Options, output: Path) -> None:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {options.cores[rank]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    model: nn.Module = Pooled(options.dim) if options.workload == "w1" else Sequences(options.dim)
    apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": ROW_LR, "eps": ROW_EPS})
    client = None
    if side == "shardkeep":
        import shardkeep
        from shardkeep.torchrec import shard, tables_of

        client = shardkeep.connect(tables=tables_of(model))
        model = DistributedModelParallel(shard(model, client), device=CPU)
    else:
        model = by_torchrec(model, options.batch, [*NAMES, "item"])
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), lambda p: torch.optim.SGD(p, lr=LR, fused=True)
    )
    pipeline = TrainPipelineSparseDist(model, CombinedOptimizer([model.fused_optimizer, dense]), CPU)
    data: Iterator[Batch] = itertools.cycle(batches(options, rank))
    answer = torch.zeros(1)

    def agree(over: bool) -> bool:
        answer.fill_(float(over))
        dist.broadcast(answer, 0)
        return bool(answer.item())

    figures = Window(options, begin=dist.barrier, end=dist.barrier, agree=agree).run(lambda _: pipeline.progress(data))
    end(figures if rank == 0 else None, output, client)


def end(figures: dict[str, float] | None, output: Path, client: Any) -> None:
    """Writes the figures, which one rank has, and leaves the group. Every rank calls it."""
    if figures is not None:
        output.write_text(json.dumps(figures))
    if client is not None:
        client.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    side, output, given = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    main(side, Options(**given), output)

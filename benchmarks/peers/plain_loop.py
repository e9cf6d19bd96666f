"""W1 as a plain loop over an EmbeddingClient: DDP, and rows ahead. Arguments: figures, options. Run by torchrun."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from data import NUM_FEATURES, ROW_EPS, ROW_LR, ROW_SCALE, Batch, pool
from measurement import Options, Window
from torch.nn.parallel import DistributedDataParallel
from tower import Tower, loss, optimizer

import shardkeep
from shardkeep.workers.embeddings.bags import Bag

NAMES = [f"C{f}" for f in range(NUM_FEATURES)]


def bags_of(batch: Batch) -> dict[str, Bag]:
    lengths = torch.ones(len(batch.dense_BI), dtype=torch.int32)
    return {name: Bag(ids, lengths) for name, ids in zip(NAMES, batch.ids_FB, strict=True)}


def main(output: Path, options: Options) -> None:
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {options.cores[rank]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    tower = DistributedDataParallel(Tower(options.dim))
    dense = optimizer(tower)
    rows = shardkeep.RowwiseAdagradConfig(lr=ROW_LR, eps=ROW_EPS)
    init = {"low": -ROW_SCALE, "high": ROW_SCALE}
    tables = [shardkeep.TableSpec(name=name, dim=options.dim, optimizer=rows, init=init) for name in NAMES]
    answer = torch.zeros(1)

    def agree(over: bool) -> bool:
        answer.fill_(float(over))
        dist.broadcast(answer, 0)
        return bool(answer.item())

    with shardkeep.connect(tables=tables) as client:
        coming = client.ahead(itertools.cycle(pool(options.batch, seed=options.seed + rank)), bags_of, depth=2)

        def step(_: int) -> torch.Tensor:
            batch, looked_up = next(coming)
            emb_BFD = torch.stack([looked_up[name] for name in NAMES], dim=1)
            value = loss(tower(batch.dense_BI, emb_BFD), batch.label_B1)
            dense.zero_grad()
            value.backward()
            dense.step()
            client.apply(looked_up, scale=1 / options.workers)
            return value

        figures = Window(options, begin=dist.barrier, end=dist.barrier, agree=agree).run(step)
    if rank == 0:
        output.write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    output, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    main(output, Options(**given))

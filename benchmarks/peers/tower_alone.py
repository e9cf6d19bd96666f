"""The DLRM tower alone on one core: forward, backward and SGD over embeddings that are ready. No table, no lookup."""

from __future__ import annotations

import torch
from data import NUM_FEATURES, ROW_SCALE, pool
from measurement import Options, options
from processes import alone, pin
from tower import Tower, loss, optimizer


def main(options: Options) -> None:
    pin(options.cores[:1])
    torch.manual_seed(options.seed)
    batches = pool(options.batch, seed=options.seed, device=options.device)
    tower = Tower(options.dim).to(options.device)
    sgd = optimizer(tower)
    shape = (options.batch, NUM_FEATURES, options.dim)
    ready = [torch.empty(shape, device=options.device).uniform_(-ROW_SCALE, ROW_SCALE) for _ in range(8)]
    for emb_BFD in ready:
        emb_BFD.requires_grad_()  # a job with tables needs their gradient

    def step(i: int) -> torch.Tensor:
        batch, emb_BFD = batches[i % len(batches)], ready[i % len(ready)]
        emb_BFD.grad = None
        sgd.zero_grad()
        value = loss(tower(batch.dense_BI, emb_BFD), batch.label_B1)
        value.backward()
        sgd.step()
        return value

    alone(options, step)


if __name__ == "__main__":
    main(options(__doc__, workloads=("w1",)))

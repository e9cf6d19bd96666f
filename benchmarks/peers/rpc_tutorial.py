"""PyTorch's tutorial "Combining DDP with RPC", with sparse gradients: the embeddings are a RemoteModule on a server,
distributed autograd goes back through the RPC, a DistributedOptimizer steps both sides. As published except the
sparse gradient and Adagrad (with its dense gradient the tutorial is four times slower still)."""

# B = batch, F = features, N = B * F, D = embedding dim

from __future__ import annotations

import torch
from data import NUM_FEATURES, NUM_ROWS, ROW_EPS, ROW_LR, ROW_SCALE, pool
from groups import form_rpc, form_workers, leave
from measurement import Options, changed, options
from processes import Link, together
from torch import nn
from torch.distributed import autograd, rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel
from tower import LR, Tower, loss

_embeddings: nn.EmbeddingBag | None = None


def embeddings(dim: int) -> nn.EmbeddingBag:
    """The server's one table, which all workers' RemoteModules share."""
    global _embeddings
    if _embeddings is None:
        _embeddings = nn.EmbeddingBag(NUM_ROWS, dim, mode="sum", sparse=True)
        nn.init.uniform_(_embeddings.weight, -ROW_SCALE, ROW_SCALE)
    return _embeddings


class Shared(nn.Module):
    """What a worker's RemoteModule makes on the server: the one table."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.table = embeddings(dim)

    def forward(self, ids_N: torch.Tensor, starts_N: torch.Tensor) -> torch.Tensor:
        return self.table(ids_N, starts_N)


def rows(ids_U: torch.Tensor) -> torch.Tensor:
    return _embeddings.weight.detach().index_select(0, ids_U)


class Hybrid(nn.Module):
    """Embeddings there, the tower here under DDP."""

    def __init__(self, remote: RemoteModule, options: Options) -> None:
        super().__init__()
        self.remote = remote
        tower = Tower(options.dim).to(options.device)
        self.tower = tower if options.workers == 1 else DistributedDataParallel(tower, gradient_as_bucket_view=True)
        self.shape = (options.batch, NUM_FEATURES, options.dim)
        self.device = options.device

    def forward(self, dense_BI: torch.Tensor, ids_N: torch.Tensor, starts_N: torch.Tensor) -> torch.Tensor:
        emb_BFD = self.remote.forward(ids_N, starts_N).view(self.shape)
        return self.tower(dense_BI, emb_BFD.to(self.device))


def server(options: Options, link: Link) -> None:
    torch.manual_seed(options.seed)
    embeddings(options.dim)
    form_rpc(link, "server", options.workers)
    leave()


def worker(options: Options, link: Link, rank: int) -> None:
    form_workers(link, rank, options.workers)
    form_rpc(link, f"worker{rank}", options.workers, rank=rank + 1)
    batches = pool(options.batch, seed=options.seed + rank)
    starts_N = torch.arange(options.batch * NUM_FEATURES)
    torch.manual_seed(options.seed)
    model = Hybrid(RemoteModule("server", Shared, args=(options.dim,)), options)
    of_rows = DistributedOptimizer(torch.optim.Adagrad, model.remote.remote_parameters(), lr=ROW_LR, eps=ROW_EPS)
    of_tower = DistributedOptimizer(torch.optim.SGD, [rpc.RRef(p) for p in model.tower.parameters()], lr=LR)

    def train(i: int) -> torch.Tensor:
        batch = batches[i % len(batches)]
        dense_BI, label_B1 = batch.dense_BI.to(options.device), batch.label_B1.to(options.device)
        with autograd.context() as context:
            value = loss(model(dense_BI, batch.merged_N, starts_N), label_B1)
            autograd.backward(context, [value])
            of_rows.step(context)
            of_tower.step(context)
        return value

    sample = torch.unique(batches[0].merged_N)
    before = rpc.rpc_sync("server", rows, args=(sample,))
    figures = link.window(options, rank).run(train)
    if rank == 0:
        link.done(figures, changed(before, rpc.rpc_sync("server", rows, args=(sample,))))
    leave()


def main(options: Options) -> None:
    cores = options.cores
    roles = {"server": (server, (), cores[1:2] if options.workers == 1 and len(cores) > 1 else cores)}
    for rank in range(options.workers):
        roles[f"worker{rank}"] = (worker, (rank,), [cores[rank % len(cores)]])
    together(options, roles)


if __name__ == "__main__":
    main(options(__doc__, workloads=("w1",), max_workers=8))

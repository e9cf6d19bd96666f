"""Torch RPC by hand: one server with the merged table, workers that deduplicate, pull one step ahead and push without
waiting. The server does row-wise Adagrad with torch's own operations; several workers train one tower under DDP."""

# B = batch, F = features, N = B * F, U = unique ids, D = embedding dim

from __future__ import annotations

import threading
from collections import deque

import torch
from data import NUM_FEATURES, pool, row_gradients
from groups import form_rpc, form_workers, leave
from measurement import Options, changed, options
from processes import Link, together
from pytorch_merged import Rows
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel
from tower import Tower, loss, optimizer

PUSHES = 2
"""Pushes under way at most: an older one is waited for."""

_rows: Rows | None = None
_applying = threading.Lock()  # two workers' pushes share rows


def pull(unique_U: torch.Tensor) -> torch.Tensor:
    return _rows.weights.index_select(0, unique_U)


def push(unique_U: torch.Tensor, grad_UD: torch.Tensor) -> None:
    with _applying:
        _rows.apply(unique_U, grad_UD)


def server(options: Options, link: Link) -> None:
    global _rows
    torch.manual_seed(options.seed)
    _rows = Rows(options.dim)
    form_rpc(link, "server", options.workers)
    leave()


class Worker:
    """Pulls ahead and pushes behind; `step` is pull and push alone, `train` puts the tower between."""

    def __init__(self, options: Options, rank: int) -> None:
        self.options = options
        self.batches = pool(options.batch, seed=options.seed + rank)
        self.grad_ND = row_gradients(options.batch, options.dim)
        self.pushes: deque[torch.futures.Future] = deque()
        torch.manual_seed(options.seed)
        tower = Tower(options.dim).to(options.device)
        self.tower = tower if options.workers == 1 else DistributedDataParallel(tower, gradient_as_bucket_view=True)
        self.sgd = optimizer(tower)
        self.ahead = self._ask(0)

    def _ask(self, i: int) -> tuple[torch.Tensor, torch.Tensor, torch.futures.Future]:
        unique_U, inverse_N = torch.unique(self.batches[i % len(self.batches)].merged_N, return_inverse=True)
        return unique_U, inverse_N, rpc.rpc_async("server", pull, args=(unique_U,))

    def _push(self, unique_U: torch.Tensor, inverse_N: torch.Tensor, grad_ND: torch.Tensor) -> None:
        grad_UD = torch.zeros(len(unique_U), grad_ND.shape[1]).index_add_(0, inverse_N, grad_ND)
        if len(self.pushes) == PUSHES:
            self.pushes.popleft().wait()
        self.pushes.append(rpc.rpc_async("server", push, args=(unique_U, grad_UD)))

    def pull_push(self, i: int) -> None:
        unique_U, inverse_N, pulled = self.ahead
        self.ahead = self._ask(i + 1)
        pulled.wait().index_select(0, inverse_N)  # what a model would see
        self._push(unique_U, inverse_N, self.grad_ND)

    def train(self, i: int) -> torch.Tensor:
        batch = self.batches[i % len(self.batches)]
        unique_U, inverse_N, pulled = self.ahead
        self.ahead = self._ask(i + 1)
        device = self.options.device
        emb_ND = pulled.wait().index_select(0, inverse_N).to(device).requires_grad_()
        self.sgd.zero_grad()
        logits = self.tower(batch.dense_BI.to(device), emb_ND.view(-1, NUM_FEATURES, self.options.dim))
        value = loss(logits, batch.label_B1.to(device))
        value.backward()
        self.sgd.step()
        self._push(unique_U, inverse_N, emb_ND.grad.cpu())
        return value

    def finish(self) -> None:
        self.ahead[2].wait()
        torch.futures.wait_all(list(self.pushes))


def worker(options: Options, link: Link, rank: int) -> None:
    form_workers(link, rank, options.workers)
    form_rpc(link, f"worker{rank}", options.workers, rank=rank + 1)
    each = Worker(options, rank)
    sample = torch.unique(each.batches[0].merged_N)
    before = rpc.rpc_sync("server", pull, args=(sample,))
    figures = link.window(options, rank).run(each.train if options.workload == "w1" else each.pull_push)
    each.finish()
    if rank == 0:
        link.done(figures, changed(before, rpc.rpc_sync("server", pull, args=(sample,))))
    leave()


def main(options: Options) -> None:
    cores = options.cores
    roles = {"server": (server, (), cores[1:2] if options.workers == 1 and len(cores) > 1 else cores)}
    for rank in range(options.workers):
        roles[f"worker{rank}"] = (worker, (rank,), [cores[rank % len(cores)]])
    together(options, roles)


if __name__ == "__main__":
    main(options(__doc__, max_workers=8))

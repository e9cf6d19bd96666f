"""Plain PyTorch in one process: 26 tables merged in one tensor, ids deduplicated, row-wise Adagrad by index_add_."""

# B = batch, F = features, N = B * F, U = unique ids, D = embedding dim

from __future__ import annotations

import torch
from data import NUM_FEATURES, NUM_ROWS, ROW_EPS, ROW_LR, ROW_SCALE, pool, row_gradients
from measurement import Options, options
from processes import alone, pin
from tower import Tower, loss, optimizer


class Rows:
    """The merged table and its row-wise Adagrad (the mean square of a row's gradient is added to one sum a row)."""

    def __init__(self, dim: int, device: str = "cpu") -> None:
        self.weights = torch.empty(NUM_ROWS, dim, device=device).uniform_(-ROW_SCALE, ROW_SCALE)
        self.sums = torch.zeros(NUM_ROWS, device=device)

    def apply(self, unique_U: torch.Tensor, grad_UD: torch.Tensor) -> None:
        sums_U = self.sums.index_select(0, unique_U) + grad_UD.square().mean(1)
        self.sums.index_copy_(0, unique_U, sums_U)
        rate_U = ROW_LR / (sums_U.sqrt_() + ROW_EPS)
        self.weights.index_add_(0, unique_U, grad_UD * rate_U.unsqueeze(1), alpha=-1.0)


def main(options: Options) -> None:
    pin(options.cores[:1])
    torch.manual_seed(options.seed)
    batches = pool(options.batch, seed=options.seed, device=options.device)
    rows = Rows(options.dim, options.device)
    tower = Tower(options.dim).to(options.device)
    sgd = optimizer(tower)
    grad_ND = row_gradients(options.batch, options.dim, device=options.device)

    def pull_push(i: int) -> None:
        unique_U, inverse_N = torch.unique(batches[i % len(batches)].merged_N, return_inverse=True)
        rows_UD = rows.weights.index_select(0, unique_U)
        rows_UD.index_select(0, inverse_N)  # what a model would see
        rows.apply(unique_U, torch.zeros_like(rows_UD).index_add_(0, inverse_N, grad_ND))

    def train(i: int) -> torch.Tensor:
        batch = batches[i % len(batches)]
        unique_U, inverse_N = torch.unique(batch.merged_N, return_inverse=True)
        rows_UD = rows.weights.index_select(0, unique_U)
        emb_ND = rows_UD.index_select(0, inverse_N).requires_grad_()
        sgd.zero_grad()
        value = loss(tower(batch.dense_BI, emb_ND.view(-1, NUM_FEATURES, options.dim)), batch.label_B1)
        value.backward()
        sgd.step()
        rows.apply(unique_U, torch.zeros_like(rows_UD).index_add_(0, inverse_N, emb_ND.grad))
        return value

    sample = torch.unique(batches[0].merged_N)
    step = train if options.workload == "w1" else pull_push
    alone(options, step, rows=lambda: rows.weights.index_select(0, sample))


if __name__ == "__main__":
    main(options(__doc__))

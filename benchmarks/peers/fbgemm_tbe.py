"""FBGEMM's table batched embeddings in one process: one lookup over 26 tables, exact row-wise Adagrad fused into its
backward pass. What TorchRec runs inside."""

# B = batch, F = features, N = B * F, D = embedding dim

from __future__ import annotations

import torch
from data import NUM_FEATURES, ROW_EPS, ROW_LR, ROW_SCALE, TABLE_SIZES, pool, row_gradients
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from measurement import Options, options
from processes import alone, pin
from tower import Tower, loss, optimizer


def tables(options: Options) -> SplitTableBatchedEmbeddingBagsCodegen:
    on_gpu = options.device == "cuda"
    place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if on_gpu else (EmbeddingLocation.HOST, ComputeDevice.CPU)
    module = SplitTableBatchedEmbeddingBagsCodegen(
        embedding_specs=[(size, options.dim, *place) for size in TABLE_SIZES],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=ROW_LR,
        eps=ROW_EPS,
        pooling_mode=PoolingMode.SUM,
        device=torch.device(options.device),
    )
    module.init_embedding_weights_uniform(-ROW_SCALE, ROW_SCALE)
    return module


def main(options: Options) -> None:
    pin(options.cores[:1])
    torch.manual_seed(options.seed)
    batches = pool(options.batch, seed=options.seed, device=options.device)
    table = tables(options)
    tower = Tower(options.dim).to(options.device)
    sgd = optimizer(tower)
    ids = [batch.ids_FB.flatten() for batch in batches]
    starts = torch.arange(len(ids[0]) + 1, device=options.device)
    grad_BX = row_gradients(options.batch, options.dim, device=options.device).view(options.batch, -1)

    def pull_push(i: int) -> None:
        table(ids[i % len(ids)], starts).backward(grad_BX)

    def train(i: int) -> torch.Tensor:
        batch = batches[i % len(batches)]
        emb_BFD = table(ids[i % len(ids)], starts).view(-1, NUM_FEATURES, options.dim)
        sgd.zero_grad()
        value = loss(tower(batch.dense_BI, emb_BFD), batch.label_B1)
        value.backward()
        sgd.step()
        return value

    def rows() -> torch.Tensor:
        parts = zip(table.split_embedding_weights(), batches[0].ids_FB, strict=True)
        return torch.cat([weights[part.unique()] for weights, part in parts]).detach().clone()

    alone(options, train if options.workload == "w1" else pull_push, rows=rows)


if __name__ == "__main__":
    main(options(__doc__))

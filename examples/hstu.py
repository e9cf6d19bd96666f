"""A small HSTU (https://arxiv.org/abs/2402.17152) over long sequences of ids: which item comes next?

Run it: python examples/hstu.py
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

from shardkeep import AdamConfig, EmbeddingClient, TableSpec
from shardkeep.nn import EmbeddingCollection, Jagged
from shardkeep.workers.embeddings.sequence import Sequence
from shardkeep.workers.models.encoders.hstu import HstuLayer
from shardkeep.workers.models.layers.hidden import HiddenOptions

ITEMS, DIM, HEADS, BATCH, LONGEST, STEPS = 2000, 32, 2, 16, 200, 150


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Sequences of 50 to 200 items, end to end: three times in four, the next item follows from the last one."""
    following = torch.randperm(ITEMS)
    for _ in range(STEPS):
        items = torch.randint(ITEMS, (BATCH, LONGEST))
        for n in range(1, LONGEST):
            items[:, n] = torch.where(torch.rand(BATCH) < 0.75, following[items[:, n - 1]], items[:, n])
        lengths = torch.randint(50, LONGEST + 1, (BATCH,))
        yield items[torch.arange(LONGEST) < lengths[:, None]], lengths


torch.manual_seed(0)
table = TableSpec(name="item", dim=DIM, optimizer=AdamConfig(lr=0.01))
layers = nn.ModuleList(HstuLayer(DIM, HEADS, LONGEST, 0.0, HiddenOptions()) for _ in range(2))
optimizer = torch.optim.Adam(layers.parameters(), lr=0.003)

with EmbeddingClient.serve([table], servers=2) as client:
    embeddings = EmbeddingCollection(client, {"history": "item"})
    for step, (items, lengths) in enumerate(batches()):
        x = rows = embeddings({"history": Jagged(items, lengths)})["history"].values()  # (ids, DIM), without padding
        history = Sequence({}, rows.detach()[:, :0], lengths, LONGEST)
        for layer in layers:
            x = layer(x, history, newest=False)
        last = torch.zeros(len(items), dtype=torch.bool).index_fill(0, lengths.cumsum(0) - 1, True)
        wanted, of = items[1:][~last[:-1]].unique(return_inverse=True)  # the other items of the batch are negatives
        where = torch.zeros(ITEMS, dtype=torch.long)
        where[items] = torch.arange(len(rows))
        loss = F.cross_entropy(F.layer_norm(x[~last], (DIM,)) @ rows[where[wanted]].T, of)
        optimizer.zero_grad()
        loss.backward()  # the servers update the rows, too
        optimizer.step()
        if step % 30 == 29:
            print(f"step {step + 1}: loss {loss.item():.3f}, of chance {torch.tensor(len(wanted)).log().item():.3f}")

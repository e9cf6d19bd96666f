"""A small HSTU (https://arxiv.org/abs/2402.17152) over long sequences of ids: which item comes next?

Run it: python examples/hstu.py
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

from shardkeep import AdamConfig, EmbeddingClient, TableSpec
from shardkeep.nn import EmbeddingCollection, Jagged

ITEMS, DIM, HEADS, BATCH, LONGEST, STEPS = 2000, 32, 2, 16, 200, 150


class Layer(nn.Module):
    """Attention by SiLU in place of softmax, and a gate in place of a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.out = nn.Linear(DIM, 4 * DIM), nn.Linear(DIM, DIM)
        self.distance = nn.Parameter(torch.zeros(HEADS, LONGEST))  # a weight of each distance between two items

    def forward(self, x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        gate, *heads = F.silu(self.parts(F.layer_norm(x, (DIM,)))).chunk(4, dim=-1)
        value, query, key = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in heads)
        at = torch.arange(length)
        distance = (at[:, None] - at).clamp(min=0)
        score = F.silu(query @ key.transpose(-1, -2) + self.distance[:, distance]) / length
        score = score.masked_fill(~(valid[:, None, None, :] & (at[:, None] >= at)), 0.0)
        found = (score @ value).transpose(1, 2).flatten(2)
        return x + self.out(F.layer_norm(found, (DIM,)) * gate)


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Sequences of 50 to 200 items, padded with -1: three times in four, the next item follows from the last one."""
    following = torch.randperm(ITEMS)
    for _ in range(STEPS):
        items = torch.randint(ITEMS, (BATCH, LONGEST))
        for n in range(1, LONGEST):
            items[:, n] = torch.where(torch.rand(BATCH) < 0.75, following[items[:, n - 1]], items[:, n])
        lengths = torch.randint(50, LONGEST + 1, (BATCH,))
        yield items.masked_fill(torch.arange(LONGEST) >= lengths[:, None], -1), lengths


torch.manual_seed(0)
table = TableSpec(name="item", dim=DIM, optimizer=AdamConfig(lr=0.01))
layers = nn.ModuleList(Layer() for _ in range(2))
optimizer = torch.optim.Adam(layers.parameters(), lr=0.003)

with EmbeddingClient.serve([table], servers=2) as client:
    embeddings = EmbeddingCollection(client, {"history": "item"})
    for step, (items, lengths) in enumerate(batches()):
        valid = items >= 0
        rows = embeddings({"history": Jagged(items[valid], lengths)})["history"].values()  # (ids, DIM), without padding
        x = torch.zeros(BATCH, LONGEST, DIM).masked_scatter(valid[..., None], rows)
        for layer in layers:
            x = layer(x, valid)
        has_next = valid[:, 1:]
        wanted, of = items[:, 1:][has_next].unique(return_inverse=True)  # the other items of the batch are negatives
        where = torch.zeros(ITEMS, dtype=torch.long)
        where[items[valid]] = torch.arange(len(rows))
        loss = F.cross_entropy(F.layer_norm(x[:, :-1][has_next], (DIM,)) @ rows[where[wanted]].T, of)
        optimizer.zero_grad()
        loss.backward()  # the servers update the rows, too
        optimizer.step()
        if step % 30 == 29:
            print(f"step {step + 1}: loss {loss.item():.3f}, of chance {torch.tensor(len(wanted)).log().item():.3f}")

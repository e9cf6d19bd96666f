"""A training loop of your own over embedding servers: who likes what. Run it: python examples/custom_loop.py"""

import torch
from torch import nn
from torch.nn import functional as F

from shardkeep import EmbeddingClient, TableSpec

NUM_USERS, NUM_ITEMS = 3000, 800
torch.manual_seed(0)
taste, appeal = torch.randn(NUM_USERS, 4), torch.randn(NUM_ITEMS, 4)  # what the model has to find out


def samples(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    user, item = torch.randint(NUM_USERS, (count,)), torch.randint(NUM_ITEMS, (count,))
    return user, item, ((taste[user] * appeal[item]).sum(1) > 0).float()


tables = [TableSpec(name=name, dim=16, optimizer={"name": "adagrad", "lr": 0.1}) for name in ("user", "item")]
model = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)


def logits(user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    return model(torch.cat([user, item, user * item], dim=1)).squeeze(1)


with EmbeddingClient.serve(tables, servers=2) as client:  # or EmbeddingClient.local(tables): no other process
    batches = (samples(1024) for _ in range(400))
    for (_, _, liked), rows in client.ahead(batches, lambda batch: {"user": batch[0], "item": batch[1]}):
        # requested while earlier batches trained; leaves of autograd, (1024, 16) each
        loss = F.binary_cross_entropy_with_logits(logits(rows["user"], rows["item"]), liked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        client.apply(rows)  # the servers update the rows
    user, item, liked = samples(20_000)
    found = client.read({"user": user, "item": item})
    right = ((logits(found["user"], found["item"]) > 0) == (liked > 0)).float().mean()
    print(f"loss {loss.item():.3f}, accuracy on new pairs {right.item():.3f}")

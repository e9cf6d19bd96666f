"""A LightningModule whose embedding table is on servers. Run it where lightning is installed:

python examples/lightning_module.py
"""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from shardkeep import AdagradConfig, EmbeddingClient, TableSpec
from shardkeep.callbacks.lightning import RowsCallback
from shardkeep.nn import EmbeddingBagCollection


class Clicks(L.LightningModule):
    def __init__(self, client: EmbeddingClient) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(client, {"user": "user", "item": "item"})
        self.top = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        user, item, clicked = batch
        rows = self.bags({"user": user, "item": item})
        loss = F.binary_cross_entropy_with_logits(self.top(torch.cat([rows["user"], rows["item"]], 1))[:, 0], clicked)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.003)


torch.manual_seed(0)
user, item = torch.randint(500, (40_000,)), torch.randint(200, (40_000,))
clicked = ((torch.randn(500)[user] + torch.randn(200)[item]) > 0).float()
tables = [TableSpec(name=name, dim=16, optimizer=AdagradConfig(lr=0.1)) for name in ("user", "item")]

with EmbeddingClient.serve(tables, servers=2) as client:
    trainer = L.Trainer(
        max_epochs=3, logger=False, accelerator="cpu", callbacks=[RowsCallback(client, "checkpoints/rows")]
    )
    trainer.fit(Clicks(client), DataLoader(TensorDataset(user, item, clicked), batch_size=256, shuffle=True))
    print(f"loss {trainer.callback_metrics['loss']:.3f} after {client.step} steps")

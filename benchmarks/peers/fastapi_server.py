"""FastAPI with the model of `serving.py` in plain PyTorch: fastapi_server.py FOLDER. Prints HOST:PORT when it answers.

The vocabulary of each column is a dict, the rows are an nn.Embedding, the tower is a plain module. One process with one
thread on core 0; uvicorn with uvloop and httptools. The endpoint is `async`: in FastAPI's thread pool it is slower.
"""

# B = rows of a request, I = dense columns, F = features, V = F + 1 vectors, D = embedding dim

from __future__ import annotations

import gc
import itertools
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from safetensors.torch import load_file
from torch import nn


class Tower(nn.Module):
    """Logits (B, 1) of dense columns (B, I) and embeddings (B, F, D): DLRM (Naumov et al., arXiv:1906.00091)."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.bottom = _mlp(weights, "bottom.blocks")
        self.top = _mlp(weights, "top.blocks")
        self.logit = _linear(weights, "logit")
        num_features = sum(name.startswith("rows.") for name in weights)
        row, column = torch.tril_indices(num_features + 1, num_features + 1, offset=-1)
        self.register_buffer("lower", row * (num_features + 1) + column)

    def forward(self, dense_BI: torch.Tensor, emb_BFD: torch.Tensor) -> torch.Tensor:
        first_BD = self.bottom(dense_BI)
        vectors_BVD = torch.cat([first_BD.unsqueeze(1), emb_BFD], dim=1)
        products = torch.bmm(vectors_BVD, vectors_BVD.transpose(1, 2)).flatten(1).index_select(1, self.lower)
        return self.logit(self.top(torch.cat([first_BD, products], dim=1)))


def _linear(weights: dict[str, torch.Tensor], name: str) -> nn.Linear:
    weight = weights[f"tower.{name}.weight"]
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.load_state_dict({"weight": weight, "bias": weights[f"tower.{name}.bias"]})
    return layer


def _mlp(weights: dict[str, torch.Tensor], name: str) -> nn.Sequential:
    names = [f"{name}.{k}.0" for k in itertools.takewhile(lambda k: f"tower.{name}.{k}.0.weight" in weights, range(99))]
    return nn.Sequential(*(layer for each in names for layer in (_linear(weights, each), nn.ReLU())))


class Model(nn.Module):
    """Probabilities (B, 1) of raw columns. All features are in one table, looked up by one call."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        weights = load_file(folder / "model.safetensors")
        vocabulary = json.loads((folder / "vocabulary.json").read_text())
        self.features = list(vocabulary)
        self.dense = [f"d{i}" for i in range(weights["tower.bottom.blocks.0.0.weight"].shape[1])]
        rows, start, self.index = [], 0, dict[str, dict[str, int]]()
        for name, texts in vocabulary.items():
            self.index[name] = {text: start + k for k, text in enumerate(texts)}
            rows.append(weights[f"rows.{name}"])
            start += len(texts)
        self.rows = nn.Embedding.from_pretrained(torch.cat(rows))
        self.tower = Tower(weights)

    def forward(self, columns: dict[str, list[Any]]) -> torch.Tensor:
        dense_BI = torch.tensor([columns[name] for name in self.dense]).T.contiguous()
        ids = [list(map(self.index[name].__getitem__, columns[name])) for name in self.features]
        return torch.sigmoid(self.tower(dense_BI, self.rows(torch.tensor(ids).T)))


class Request(BaseModel):
    """Columns by name."""

    columns: dict[str, list[float | str]]


def main() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {0})
    torch.set_num_threads(1)
    model = Model(Path(sys.argv[1])).eval()
    app = FastAPI()

    @app.post("/predict")
    async def predict(request: Request) -> dict[str, list[float]]:
        with torch.inference_mode():
            return {"score": model(request.columns)[:, 0].tolist()}

    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    gc.collect()
    gc.freeze()
    print(f"127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listener])


if __name__ == "__main__":
    main()

"""What does an id of a sequence cost: its unpooled row pulled, its gradient summed and applied, in process and with one
server, beside plain PyTorch? CPU of all processes. Ids by Zipf 1.05, row-wise Adagrad, gradients that are ready."""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import harness
import numpy as np
import psutil
import torch

from shardkeep import Bag, EmbeddingClient, TableSpec

LENGTH, BATCHES = 50, 8
VOCABULARY = 50
"""Ids that there are, for each id of a batch: about 40 % of a batch's ids are distinct."""
LOCAL, SERVED, PLAIN = "shardkeep, in process", "shardkeep, one server", "PyTorch, SparseAdam"
TARGETS = {LOCAL: 0.35, SERVED: 0.65}
LIMIT_S = 300.0


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--samples", type=int, default=512, help="of a step, with 50 ids each")
    options = harness.parse(parser)
    contestants = {name: _contestant(name, options) for name in (LOCAL, SERVED, PLAIN)}
    found = harness.alternate(contestants, rounds=options.rounds, seconds=options.seconds)
    results: dict[str, Any] = {"rounds": found}
    for name, rounds in found.items():
        us = harness.spread([each["us_per_id"] for each in rounds])
        share = f"{rounds[0]['distinct']:.0%} distinct, D = {options.dim}"
        harness.show_ratio(f"{name}: us of CPU an id, {share}", us, TARGETS.get(name))
    for name in (LOCAL, SERVED):
        ratio = harness.ratios(found, name, PLAIN, "us_per_id")
        harness.show_ratio(f"CPU, {name} / {PLAIN}", ratio)
        results[f"{name} / {PLAIN}"] = ratio
    harness.write(options.json, "unpooled_rows", results)


def _contestant(name: str, options: argparse.Namespace) -> harness.Contestant:
    def run(seconds: float) -> harness.Figures:
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=_measure, args=(name, options.dim, options.samples, seconds, queue))
        return harness.result_of([process], queue, limit_s=LIMIT_S)

    return run


def _measure(name: str, dim: int, samples: int, seconds: float, queue: Any) -> None:
    torch.set_num_threads(1)
    batches = _batches(samples * LENGTH)
    gradient_ND = torch.randn(samples * LENGTH, dim) * 1e-3
    with _trained_by(name, dim, samples, gradient_ND) as step:
        for ids_N in batches:  # rows are made by their first gradient
            step(ids_N)
        steps, before_s = 0, _cpu_s()
        while _cpu_s() - before_s < seconds or steps % BATCHES:
            step(batches[steps % BATCHES])
            steps += 1
        us = (_cpu_s() - before_s) / (steps * samples * LENGTH) * 1e6
    distinct = np.mean([np.unique(ids_N).size / ids_N.numel() for ids_N in batches])
    queue.put({"us_per_id": us, "steps": steps, "distinct": float(distinct)})


def _batches(num_ids: int) -> list[torch.Tensor]:
    random, vocabulary = np.random.default_rng(1), VOCABULARY * num_ids
    shares_V = np.cumsum(1.0 / np.arange(1, vocabulary + 1) ** 1.05)
    ids_V = random.permutation(vocabulary)
    draws = (random.random(num_ids) * shares_V[-1] for _ in range(BATCHES))
    return [torch.from_numpy(ids_V[np.searchsorted(shares_V, each)]) for each in draws]


class _Trained(AbstractContextManager[Callable[[torch.Tensor], None]]):
    """Rows on a client's servers."""

    def __init__(self, client: EmbeddingClient, samples: int, gradient_ND: torch.Tensor) -> None:
        self._client, self._gradient_ND = client, gradient_ND
        self._lengths_B = torch.full((samples,), LENGTH)

    def __enter__(self) -> Callable[[torch.Tensor], None]:
        return self._step

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def _step(self, ids_N: torch.Tensor) -> None:
        rows = self._client.pool({"seen": Bag(ids_N, self._lengths_B, pooling="none")})
        rows["seen"].grad = self._gradient_ND
        self._client.apply(rows)


class _Plain(AbstractContextManager[Callable[[torch.Tensor], None]]):
    """Rows of a torch module."""

    def __init__(self, num_rows: int, gradient_ND: torch.Tensor) -> None:
        self._rows = torch.nn.Embedding(num_rows, gradient_ND.shape[1], sparse=True)
        self._optimizer = torch.optim.SparseAdam(self._rows.parameters(), lr=0.01)
        self._gradient_ND = gradient_ND

    def __enter__(self) -> Callable[[torch.Tensor], None]:
        return self._step

    def __exit__(self, *_: object) -> None:
        pass

    def _step(self, ids_N: torch.Tensor) -> None:
        self._optimizer.zero_grad()
        self._rows(ids_N).backward(self._gradient_ND)
        self._optimizer.step()


def _trained_by(name: str, dim: int, samples: int, gradient_ND: torch.Tensor) -> Any:
    if name == PLAIN:
        return _Plain(VOCABULARY * samples * LENGTH, gradient_ND)
    table = TableSpec(name="seen", dim=dim, optimizer={"name": "rowwise_adagrad", "lr": 0.01})
    if name == LOCAL:
        return _Trained(EmbeddingClient.local([table], consistency="sync"), samples, gradient_ND)
    return _Trained(EmbeddingClient.serve([table], servers=1, restarts=0, quiet=True), samples, gradient_ND)


def _cpu_s() -> float:
    """CPU seconds of this process and of all below it."""
    below = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return harness.cpu_seconds() + sum(times.user + times.system for times in below)


if __name__ == "__main__":
    main()

"""TorchRec's golden example: its DLRM over 26 tables of 100,000 rows, on random ids, as small as TorchRec trains it.
Arguments: side, figures, options (see ../small_steps.py). Run by torchrun; each rank has one core and one thread.

The figures are the CPU and the time of all processes below `root` from the `first` step to the `last` one.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from sharded_loop import by_torchrec, end
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.datasets.random import RandomRecDataset
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

NAMES = [f"cat_{f}" for f in range(26)]
ROWS, NUM_DENSE, LR = 100_000, 13, 0.1
CPU = torch.device("cpu")


def model_of(dim: int, hidden: list[int]) -> nn.Module:
    """`hidden`: widths of the top layers before the logit."""
    configs = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=dim, num_embeddings=ROWS, feature_names=[name])
        for name in NAMES
    ]
    tables = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    dlrm = DLRM(
        tables, NUM_DENSE, dense_arch_layer_sizes=[64, dim], over_arch_layer_sizes=[*hidden, 1], dense_device=CPU
    )
    apply_optimizer_in_backward(RowWiseAdagrad, dlrm.sparse_arch.parameters(), {"lr": LR})
    return DLRMTrain(dlrm)


def popular(batches: list[Batch], seed: int) -> list[Batch]:
    """Puts ids of Zipf's law (1.05) into batches, as of Criteo: a table's rows by a random order of popularity."""
    rng, order = np.random.default_rng(seed), np.random.default_rng(0).permutation(ROWS)
    cdf = np.cumsum(1.0 / np.arange(1, ROWS + 1) ** 1.05)
    for batch in batches:
        values = batch.sparse_features.values()
        ranks = np.searchsorted(cdf, rng.random(len(values)) * cdf[-1])
        values.copy_(torch.from_numpy(order[np.minimum(ranks, ROWS - 1)]))
    return batches


def cpu_s(root: int) -> Counter[str]:
    """CPU seconds so far, by role, of a process and all below it."""
    found = Counter[str]()
    for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
        with process.oneshot():
            line, times = " ".join(process.cmdline()), process.cpu_times()
        roles = {"server ": "servers", "golden_loop.py": "trainers"}
        role = next(
            (role for mark, role in roles.items() if mark in line and "torch.distributed" not in line), "others"
        )
        found[role] += times.user + times.system
    return found


def main(side: str, options: dict[str, Any], output: Path) -> None:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {options["cores"][rank]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model, client = model_of(options["dim"], options["hidden"]), None
    if side == "shardkeep":
        from shardkeep.torchrec import client_of, shard

        model = DistributedModelParallel(shard(model), device=CPU)
        client = client_of(model)
    else:
        model = by_torchrec(model, options["batch"], [f"t_{name}" for name in NAMES])
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), lambda params: torch.optim.Adagrad(params, lr=LR)
    )
    pipeline = TrainPipelineSparseDist(model, CombinedOptimizer([model.fused_optimizer, dense]), CPU)
    data = RandomRecDataset(
        NAMES, options["batch"], ROWS, ids_per_feature=options["ids"], num_dense=NUM_DENSE, manual_seed=1 + rank,
        num_generated_batches=max(1, 100 // options["ids"]),
    )  # fmt: skip
    drawn = data.batch_generator._generated_batches
    batches = itertools.cycle(popular(drawn, 1 + rank) if options["zipf"] else drawn)
    marks = []
    for step in range(options["last"] + 1):
        if step in (options["first"], options["last"]):
            dist.barrier()
            marks.append((time.perf_counter(), cpu_s(options["root"]) if rank == 0 else Counter()))
            dist.barrier()
        pipeline.progress(batches)
    figures = None
    if rank == 0:
        steps = options["last"] - options["first"]
        (began, before), (ended, after) = marks
        parts = {f"{role}_ms": 1e3 * (after[role] - before[role]) / steps for role in after}
        figures = {"cpu_ms": sum(parts.values()), "steps_per_s": steps / (ended - began)} | parts
    end(figures, output, client)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[3]), Path(sys.argv[2]))

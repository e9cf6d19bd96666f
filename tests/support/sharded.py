"""Towers in shards: what two processes find when they train a tower with FSDP beside DDP, over gloo."""

from __future__ import annotations

import functools
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardkeep.ps.checkpoints.folder import Checkpoint, Checkpoints
from shardkeep.ps.transport.metered import LedgerMeter, WorkerTraffic
from shardkeep.workers.checkpoint.tower_state import adopt_tower, load_tower, save_tower, tower_state
from shardkeep.workers.collectives.metered import MeteredCollective
from shardkeep.workers.dense.shards import Shards
from shardkeep.workers.dense.state import broadcast
from shardkeep.workers.dense.tower import Tower
from tests.support.scenarios import Rank, Scenario
from tests.support.towers import CPU, RANKING, batch, dims_of, part_of, seeded_model, tower_of, train

WORLD = 2
SPLITS = [(0, 15), (15, 24)]
CASES: dict[str, dict[str, Any]] = {
    "clipped, in micro-batches, batch norm, activation checkpointing": {
        "clip_norm": 0.05,
        "micro": 3,
        "model": {"norm": "batch", "activation_checkpointing": True},
    },
    "sgd, one without samples": {
        "splits": [(0, 24), (24, 24)],
        "config": {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
    },
    "bf16, padded": {"config": {"amp": "bf16", "pad_widths": 8}},
}


def wide_model(seed: int = 0, **settings: Any) -> nn.Module:
    return seeded_model(seed, hidden=[300, 260], **settings)


def joined(collective: Any, parallel: str, *, model: Any = None, config: Any = None, **others: Any) -> Tower:
    """A tower in a group. `model`: a module, or settings of a wide one."""
    module = model if isinstance(model, nn.Module) else wide_model(collective.rank, **(model or {}))
    settings = {"parallel": parallel, **(config or {})}
    tower = tower_of(model=module, config=settings, sync=False, **others)
    broadcast(tower.model, collective)
    tower.join(collective)
    return tower


def whole_values(tower: Tower) -> torch.Tensor:
    """All parameters and buffers, flat. Every rank calls it."""
    gathered: Callable[[Any], torch.Tensor] = torch.detach if tower.shards is None else tower.shards.gathered
    tensors = [*tower.model.parameters(), *tower.model.buffers()]
    return torch.cat([gathered(t).reshape(-1).float() for t in tensors]).clone()


def case(rank: Rank, name: str) -> Any:
    """The values of towers after three steps of a case, with ddp and with fsdp, and gradients of rows."""
    collective = rank.form()
    given, found = {"micro": 1, "splits": SPLITS, **CASES[name]}, []
    micro, splits = given.pop("micro"), given.pop("splits")
    for parallel in ("ddp", "fsdp"):
        tower = joined(collective, parallel, **given)
        grads = train(tower, splits, micro=micro, steps=3)
        found += [whole_values(tower), torch.stack([grad.sum() for grad in grads])]
    return as_arrays(found)


def every_model(rank: Rank) -> Any:
    """Of each stock model, each module that may be a block being one: the gradients of its parameters summed by FSDP,
    and those of a whole model over all samples."""
    collective, found = rank.form(), {}
    for name in RANKING:
        models = [seeded_model(3, name=name) for _ in range(2)]
        drawn = torch.Generator().manual_seed(1)
        dense = torch.randn(8, 3, generator=drawn)
        rows = {feature: torch.randn(8, dim, generator=drawn) for feature, dim in dims_of(name).items()}
        whole = {feature: each.clone().requires_grad_() for feature, each in rows.items()}
        models[0](dense, whole).square().sum().backward()
        plain = [p.grad for p in models[0].parameters()]
        shards = Shards(models[1], collective.mesh(CPU), least=1)
        shards.join(collective)
        mine = slice(4 * collective.rank, 4 * collective.rank + 4)
        own = {feature: each[mine].clone().requires_grad_() for feature, each in rows.items()}
        models[1](dense[mine], own).square().sum().backward()
        summed = [shards.gathered(p.grad) for p in models[1].parameters()]
        found[name] = [torch.cat([grad.reshape(-1) for grad in each]) for each in (plain, summed)]
    return as_arrays(found)


def overflowing(rank: Rank) -> tuple[list[bool], list[float]]:
    """fp16 where the gradients of one rank overflow in one step, and the rows of the other in the next."""
    collective = rank.form()
    tower, applied, scales = joined(collective, "fsdp", config={"amp": "fp16"}), [], []
    for step in range(4):
        dense, leaves, label = part_of(batch(step, 24), *SPLITS[collective.rank])
        if step == 1 and collective.rank == 1:
            dense = torch.full_like(dense, 1e30)
        tower.backward(dense, leaves, label, 1 / 24)
        applied.append(tower.update(step, rows_finite=not (step == 2 and collective.rank == 0)).applied)
        scales.append(tower.precision.scaler.get_scale())
    return applied, scales


def states(rank: Rank) -> Any:
    """A checkpoint of three steps, and the values after two more: of this tower, of others that load it, of one that
    begins with its model."""
    collective = rank.form()
    if rank.number:
        folder = Path(rank.store.get("folder").decode())  # waits for rank 0
    else:
        folder = Path(tempfile.mkdtemp())
        rank.store.set("folder", str(folder))
    model = wide_model(norm="batch")
    freed = weakref.ref(next(iter(model.parameters())))
    tower = joined(collective, "fsdp", model=model)
    train(tower, SPLITS, steps=3)
    refused = False
    try:
        tower_state(tower, None if collective.rank else Path("/dev/null/folder"))
    except OSError:
        refused = True
    saved = saved_by(tower, folder, 3)
    found: dict[str, Any] = {"freed": freed() is None, "refused": refused, "values": whole_values(tower)}
    others = {parallel: joined(collective, parallel, model={"norm": "batch"}) for parallel in ("ddp", "fsdp")}
    for parallel, other in others.items():
        train(other, SPLITS, steps=1)  # it has a state of its own
        load_tower(other, saved)
        found[parallel] = whole_values(other)
    for other in (tower, *others.values()):
        train(other, SPLITS, first=3, steps=2)
    found["after"] = [whole_values(other) for other in (tower, *others.values())]
    narrow = joined(collective, "fsdp", model=wide_model(5, norm="batch"))
    found["new"], found["adopted"] = adopt_tower(narrow, saved, None), whole_values(narrow)
    alone = tower_of(model=wide_model(7, norm="batch"))
    load_tower(alone, saved)
    found["alone"] = whole_values(alone)
    collective.barrier(purpose="agreements")  # the other rank has read the files
    if not rank.number:
        shutil.rmtree(folder)
    return as_arrays(found)


def saved_by(tower: Tower, folder: Path, step: int) -> Checkpoint:
    """The checkpoint of a tower, written by rank 0. Every rank calls it."""
    checkpoints = Checkpoints(folder)
    state = tower_state(tower, None if tower.collective.rank else folder)
    if not tower.collective.rank:
        checkpoints.commit(step, save_tower(state, checkpoints.begin(step)), {})
    tower.collective.barrier(purpose="agreements")
    return checkpoints.load(step)


def scores(rank: Rank) -> Any:
    """The logits of a tower in shards where rank 1 predicts nothing at first, and after a step."""
    collective = rank.form()
    tower, found = joined(collective, "fsdp"), []
    plain = tower_of(model=wide_model(0))
    dense, rows, _ = batch(0, 24)
    with tower.whole():
        found = [] if collective.rank else [tower.predict(dense, rows), plain.predict(dense, rows)]
    train(tower, SPLITS, steps=1)
    with tower.whole():
        found += [tower.predict(dense, rows) for _ in range(collective.rank)]
    train(tower, SPLITS, first=1, steps=1)
    return as_arrays([*found, whole_values(tower)])


def sent(rank: Rank) -> dict[str, int]:
    traffic = WorkerTraffic()
    tower = joined(MeteredCollective(rank.form(), LedgerMeter(traffic)), "fsdp")
    before = dict(traffic.ledger.totals()["tower"])
    train(tower, SPLITS, steps=1)
    return {part: size - before.get(part, 0) for part, size in traffic.ledger.totals()["tower"].items()}


def next_generation(rank: Rank) -> Any:
    """A tower whose group is lost in a step, then formed again: its values beside those of an undisturbed one."""
    first = rank.form()
    tower = joined(first, "fsdp", model={"norm": "batch"})
    train(tower, SPLITS, steps=2)
    dense, leaves, label = part_of(batch(2, 24), *SPLITS[rank.number])
    tower.backward(dense, leaves, label, 1 / 24)  # the step is not finished
    first.close()
    second = rank.form()
    tower.join(second)
    straight = joined(second, "fsdp", model={"norm": "batch"})
    train(straight, SPLITS, steps=2)
    for each in (tower, straight):
        train(each, SPLITS, first=2, steps=2)
    return as_arrays({"disturbed": whole_values(tower), "straight": whole_values(straight)})


def group_of_one(rank: Rank) -> Any:
    """The values of towers that train alone, with ddp and with fsdp in a group of one rank. Rank 1 has none."""
    if rank.number:
        return None
    rank.world_size = 1
    collective = rank.form()
    towers = [joined(collective, parallel, clip_norm=0.05) for parallel in ("ddp", "fsdp")]
    for tower in towers:
        train(tower, [(0, 24)], micro=2)
    assert towers[1].shards is not None
    return as_arrays([whole_values(tower) for tower in towers])


SCENARIOS: dict[str, Scenario] = {
    **{name: functools.partial(case, name=name) for name in CASES},
    "overflow": overflowing,
    "states": states,
    "scores": scores,
    "sent": sent,
    "generations": next_generation,
    "one": group_of_one,
}


def as_arrays(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy().copy()
    if isinstance(value, dict):
        return {key: as_arrays(each) for key, each in value.items()}
    return [as_arrays(each) for each in value] if isinstance(value, list | tuple) else value

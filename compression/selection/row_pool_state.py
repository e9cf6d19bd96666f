"""The saved state of a row pool: plain arrays, and the sum of several workers' states for another number of workers."""
# N = rows with a residual, D = embedding dim, S = slots

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from shardkeep.compression.selection import slot_kernels as k
from shardkeep.compression.selection.slots import RowSlots

Array = npt.NDArray[np.generic]
State = Mapping[str, Array]
"""tables, ids, counts, firsts int64 (N,), squares, scores float32 (N,), rests float32 (N, D), by table and id; sums
float64; control int64 [step, lost rows]; and, if of one pool, its layout: slots (N,), free (S - N,), hand, int64."""


def of_slots(slots: RowSlots) -> dict[str, Array]:
    """A state of fresh arrays. Slots of cached rows without a residual count as free, after those that are."""
    held = slots.unsent()
    heads = slots.heads_SH
    held = held[np.lexsort((heads[held, k.ID], heads[held, k.TABLE]))]
    clean = np.flatnonzero((heads[:, k.FLAGS] != 0) & (heads[:, k.FLAGS] & k.UNSENT == 0))
    return {
        "tables": heads[held, k.TABLE],
        "ids": heads[held, k.ID],
        "counts": heads[held, k.COUNT],
        "firsts": heads[held, k.FIRST],
        "squares": slots.stats_SC[held, k.SQUARES],
        "scores": slots.stats_SC[held, k.SCORE],
        "rests": slots.rests_SW[held],
        "sums": slots.sums.copy(),
        "control": np.array([slots.step, slots.control[k.LOST_ROWS]], dtype=np.int64),
        "slots": held,
        "free": np.concatenate([slots.free(), clean]),
        "hand": slots.control[[k.HAND]],
    }


def into_slots(slots: RowSlots, state: State) -> None:
    """Replaces all that the slots hold. Raises ValueError, before any change, for a state that does not fit."""
    size = len(state["ids"])
    if state["rests"].shape != (size, slots.width) or len(state["sums"]) != len(slots.sums):
        raise ValueError(f"a state of residuals {state['rests'].shape}; expected {(size, slots.width)}")
    if size > slots.capacity:
        raise ValueError(f"{size} rows of unsent gradient do not fit {slots.capacity} slots; raise pool_rows")
    slots.clear()
    exact = "slots" in state and size + len(state["free"]) == slots.capacity
    held = np.asarray(state["slots"], dtype=np.int64) if exact else np.arange(size)
    heads = slots.heads_SH
    heads[held, k.TABLE], heads[held, k.ID], heads[held, k.COUNT] = state["tables"], state["ids"], state["counts"]
    heads[held, k.FLAGS], heads[held, k.READ] = k.USED | k.UNSENT, -1
    heads[held, k.FIRST], slots.rests_SW[held] = state["firsts"], state["rests"]
    slots.stats_SC[held, k.SQUARES], slots.stats_SC[held, k.SCORE] = state["squares"], state["scores"]
    slots.put_free(np.asarray(state["free"], dtype=np.int64) if exact else np.arange(size, slots.capacity))
    slots.sums[:] = state["sums"]
    slots.step = int(state["control"][0])
    slots.control[k.LOST_ROWS], slots.control[k.NUM_UNSENT] = state["control"][1], size
    slots.control[k.HAND] = state["hand"][0] if exact else 0
    k.rebuild(slots.pool)


def merge(states: Sequence[State]) -> dict[str, Array]:
    """The states' sum by table and id, for resuming with another number of workers: residuals (added in float64),
    squares, counts, scores (no less than the score of the sum) and totals add up; the oldest gradient's step stays.

    Raises ValueError for no states or such of different dims."""
    if len({state["rests"].shape[1] for state in states}) != 1:
        raise ValueError(f"{len(states)} states of residuals {[s['rests'].shape for s in states]}; allowed: one dim")
    joined = {name: np.concatenate([state[name] for state in states]) for name in ("tables", "ids", "firsts", "rests")}
    keys, group = np.unique(np.stack([joined["tables"], joined["ids"]]), axis=1, return_inverse=True)
    group = group.reshape(-1)
    size = keys.shape[1]
    rests = np.zeros((size, joined["rests"].shape[1]))
    np.add.at(rests, group, joined["rests"])
    never = np.iinfo(np.int64).max
    firsts = np.full(size, never)
    np.minimum.at(firsts, group, np.where(joined["firsts"] < 0, never, joined["firsts"]))
    return {
        "tables": keys[0],
        "ids": keys[1],
        "counts": _summed(states, "counts", group, size).astype(np.int64),
        "firsts": np.where(firsts == never, -1, firsts),
        "squares": _summed(states, "squares", group, size).astype(np.float32),
        "scores": _summed(states, "scores", group, size).astype(np.float32),
        "rests": rests.astype(np.float32),
        "sums": np.sum([state["sums"] for state in states], axis=0),
        "control": np.array(
            [max(int(s["control"][0]) for s in states), sum(int(s["control"][1]) for s in states)], dtype=np.int64
        ),
    }


def _summed(states: Sequence[State], name: str, group: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.float64]:
    values = np.concatenate([state[name] for state in states]).astype(np.float64)
    summed = np.zeros(size)
    np.add.at(summed, group, values)
    return summed

"""Follows a run while its model is served: a thread replaces the model after each checkpoint."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from shardkeep.base.errors import ShardkeepError, UserError
from shardkeep.base.logs.log import EventLog
from shardkeep.base.machine.allocator import give_back_freed_memory
from shardkeep.inference.following import Follower
from shardkeep.inference.predictor import Predictor
from shardkeep.inference.server.served_model import ServedModel

LOOK_EVERY_S = 0.5
JOIN_S = 30.0

_log = EventLog("serve")


@contextlib.contextmanager
def following(
    served: ServedModel,
    follower: Follower,
    *,
    every_s: float = LOOK_EVERY_S,
    told: Callable[[str], None] = lambda _: None,
) -> Iterator[None]:
    """Inside, the newest checkpoint is served. A checkpoint that cannot be served is logged and counted
    (`served.num_missed`); the older model stays. No exception ends the thread.

    `told`: called with one line for each new model, in another thread."""
    stop = threading.Event()
    thread = threading.Thread(target=_follow, args=(served, follower, every_s, stop, told), name="follow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(JOIN_S)


def _follow(
    served: ServedModel, follower: Follower, every_s: float, stop: threading.Event, told: Callable[[str], None]
) -> None:
    while not stop.wait(every_s):
        try:
            found = follower.look()
        except Exception as error:  # damage, a base that was pruned, settings of another version
            _missed(served, error)
            continue
        if found is None:
            continue
        try:
            served.replace(Predictor(found.trained), found.written_s)
            give_back_freed_memory()  # else the holes that the old models' arrays leave grow
        except Exception as error:  # other columns, memory: the older model stays
            _missed(served, error)
            if not isinstance(error, UserError):  # other columns would not fit the next time either
                follower.forget()
            continue
        read, age_s = "all rows" if found.full else "an increment", time.time() - found.written_s
        with contextlib.suppress(Exception):  # nobody reads the output any more
            told(f"step {found.trained.step:,}: read {read}; serves {age_s:.2f} s after its checkpoint was complete")


def _missed(served: ServedModel, error: Exception) -> None:
    why = str(error) if isinstance(error, ShardkeepError | OSError) else f"{type(error).__name__}: {error}"
    _log.warning("a checkpoint cannot be served", why=why, once=why)
    served.missed()

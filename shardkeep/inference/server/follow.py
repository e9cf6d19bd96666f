"""Follows a run while its model is served: a thread replaces the model after each checkpoint."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from shardkeep.base.errors import ShardkeepError
from shardkeep.base.log import EventLog
from shardkeep.inference.following import Follower
from shardkeep.inference.predictor import Predictor
from shardkeep.inference.server.served_model import ServedModel

LOOK_EVERY_S = 0.5
JOIN_S = 30.0

_log = EventLog("serve")


@contextlib.contextmanager
def following(served: ServedModel, follower: Follower, *, every_s: float = LOOK_EVERY_S) -> Iterator[None]:
    """Inside, the newest checkpoint is served. A checkpoint that cannot be served is logged; the older model stays."""
    stop = threading.Event()
    thread = threading.Thread(target=_follow, args=(served, follower, every_s, stop), name="follow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(JOIN_S)


def _follow(served: ServedModel, follower: Follower, every_s: float, stop: threading.Event) -> None:
    while not stop.wait(every_s):
        began = time.monotonic()
        try:
            found = follower.look()
            if found is None:
                continue
            served.replace(Predictor(found.trained), found.written_s)
        except ShardkeepError as error:  # of other columns, or of settings of another version
            _log.warning("a checkpoint cannot be served", why=str(error), once=str(error))
            continue
        seconds, age_s = time.monotonic() - began, time.time() - found.written_s
        read = "all rows" if found.full else "an increment"
        _log.info("model", step=found.trained.step, read=read, seconds=round(seconds, 2), age_s=round(age_s, 2))

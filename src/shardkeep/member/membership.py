"""A process as a member of its job: its start, its membership, its end. Loads no torch."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from shardkeep.base.compiling.kernels import load_kernels
from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import (
    JobStopped,
    MemberLost,
    PlaceRefused,
    ShardkeepError,
    TransportError,
    UserError,
)
from shardkeep.base.exit_codes import code_of_leaving
from shardkeep.base.logs.log import EventLog
from shardkeep.base.machine.versions import peak_rss_bytes
from shardkeep.base.net.addresses import split_address
from shardkeep.base.net.sockets import Counters, Watched
from shardkeep.base.system_errors import in_words
from shardkeep.config import JobConfig, parse_config
from shardkeep.config.affinity import own_cores
from shardkeep.member.departure import Departure, Leaving
from shardkeep.ps.config import LivenessConfig
from shardkeep.ps.control.grpc.client import ControlClient

if TYPE_CHECKING:
    from shardkeep.assembly.kernel_needs import Role

_log = EventLog("roles")
FAILED_GRACE_S = 10.0
"""Seconds between a job's failure and the end of a role that is stuck in a call which cannot be interrupted."""
LISTEN_S = LivenessConfig().form_timeout_s
"""Seconds that a member waits for a coordinator to appear; the job's own limit is known only to the coordinator."""
PLACE_POLL_S = 0.2
LAST_WORDS_S = 2.0
"""Seconds that a role which leaves on a signal tries to say so."""


@contextlib.contextmanager
def lasting_imports(role: Role) -> Iterator[float]:
    """For the imports of a role's main, which live as long as the process; gives the seconds of compiling kernels.

    The garbage collector looks at none of what is made inside, now or later: a tenth of the time of importing torch,
    and no pauses for it in training. The kernels are compiled first, by one process of a machine at a time.
    """
    gc.disable()
    try:
        yield loaded_kernels(None, role)
    finally:
        gc.freeze()
        gc.enable()


def loaded_kernels(config: JobConfig | None, *roles: Role) -> float:
    """Loads the kernels that the roles need, compiled first where this machine has not done so; the seconds it took.

    `config`: None = as long as it is not known."""
    from shardkeep.assembly.kernel_needs import needed_kernels  # here: a coordinator needs none of it

    began = time.perf_counter()
    load_kernels(needed_kernels(config, *roles))
    return time.perf_counter() - began


def process_facts(kernels_s: float) -> dict[str, Any]:
    """What the summary says of any process."""
    return {"peak_rss_bytes": peak_rss_bytes(), "kernels_s": kernels_s, "cores": own_cores()}


def watched_sockets(control: ControlClient) -> Watched:
    """This process's connections; those to the coordinator are known so far."""
    sockets = Watched()
    sockets.belong("control", ports=[split_address(control.address)[1]])
    return sockets


def control_bytes(control: ControlClient, sockets: Watched) -> int:
    """Bytes that this member and the coordinator have sent each other: counted by the kernel where it can, else the
    messages alone."""
    sockets.look()
    counted = sockets.totals().get("control", Counters())
    return max(control.bytes_total, counted.sent + counted.received)


class Membership:
    """Registered and alive inside the `with`; on the way out says how it ended, with the job's verdict on the cause."""

    def __init__(
        self,
        control: ControlClient,
        departure: Departure | None = None,
        *,
        wait_s: float = LISTEN_S,
        restarted: bool = False,
    ) -> None:
        """`departure`: how the process leaves on a signal; None = it is not ours. `wait_s`: seconds that the
        coordinator gets to appear. `restarted`: a launcher starts another process after an error."""
        self._control, self._departure, self._wait_s = control, departure, wait_s
        self._restarted = restarted

    def __enter__(self) -> JobConfig:
        try:
            return self._enter()
        except Leaving as leaving:  # it may be registered
            say_leaving(self._control, str(leaving), leaving.code)
            raise

    def _enter(self) -> JobConfig:
        config = parse_config(self._registered(), origin="the coordinator's config", judged="nothing")
        recovery, form_s = config.recovery, config.liveness.form_timeout_s
        patience_s = max(form_s, recovery.replace_timeout_s) if recovery.restarts else None
        self._control.start_heartbeats(patience_s=patience_s, members=config.servers + config.workers)
        if self._departure is not None:
            self._departure.last_words = functools.partial(say_leaving, self._control)
            self._departure.when_asked = self._control.wake
        return config

    def _registered(self) -> str:
        """Registers; the config. A role of `node` may come before the coordinator knows that its predecessor, whose
        `node` or machine was lost, is gone."""
        patience = Deadline(self._wait_s if self._departure is not None and self._departure.sheltered else 0.0)
        while True:
            try:
                return self._control.register(wait_s=self._wait_s)
            except PlaceRefused:
                if patience.over:
                    raise
            time.sleep(PLACE_POLL_S)

    def __exit__(self, kind: object, error: BaseException | None, _trace: object) -> None:
        control = self._control
        try:
            if error is None:
                control.leave(0)
                return
            if isinstance(error, Leaving):
                say_leaving(control, str(error), error.code)
                return
            if self._restarted and isinstance(error, Exception) and not isinstance(error, UserError):
                say_leaving(control, f"ended: {_one_line(error)}", code_of_leaving(signal.SIGTERM))
                return
            # Losing a peer is a symptom: who died comes first in the job's message when the coordinator learns it.
            symptom = isinstance(error, TransportError | MemberLost) or not isinstance(error, ShardkeepError)
            code = error.exit_code if isinstance(error, ShardkeepError) else 1
            refused = isinstance(error, PlaceRefused)
            state = control.leave(code, _one_line(error), symptom=symptom, refused=refused)
            if symptom and state.state in ("stopping", "stopped"):
                raise JobStopped(state.message) from None
        finally:
            control.close()


def say_leaving(control: ControlClient, text: str, code: int) -> None:
    """Tells the coordinator that this role leaves, so that the others form again at once. Again: changes nothing."""
    control.leave(code, text, patience_s=LAST_WORDS_S)


def leave_if_due(control: ControlClient, departure: Departure, ready: Callable[[], None]) -> None:
    """Raises Leaving after a request to leave, if the job continues without this role. Called when it can.

    `ready`: brings to its end and to disk what another is to continue with; called before the coordinator knows."""
    if not departure.due or control.stop_requested.is_set():
        return
    ready()
    try:
        departure.check()
    except Leaving as leaving:
        say_leaving(control, str(leaving), leaving.code)
        raise


@contextlib.contextmanager
def tried_while_leaving() -> Iterator[None]:
    """For what a role that leaves brings to disk: it leaves without, if that fails, and its replacement finds less."""
    try:
        yield
    except (ShardkeepError, OSError) as error:
        _log.warning("leaving, and not all is on disk", why=_one_line(error))


def end_when_the_job_failed(control: ControlClient, grace_s: float = FAILED_GRACE_S) -> None:
    """Starts the thread that ends this process when the job has failed and the main thread does not come to it.

    A collective with a silent peer, a compilation or a long evaluation may not see a failure for minutes."""

    def watch() -> None:
        control.failed.wait()
        time.sleep(grace_s)  # the ordinary way out, with the error in the command line's words
        _log.error("ending", reason=control.state.message)
        os._exit(control.state.exit_code or 1)

    threading.Thread(target=watch, name="job-failed", daemon=True).start()


def _one_line(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return in_words(error).splitlines()[0]

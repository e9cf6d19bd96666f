"""What the mains of all roles share: their start, their membership of the job, their end. Loads no torch by itself."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkeep.affinity import own_cores
from shardkeep.base.compiling.kernels import load_kernels
from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import (
    CheckpointError,
    ConfigError,
    JobError,
    JobStopped,
    MemberLost,
    PlaceRefused,
    ShardkeepError,
    TransportError,
)
from shardkeep.base.files import make_folder, owner_lock
from shardkeep.base.log import EventLog
from shardkeep.base.machine.owners import check_unshared
from shardkeep.base.machine.sockets import Counters, Watched
from shardkeep.base.machine.versions import peak_rss_bytes
from shardkeep.config import JobConfig, parse_config
from shardkeep.ps.config import LivenessConfig
from shardkeep.ps.control.grpc.addresses import is_address, split_address
from shardkeep.ps.control.grpc.client import ControlClient
from shardkeep.ps.control.records import Formation
from shardkeep.roles.departure import Departure, Leaving
from shardkeep.run.reader import coordinator_in
from shardkeep.run.storage import folder_before, folder_to_keep_in

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from shardkeep.ps.rpc.group import RpcGroup
    from shardkeep.roles.kernel_needs import Role

_log = EventLog("roles")
FAILED_GRACE_S = 10.0
"""Seconds between a job's failure and the end of a role that is stuck in a call which cannot be interrupted."""
LISTEN_S = LivenessConfig().form_timeout_s
"""Seconds that a member waits for a coordinator to appear; the job's own limit is known only to the coordinator."""
ADDRESS_POLL_S = 0.02
LOAD_S = 1800.0
"""Seconds that servers get to load a checkpoint before they meet the others."""
CONNECT_S = 5.0
LAST_WORDS_S = 2.0
"""Seconds that a role which leaves on a signal tries to say so."""
OWNER_S = 10.0
"""Seconds that the process before this one gets to end; then it is killed."""


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
    from shardkeep.roles.kernel_needs import needed_kernels  # here: a coordinator needs none of it

    began = time.perf_counter()
    load_kernels(needed_kernels(config, *roles))
    return time.perf_counter() - began


def coordinator_address(given: str, *, launched: bool = False) -> str:
    """`--coordinator` as HOST:PORT, or a run folder: then what it says, once the coordinator listens.

    So a role can start before the coordinator does, also before one that resumes a job that is over. Not where a
    launcher started both: there, no other coordinator comes. Raises DeadlineExceeded, JobError."""
    run = Path(given)
    if is_address(given) and not run.is_dir():
        return given
    deadline = Deadline(LISTEN_S)
    while True:
        over, address = (run / "summary.json").exists(), coordinator_in(run)
        if address is not None and not over:
            return address
        if over and launched:
            raise JobError(f"{given}: the job is over")
        deadline.check(f"the coordinator to listen; {given} does not say where")
        time.sleep(ADDRESS_POLL_S)


def process_facts(kernels_s: float) -> dict[str, Any]:
    """What the summary says of any process."""
    return {"peak_rss_bytes": peak_rss_bytes(), "kernels_s": kernels_s, "cores": own_cores()}


def watched_sockets(control: ControlClient) -> Watched:
    """This process's connections, of which it knows so far which go to the coordinator."""
    sockets = Watched()
    sockets.belong("control", ports=[split_address(control.address)[1]])
    return sockets


def control_bytes(control: ControlClient, sockets: Watched) -> int:
    """What this member and the coordinator have sent each other: as the kernel counts it where it can be asked, else
    the messages alone."""
    sockets.look()
    counted = sockets.totals().get("control", Counters())
    return max(control.bytes_total, counted.sent + counted.received)


class Membership:
    """Registered and alive inside the `with`; on the way out says how it ended, with the job's verdict on the cause."""

    def __init__(self, control: ControlClient, departure: Departure | None = None, *, wait_s: float = LISTEN_S) -> None:
        """`departure`: how the process leaves on a signal; None = it is not ours. `wait_s`: seconds that the
        coordinator gets to appear."""
        self._control, self._departure, self._wait_s = control, departure, wait_s

    def __enter__(self) -> JobConfig:
        try:
            return self._enter()
        except Leaving as leaving:  # it may be registered
            say_leaving(self._control, str(leaving), leaving.code)
            raise

    def _enter(self) -> JobConfig:
        config = parse_config(self._control.register(wait_s=self._wait_s), origin="the coordinator's config")
        liveness = config.liveness
        self._control.start_heartbeats(patience_s=liveness.form_timeout_s if liveness.restarts else None)
        if self._departure is not None:
            self._departure.last_words = functools.partial(say_leaving, self._control)
            self._departure.when_asked = self._control.wake
        return config

    def __exit__(self, kind: object, error: BaseException | None, _trace: object) -> None:
        control = self._control
        try:
            if error is None:
                control.leave(0)
                return
            if isinstance(error, Leaving):
                say_leaving(control, str(error), error.code)
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
    """Raises Leaving where the role was asked to leave and the job goes on without it. Called when it can.

    `ready`: brings to its end and to disk what another is to go on with; called before the coordinator knows."""
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


def kept_for_recovery(run_dir: Path, job: str, role: str, index: int) -> Path:
    """Where a member keeps what its replacement goes on with; what it kept for earlier starts of the job is deleted.

    A process that holds the place still has lost it, or the coordinator had not let this one in: it stands still
    perhaps, and is killed. Raises ConfigError where others could change what is kept, CheckpointError."""
    top, mine = run_dir / "recovery", _kept_folder(run_dir, job, role, index)
    check_unshared(mine, what="--run-dir")
    try:
        for earlier in [path for path in top.glob(f"*/{role}-{index}") if path != mine]:
            with contextlib.suppress(TimeoutError):  # of a job that runs
                os.close(owner_lock(earlier / "owner", limit_s=0.0))
                shutil.rmtree(earlier, ignore_errors=True)
                with contextlib.suppress(OSError):
                    earlier.parent.rmdir()
        make_folder(mine)
        try:
            owner_lock(mine / "owner", limit_s=OWNER_S)  # as long as this process lives
        except TimeoutError:
            if not _kill_owner(mine / "owner"):
                raise
            owner_lock(mine / "owner", limit_s=OWNER_S)
    except OSError as error:
        raise CheckpointError(f"{mine}: cannot be used ({error.strerror or error})") from error
    return mine


def replaced_folder(control: ControlClient, run_dir: Path) -> Path:
    """`kept_for_recovery`, where the member before this one kept it, if that is here. Raises PlaceRefused when a
    replacement cannot use it."""
    member = control.member
    try:
        home = folder_to_keep_in(control, run_dir)
        return kept_for_recovery(home, control.job, member.role, member.index)
    except (CheckpointError, ConfigError) as error:
        if not control.kept.folder:
            raise
        raise PlaceRefused(f"{member.name} cannot be replaced by this process: {error}") from error


def _kept_folder(run_dir: Path, job: str, role: str, index: int) -> Path:
    return run_dir / "recovery" / job / f"{role}-{index}"


@contextlib.contextmanager
def kept_while_useful(control: ControlClient, run_dir: Path) -> Iterator[None]:
    """Deletes what this member kept for its replacement, if on the way out the coordinator says that the job is over.

    If the coordinator is silent, nothing is deleted: another one may take over, and wait for replacements."""
    try:
        yield
    finally:
        if control.verdict is not None and control.verdict.over:
            member = control.member
            home = folder_before(control) or run_dir
            mine = _kept_folder(home, control.job, member.role, member.index)
            shutil.rmtree(mine, ignore_errors=True)
            for above in (mine.parent, mine.parent.parent):
                with contextlib.suppress(OSError):  # other members' are there
                    above.rmdir()


def _kill_owner(path: Path) -> bool:
    """Kills the process that a lock names; False where it is not one of this machine that has the file open."""
    import psutil

    try:
        process = psutil.Process(int(path.read_text(encoding="ascii")))
        if str(path.resolve()) not in [file.path for file in process.open_files()]:
            return False
        _log.warning("ending the process before this one, which stands still", pid=process.pid)
        process.kill()
    except (OSError, ValueError, psutil.Error):
        return False
    return True


def join_store(config: JobConfig, formation: Formation, lost: Callable[[int], bool]) -> Store:
    """The store through which a generation meets. Raises TransportError when it cannot be reached in time, or when the
    generation is `lost`: its store is closed then."""
    from shardkeep.ps.rpc.group import connect_store

    deadline = Deadline(_form_limit_s(config, formation))
    while True:
        try:
            return connect_store(formation.store_host, formation.store_port, timeout_s=CONNECT_S)
        except TransportError:
            if deadline.over or lost(formation.generation):
                raise


def _form_limit_s(config: JobConfig, formation: Formation) -> float:
    loads = formation.restores and formation.start_step
    return config.liveness.form_timeout_s + (LOAD_S if loads else 0.0)


def join_group(
    config: JobConfig,
    formation: Formation,
    role: str,
    index: int,
    host: str,
    handler: Any,
    *,
    lost: Callable[[int], bool] = lambda _generation: False,
) -> RpcGroup:
    """Blocks until all members of the generation have joined its RPC group. Raises TransportError when they have not in
    time, or when the generation is `lost`."""
    from shardkeep.ps.rpc.group import RpcGroup

    return RpcGroup.form(
        join_store(config, formation, lost),
        generation=formation.generation,
        role=role,
        index=index,
        num_servers=config.servers,
        num_workers=config.workers,
        host=host,
        timeout_s=_form_limit_s(config, formation),
        handler=handler,
        same_host=config.transport.same_host,
    )


def _one_line(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return (str(error).strip() or type(error).__name__).splitlines()[0]

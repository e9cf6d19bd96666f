"""`shardkeep node`: the roles of one machine of a job. The same command on every machine, started again at any time.

All machines see the run folder. Machine 0 also runs the coordinator, which continues the job by what is in the folder.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import JobError, UserError
from shardkeep.base.exit_codes import START_AGAIN
from shardkeep.base.files import make_folder
from shardkeep.base.logs.log import EventLog
from shardkeep.base.net.addresses import join_address
from shardkeep.config import JobConfig
from shardkeep.core_plan import over_quota, share_of, worker_threads
from shardkeep.launch.machine import Machine
from shardkeep.launch.processes.children import Death
from shardkeep.launch.processes.role_starts import RoleStarts
from shardkeep.launch.processes.starter import Starter
from shardkeep.launch.stopping.interrupts import Interrupts
from shardkeep.launch.supervision import POLL_S, Supervision
from shardkeep.ps.control.records import TERMINATED, TRAINED
from shardkeep.run.origin.continuing import Given, led, start_in
from shardkeep.run.reader import RunReader, check_ours
from shardkeep.trust.endpoint import Endpoint
from shardkeep.trust.tls import read_tls

_log = EventLog("launch")
Starting = Callable[[JobConfig], AbstractContextManager[Starter]]
"""Opens what starts the roles of a job."""
SEEN_S = 10.0
"""Seconds in which a machine sees what another one has written to the run folder, such as why the job is over."""
CLOSE_S, FAILED_S, LEAVING_S = 15.0, 1.0, 5.0
"""Seconds the roles get to end after a job whose steps are all trained, after any other, and when the node ends."""
LAST_S = 1.0
"""Seconds of `liveness.grace_s` for this process's own end."""


@dataclass(frozen=True)
class NodeOptions:
    """The options of `shardkeep node`. `only`: `servers` or `workers`, or "" for both; `keep`: folder for journals."""

    config_path: Path
    run: Path
    machine: Machine
    address: str
    only: str = ""
    keep: Path | None = None
    overrides: tuple[str, ...] = ()
    token_file: Path | None = None
    tls: Path | None = None
    insecure: bool = False
    by_program: bool = False
    """Whether a program runs this command, ends it, and starts it again."""

    @property
    def leads(self) -> bool:
        """Whether this machine runs the coordinator."""
        return self.machine.rank == 0 and self.only != "workers"

    def share(self, config: JobConfig) -> list[tuple[str, int]]:
        """Every n-th worker and server; perhaps none. Raises UserError for a job in one process."""
        rank, nodes = self.machine.rank, self.machine.nodes
        counts = {"worker": config.workers, "server": config.servers}
        if not config.servers:
            raise UserError("servers: 0 is a job in one process, for `shardkeep train`; allowed: 1 or more")
        counts = {role: count for role, count in counts.items() if self.only in ("", f"{role}s")}
        return [(role, index) for role, count in counts.items() for index in range(rank, count, nodes)]

    def coordinator(self) -> list[str]:
        """The arguments of a coordinator."""
        sets = [word for each in self.overrides for word in ("--set", each)]
        job = [str(self.config_path), "--run-dir", str(self.run), *sets, *self.trust()]
        again = [] if self.by_program else ["--again", shlex.join(["shardkeep", "node", *job])]
        return [*job, "--continue", "--listen", join_address(self.address, 0), "--sheltered", *again]

    def trust(self) -> list[str]:
        """The arguments that say who may connect."""
        words = [] if self.token_file is None else ["--token-file", str(self.token_file)]
        words += [] if self.tls is None else ["--tls", str(self.tls)]
        return [*words, *["--insecure-data-plane"][: self.insecure]]


class _Start(RunReader):
    """The run folder as of this start of the job: what an earlier start has left there does not count."""

    def __init__(self, options: NodeOptions) -> None:
        super().__init__(options.run)
        self._options = options
        self._earlier = self.number() if options.leads or super().summary() is not None else -1

    def summary(self) -> dict[str, Any] | None:
        return super().summary() if self.number() > self._earlier else None

    def address(self) -> str | None:
        return super().address() if self.number() > self._earlier else None

    def endpoint(self, token_file: Path | None = None) -> Endpoint | None:
        found, tls = super().endpoint(token_file or self._options.token_file), self._options.tls
        return found if found is None or tls is None else replace(found, tls=read_tls(tls))


def run_node(given: Given, options: NodeOptions, starting: Starting) -> int:
    """Runs this machine's roles until the job is over, or the machine leaves it. Returns 0, or 143 = start me again.

    Its config is that which leads by `start_in`. Raises UserError for a given one that cannot lead; UserError and
    JobError as the job fails."""
    check_ours(options.run, what="--run-dir")
    folder, machine = _Start(options), options.machine
    start = start_in(given, folder)
    share = options.share(start.config)
    if start.way == "completed" or not share:
        alone = f"machine {machine.rank} of {machine.nodes} has nothing to run"
        _log.info("the job is completed" if start.way == "completed" else alone, run=folder.path)
        return 0
    make_folder(folder.logs)
    interrupts = Interrupts()
    interrupts.tolerated = 1_000_000
    with starting(start.config) as starter, interrupts:
        if not options.leads:
            _log.info("waiting for the coordinator", run=folder.path)
            limit = Deadline(start.config.recovery.replace_timeout_s)
            while folder.address() is None and not (folder.summary() or interrupts.count or limit.over):
                time.sleep(POLL_S)
            start = start if folder.address() is None else led("take over", 0, given, folder)
        if start.remark:
            _log.warning(start.remark)
        return _Node(start.config, folder, options, starter, interrupts).run()


class _Node:
    """The roles of one machine, from start to end."""

    def __init__(
        self, config: JobConfig, folder: _Start, options: NodeOptions, starter: Starter, interrupts: Interrupts
    ) -> None:
        self._share, self._folder = options.share(config), folder
        servers, workers = (sum(role == each for role, _ in self._share) for each in ("server", "worker"))
        here = share_of(config, servers=servers, workers=workers)
        config = config.model_copy(update={"threads": worker_threads(here)})
        if warning := over_quota(here):
            _log.warning(warning)
        self._config, self._options, self._starter, self._interrupts = config, options, starter, interrupts
        roles = RoleStarts(
            config,
            self._folder,
            starter,
            options.coordinator,
            member=["--advertise", options.address, *options.trust(), "--sheltered"],
            keep=options.keep,
            code_folder=options.config_path.parent if config.own_modules else None,
        )
        self._job = Supervision(roles, say=_log.warning, terminate_s=LEAVING_S, continues=True)

    def run(self) -> int:
        with self._job:
            self._start()
            self._watch()
            self._close()
            ended = self._job.processes.ended()
        return self._verdict(ended)

    def _start(self) -> None:
        """Starts the roles. The machine that leads starts a coordinator first, and waits until it listens."""
        while not self._starter.ready(POLL_S):
            if self._interrupts.count:
                return
        if self._options.leads:
            self._job.processes.start("coordinator")
            self._job.until(lambda: self._folder.address() is not None or bool(self._over or self._interrupts.count))
        if self._folder.address() is not None:
            for role, index in self._share:
                self._job.processes.start(role, index)

    @property
    def _over(self) -> bool:
        """Whether the job is over, or its coordinator has ended without being killed."""
        return self._job.over or _coordinator_of(self._job.processes.ended()) is not None

    def _watch(self) -> None:
        """Replaces killed roles, until the job is over or this machine leaves it."""
        limit: Deadline | None = None
        leaving = False
        while not self._over and not self._interrupts.at_once and not (limit is not None and limit.over):
            if self._interrupts.count and not leaving:
                limit, leaving = Deadline(self._config.liveness.grace_s - LAST_S), True
                _log.info("leaving", what="the job stops" if self._options.leads else "this machine's roles")
                self._job.processes.ask_to_leave(*(["coordinator"] if self._options.leads else ["worker", "server"]))
            if leaving and not self._job.processes.running():
                return
            self._job.look(replaces=not leaving)
            if limit is None and (not self._job.alive or self._job.fatal()):
                limit = Deadline(SEEN_S)
            time.sleep(POLL_S)

    def _close(self) -> None:
        """Waits for the roles to end after the job, and for the coordinator, which tells the other machines."""
        trained, processes = (self._folder.summary() or {}).get("status") in TRAINED, self._job.processes
        members, last = Deadline(CLOSE_S if trained else FAILED_S), Deadline(CLOSE_S + self._config.liveness.lease_s)
        self._job.until(
            lambda: (
                not (self._over and processes.running() and not self._interrupts.at_once and not last.over)
                or (members.over and processes.coordinator() is None)
            ),
            replaces=False,
        )

    def _verdict(self, ended: list[Death]) -> int:
        """The exit code; raises why the job failed."""
        found, end = self._folder.summary() or {}, _coordinator_of(ended)
        if found.get("status") == "completed":
            _log.info("the job is completed", run=self._folder.path)
            return 0
        if not found and end is not None and end.code == 0:
            _log.info("another coordinator leads the job", run=self._folder.path)
            return 0
        if found.get("status") == "stopped":
            _log.info(str(found["message"]))
            return START_AGAIN if found.get("stopped_by") == TERMINATED else 0
        wrong = next((death for death in ended if death.code == UserError.exit_code), None)
        cause = end or wrong
        if not found and (self._interrupts.count or cause is None):
            fatal = "; ".join(death.text() for death in self._job.fatal())
            _log.info("left", why="SIGTERM" if self._interrupts.count else fatal or "the coordinator is gone")
            return START_AGAIN
        message = found.get("message") or (cause and (cause.last_words or cause.text()))
        raise (JobError if wrong is None else UserError)(f"{message}; logs: {self._folder.logs}")


def _coordinator_of(ended: list[Death]) -> Death | None:
    """The end of a coordinator that was not killed."""
    return next((death for death in ended if death.role == "coordinator" and death.code >= 0), None)

"""A server or worker process in its job: what both have, from their start to their end. Loads no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from shardkeep.base.machine.allocator import keep_freed_memory
from shardkeep.config import JobConfig
from shardkeep.member.agreed_checkpoints import AgreedCheckpoints
from shardkeep.member.departure import Departure
from shardkeep.member.group import join_group
from shardkeep.member.membership import (
    Membership,
    control_bytes,
    end_when_the_job_failed,
    loaded_kernels,
    process_facts,
    watched_sockets,
)
from shardkeep.member.metrics import MemberMetrics
from shardkeep.member.recovery_folder import kept_while_useful, replaced_folder
from shardkeep.ps.control.grpc.client import ControlClient
from shardkeep.ps.control.records import Formation, Offer, ResumeRange
from shardkeep.run.storage import kept_at, why_unseen
from shardkeep.trust.endpoint import Endpoint

if TYPE_CHECKING:
    from shardkeep.ps.rpc.group import RpcGroup


class Life(Protocol):
    """What a role does over the generations of its job."""

    @property
    def resume_range(self) -> ResumeRange:
        """The steps at which it could resume now."""
        ...

    def live(self, formation: Formation) -> str | None:
        """One generation, to the end of the job (None) or of the generation: then how it was lost."""
        ...


class JobMember:
    """A registered process.

    Args:
        folder: The run folder: a profile goes there, what is kept for recovery if the process that this one replaces
            kept it nowhere else, and checkpoints where the config names no other place.
        kernels_s: Seconds it took to compile kernels, for the summary.
        departure: How it leaves when a signal asks it to.
    """

    def __init__(
        self,
        config: JobConfig,
        coordinator: Endpoint,
        control: ControlClient,
        folder: Path,
        departure: Departure,
        kernels_s: float,
    ) -> None:
        self.control, self.folder, self.departure, self._kernels_s = control, folder, departure, kernels_s
        self.index = control.member.index
        self.agreed = AgreedCheckpoints(config, control, folder, writes=self.writes)
        self.sockets = watched_sockets(control)
        self.metrics = MemberMetrics(config, coordinator, control.member)

    @property
    def config(self) -> JobConfig:
        """The job's, with the folder of checkpoints that its members agree on."""
        return self.agreed.config

    @property
    def writes(self) -> bool:
        """Whether it commits checkpoints."""
        return self.control.member.role == "worker" and self.index == 0

    @cached_property
    def kept(self) -> Path | None:
        """Where it keeps what its replacement resumes with; None = nowhere."""
        worker = self.control.member.role == "worker"
        keeps = self.config.tower.parallel == "ddp" if worker else self.config.recovery.journal != "off"
        return replaced_folder(self.control, self.folder) if self.config.recovery.restarts and keeps else None

    def live(self, life: Life, offer: Offer) -> None:
        """Joins one generation after the other, to the end of the job."""
        shared = self.control.shared
        unseen = why_unseen(shared, writes=self.writes or self.control.member.role == "server")
        offer = replace(offer, resume_range=life.resume_range, unseen=unseen, settings=self.config.agreed())
        formation: Formation | None = self.control.join(offer, kept=kept_at(self.kept, shared))
        while formation is not None:
            self.agreed.follow(formation)
            if (lost := life.live(formation)) is None:
                return
            self.departure.check()
            offer = replace(offer, resume_range=life.resume_range)
            formation = self.control.join_again(offer, formation, lost)

    def join_group(self, formation: Formation, handler: Any) -> RpcGroup:
        """Blocks until all members of the generation are in its RPC group. Raises as `join_group`."""
        control, member = self.control, self.control.member
        place = member.role, member.index, member.host, handler
        return join_group(self.config, formation, *place, lost=control.lost, moves=lambda: control.state.moves)

    @property
    def control_bytes(self) -> int:
        """Bytes that this member and the coordinator have sent each other."""
        return control_bytes(self.control, self.sockets)

    def facts(self) -> dict[str, Any]:
        """What the summary says of this process."""
        return process_facts(self._kernels_s)

    def close(self) -> None:
        """Ends the endpoint, and leaves the folder of checkpoints to other jobs."""
        self.metrics.close()
        self.agreed.release()


@contextlib.contextmanager
def registered(
    role: Literal["server", "worker"],
    coordinator: Endpoint,
    *,
    index: int,
    advertise: str,
    folder: Path,
    kernels_s: float,
    departure: Departure,
) -> Iterator[JobMember]:
    """Registered and alive inside the `with`, with the kernels that its config needs. Arguments: see `JobMember`."""
    control = ControlClient(coordinator, role=role, index=index, advertise=advertise)
    end_when_the_job_failed(control)
    with kept_while_useful(control, folder), Membership(control, departure) as config:
        keep_freed_memory()
        kernels_s += loaded_kernels(config, role)
        with contextlib.closing(JobMember(config, coordinator, control, folder, departure, kernels_s)) as member:
            yield member

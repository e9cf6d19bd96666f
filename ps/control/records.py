"""The control plane's records: what crosses the border of ps/control. No protobuf, no sockets, no logic.

record_forms.py writes them as JSON, grpc/messages.py as messages of control.proto.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from shardkeep.base.errors import JobError, JobStopped, MemberLost, PlaceLost, ShardkeepError, UserError
from shardkeep.ps.config import TableSpec

PROTOCOL_VERSION = 5
"""Grows by one with every change of control.proto that an older member would misunderstand."""

Role = Literal["server", "worker"]
ROLES: tuple[Role, ...] = ("server", "worker")
TRAINED = frozenset({"completed", "incomplete"})
"""The states of a job whose steps are all trained; an incomplete one has not kept all that it was to keep."""
TERMINATED = "SIGTERM"
"""The reason of a stop by a machine or an engine, which starts the job again. A person's stop has another."""
OVER = frozenset({*TRAINED, "failed", "stopped"})
REPORT_KINDS = ("progress", "eval", "phase", "event", "summary", "telemetry")
Record = dict[str, Any]
"""A JSON object."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the job. `host` is where the others reach it."""

    role: Role
    index: int
    host: str
    pid: int
    started: str = ""
    """When the process started (`base/machine/pids.py`); "" = not known."""

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid} on {self.host})"


@dataclass(frozen=True, slots=True)
class Hello:
    """The request of a process to join the job.

    The process chooses `token`, which identifies it in all later calls. A repeated Hello has the same token.
    """

    member: Member
    token: str
    protocol_version: int
    versions: Mapping[str, str] = field(default_factory=dict)


ANY_STEP = 2**62


@dataclass(frozen=True, slots=True)
class ResumeRange:
    """The steps, `first` to `last`, at which a member can resume in the next generation.

    `holds`: it has the state for it; a worker without takes another's tower. `part`: its state is of no use without
    that of every other worker. `saved`: the last complete checkpoint that it sees; 0 = none, -1 = it does not look.
    `lost_from`: it can also resume after `last`, without its updates since this step. `why`: why it does not hold what
    the member before it held. `file`, `byte`: where the journal ends that it replayed."""

    first: int = 0
    last: int = ANY_STEP
    holds: bool = False
    saved: int = -1
    part: bool = False
    lost_from: int | None = None
    why: str = ""
    file: str = ""
    byte: int = 0


ANYWHERE = ResumeRange()
"""The resume range of a member without state."""


@dataclass(frozen=True, slots=True)
class RecoveryFolder:
    """The host and folder with the data that a member's replacement needs. `folder`: absolute; empty = none. `shared`:
    it is in the coordinator's run folder, by whatever name."""

    host: str = ""
    folder: str = ""
    shared: bool = False


NOTHING_KEPT = RecoveryFolder()


@dataclass(frozen=True, slots=True)
class Shared:
    """A folder for checkpoints. A member that sees it reads `token` in it.

    `needed_by`: the setting that requires it; empty = without it the job warns and runs without checkpoints.
    `proof_only`: checkpoints go elsewhere; it only shows who sees the run folder."""

    folder: str
    token: str
    needed_by: str = ""
    proof_only: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """What a member brings when it joins."""

    tables: tuple[TableSpec, ...] = ()
    """The tables that a worker derived from config and data; servers bring none."""
    data: str = ""
    """The fingerprint of the data that a worker has opened; "" = not known."""
    resume_range: ResumeRange = ANYWHERE
    unseen: str = ""
    """Why it cannot use the shared folder; "" = it can."""
    settings: Record = field(default_factory=dict)
    """The job's config as it reads it, without what may differ between machines; {} = not known."""


NO_OFFER = Offer()


@dataclass(frozen=True, slots=True)
class Registration:
    """The answer to a Hello. `job`: names this start of the job. `formation`, `kept`: of the member that this one
    replaces."""

    config_yaml: str
    lease_s: float
    job: str
    formation: Formation | None = None
    kept: RecoveryFolder = NOTHING_KEPT
    shared: Shared | None = None
    run_dir: str = ""


@dataclass(frozen=True, slots=True)
class Formation:
    """One generation of the group: who is in it, where its TCPStore is, which tables it holds, where it begins.

    `members` are the servers by index, then the workers by index. A generation resumes at `start_step` with what its
    members hold, those of the workers `lacking` with the tower of worker `source`; with source -1 all begin from the
    checkpoint of that step; at step 0 without one.
    """

    generation: int
    store_host: str
    store_port: int
    members: tuple[Member, ...]
    tables: tuple[TableSpec, ...]
    start_step: int = 0
    source: int = -1
    lacking: tuple[int, ...] = ()
    origin: int = 0
    """The step of the checkpoint that this start of the job began from; 0 = none."""
    data: str = ""
    """The fingerprint of the data that the workers read: training, and after a hyphen evaluation; "" = not known."""
    checkpoints: str | None = None
    """Their folder; "" = none are kept, None = the config says."""
    journal: str = ""
    """What the servers' journals survive, `off`, `os` or `fsync`; "" = there are none."""

    @property
    def restores(self) -> bool:
        """Whether members start from a checkpoint or from step 0, independent of what they hold."""
        return self.source < 0

    def of_role(self, role: Role) -> tuple[Member, ...]:
        """The members of one role, by index."""
        return tuple(member for member in self.members if member.role == role)


@dataclass(frozen=True, slots=True)
class JobState:
    """The state of the job. `exit_code` is None until the job is over; `version` grows with every change."""

    state: str = "forming"  # forming | training | recovering | completed | incomplete | failed | stopping | stopped
    message: str = ""
    exit_code: int | None = None
    lost: bool = False  # failed because a member was lost
    generation: int = 0
    version: int = 0
    moves: int = 0  # grows, without a new version, while members do rows of long work

    @property
    def over(self) -> bool:
        return self.state in OVER

    def error(self) -> ShardkeepError | None:
        """The exception that this state means to a member that wants to continue; None = continue."""
        if self.state == "failed":
            kinds = {kind.exit_code: kind for kind in (UserError, PlaceLost)}
            return kinds.get(self.exit_code or 0, MemberLost if self.lost else JobError)(self.message)
        if self.state in ("stopping", "stopped"):
            return JobStopped(self.message)
        if self.state in TRAINED:
            return JobError(self.message or "the job is completed already")
        return None


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A member as the coordinator sees it; `age_s` since its last sign of life, `step` -1 = none yet."""

    role: Role
    index: int
    host: str
    pid: int
    condition: str  # registered | joined | left | lost
    age_s: float
    step: int = -1
    phase: str = ""


NOT_REPLACED = "not replaced"


@dataclass(frozen=True, slots=True)
class Missing:
    """A member that must still join. `pid` 0 = its place is free, so somebody must start it."""

    role: Role
    index: int
    why: str
    host: str = ""
    pid: int = 0

    def __str__(self) -> str:
        place = f" (pid {self.pid} on {self.host})" if self.pid else ""
        return f"{self.role} {self.index}{place} ({self.why})"


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The answer to `shardkeep status`.

    `progress`, `evaluation` and `summary` are the latest records ({}, {} and None = none yet). `events` are the
    last phases, evaluations and events in order, each with a growing "seq", so that a reader shows each once.
    """

    state: str
    message: str = ""
    exit_code: int | None = None
    generation: int = 0
    members: tuple[MemberStatus, ...] = ()
    progress: Record = field(default_factory=dict)
    evaluation: Record = field(default_factory=dict)
    summary: Record | None = None
    events: tuple[Record, ...] = ()
    missing: tuple[Missing, ...] = ()
    """The members that must still join, while a group forms."""
    left_s: float = 0.0
    """Until the job fails without them."""
    telemetry: tuple[Record, ...] = ()
    """The newest telemetry record of the coordinator and of each member, servers first, each by index."""


class JobSink(Protocol):
    """Stores the job's records, in the run folder. Called in order, under the coordinator's lock: be quick.

    Every record carries "kind", "role" and "index" beside what the member reported. A record that cannot be written is
    lost: that costs the job nothing. An OSError fails it: `members` raises one before the first generation, `finished`
    always. Every method raises Superseded, and writes nothing, once another coordinator leads the job.
    """

    def members(self, generation: int, members: tuple[Member, ...]) -> None:
        """A generation is about to be handed out."""

    def standing(self, record: Record) -> None:
        """What another coordinator process needs to continue. Holds secrets. Called without the lock, one at a time."""

    def progress(self, record: Record) -> None:
        """kind: progress."""

    def event(self, record: Record) -> None:
        """kind: eval | phase | event."""

    def telemetry(self, record: Record) -> None:
        """kind: telemetry."""

    def finished(self, status: str, message: str, summary: Record | None) -> None:
        """The job is over. Called again with a better message when a failure's cause shows late."""

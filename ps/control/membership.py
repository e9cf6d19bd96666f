"""Who is in the job: seats by (role, index), leases, the generation counter. Knows no job state, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from shardkeep.base.deadlines import SILENCE_S
from shardkeep.base.errors import ConfigError, PlaceLost, PlaceRefused, ProtocolError
from shardkeep.ps.control.records import (
    NO_OFFER,
    NOT_REPLACED,
    NOTHING_KEPT,
    ROLES,
    Member,
    MemberStatus,
    Missing,
    Offer,
    RecoveryFolder,
    Role,
)

LOADING = "loading"
"""How the phase of a member begins that reads rows. Its silence counts."""


def heartbeat_s(members: int) -> float:
    """Seconds between two heartbeats of one of so many members: a hundred a second, which cost a millisecond each."""
    return min(max(1.0, members / 100), 5.0)


def silent_s(members: int) -> float:
    """Seconds, more than a heartbeat: a silent member counts as dead if another process is started for its seat."""
    return heartbeat_s(members) + 2.0


@dataclass(slots=True)
class Seat:
    """One seat of the job and who holds it."""

    member: Member
    token: str
    last_seen: float
    step: int = -1
    phase: str = ""
    """What it does, with the rows of long work so far."""
    moved: float = 0.0
    """The time when the phase last changed."""
    unsent_rows: int = 0
    joined: bool = False
    offer: Offer = NO_OFFER
    left_code: int | None = None
    lost: bool = False
    last_sequence: int = 0
    kept: RecoveryFolder = NOTHING_KEPT
    met: int = -1
    """The last point at which it has waited for the other workers."""

    def join(self, offer: Offer) -> None:
        """Records that the member is ready to form. A reason in `unseen` stays once set."""
        self.joined = True
        self.offer = replace(offer, unseen=offer.unseen or self.offer.unseen)

    @property
    def gone(self) -> bool:
        return self.lost or self.left_code is not None

    @property
    def last_step(self) -> str:
        """For a sentence: where it was last seen."""
        where = f"at step {self.step}" if self.step >= 0 else "before its first step"
        return f"last seen {where}" + (f" ({self.phase})" if self.phase else "")

    def status(self, now: float) -> MemberStatus:
        m = self.member
        condition = "registered"
        if self.gone:
            condition = "left" if self.left_code is not None else "lost"
        elif self.joined:
            condition = "joined"
        return MemberStatus(m.role, m.index, m.host, m.pid, condition, now - self.last_seen, self.step, self.phase)


class Seats:
    """The seats of a job with a fixed number of servers and workers. Not thread safe."""

    def __init__(self, *, num_servers: int, num_workers: int, lease_s: float) -> None:
        self.counts: dict[Role, int] = {"server": num_servers, "worker": num_workers}
        self.lease_s = lease_s
        self.generation = 0
        self._seats: dict[tuple[str, int], Seat] = {}
        self._by_token: dict[str, Seat] = {}

    def known(self, token: str) -> bool:
        return token in self._by_token

    def admit(self, member: Member, token: str, now: float) -> Seat:
        """Gives `member` its seat. Raises ConfigError (no such seat) or PlaceRefused (seat taken)."""
        self.check_seat(member.role, member.index)
        if not token:
            raise ProtocolError(f"{member} registered without a token")
        held = self._seats.get((member.role, member.index))
        if held is not None and not held.gone:
            raise PlaceRefused(f"{member.name} is already in the job ({held.member}); start each index once")
        seat = Seat(member, token, now, kept=NOTHING_KEPT if held is None else held.kept)
        self._seats[member.role, member.index] = self._by_token[token] = seat
        return seat

    def restore(self, generation: int, seats: Iterable[Seat]) -> None:
        """Takes over the seats that another coordinator gave."""
        self.generation = generation
        for seat in seats:
            self._seats[seat.member.role, seat.member.index] = self._by_token[seat.token] = seat

    def check_seat(self, role: str, index: int) -> None:
        if role not in ROLES:
            raise ProtocolError(f"unknown role {role!r}; allowed: {', '.join(ROLES)}")
        count = self.counts[role]
        if not 0 <= index < count:
            allowed = f"0..{count - 1}" if count else "none"
            raise ConfigError(f"{role} index {index}: the job has {count} {role}s; allowed: {allowed}")

    def seat(self, token: str) -> Seat:
        """The seat of the member that registered with `token`. Raises PlaceLost."""
        try:
            return self._by_token[token]
        except KeyError:
            raise PlaceLost("the coordinator does not know this member; start it again") from None

    def at(self, role: str, index: int) -> Seat | None:
        return self._seats.get((role, index))

    def seats(self, role: Role | None = None) -> list[Seat]:
        """Seats that are or were held: servers by index, then workers by index."""
        return [self._seats[key] for key in sorted(self._seats) if role in (None, key[0])]

    def present(self) -> list[Seat]:
        return [seat for seat in self.seats() if not seat.gone]

    def expired(self, now: float) -> list[Seat]:
        """Members whose lease ended, longest silent first."""
        late = [seat for seat in self.present() if now - seat.last_seen > self.lease_s]
        return sorted(late, key=lambda seat: seat.last_seen)

    def stuck(self, now: float) -> list[Seat]:
        """Members that load rows and have done none for too long."""
        return [seat for seat in self.present() if seat.phase.startswith(LOADING) and now - seat.moved > SILENCE_S]

    def forgive(self, gap_s: float) -> None:
        """Extends every lease by `gap_s`, because the coordinator itself was paused for that time."""
        for seat in self.present():
            seat.last_seen, seat.moved = seat.last_seen + gap_s, seat.moved + gap_s

    def vacant(self) -> bool:
        """Whether somebody must still be started."""
        return len(self.present()) < sum(self.counts.values())

    def missing(self) -> Iterator[Missing]:
        """Yields the members that have not joined yet."""
        for role, count in self.counts.items():
            for index in range(count):
                seat = self.at(role, index)
                if seat is None:
                    yield Missing(role, index, "not started")
                elif seat.gone:
                    yield Missing(role, index, NOT_REPLACED)
                elif not seat.joined:
                    why = f"{seat.phase or 'registered'}, not ready"
                    yield Missing(role, index, why, seat.member.host, seat.member.pid)

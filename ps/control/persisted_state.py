"""The state of a job that outlives the coordinator's process, as JSON types. Knows no files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shardkeep.base.errors import UserError
from shardkeep.ps.config import TableSpec
from shardkeep.ps.control.membership import Seat
from shardkeep.ps.control.records import Formation, JobState, Kept, Member, Offer, Record, ResumeRange
from shardkeep.ps.control.recoveries import Recoveries

_NOT_ASKED = "its coordinator was of an earlier version, which offered no folder"


@dataclass(frozen=True, slots=True)
class PersistedState:
    """The state of a job. `seats` contain the members' tokens, so only this user may read it."""

    job: str
    origin: int
    state: JobState
    formation: Formation | None
    seats: tuple[Seat, ...]
    recoveries: Recoveries
    summary: Record | None
    warnings: tuple[str, ...] = ()

    def to_record(self) -> Record:
        formation = None if self.formation is None else asdict(self.formation)
        if formation is not None and self.formation is not None:
            formation["tables"] = [table.model_dump(mode="json") for table in self.formation.tables]
        seats = [
            {
                "member": asdict(seat.member),
                "token": seat.token,
                "joined": seat.joined,
                "tables": None if seat.offer.tables is None else [t.model_dump(mode="json") for t in seat.offer.tables],
                "data": seat.offer.data,
                "span": asdict(seat.offer.resume_range),
                "left_code": seat.left_code,
                "lost": seat.lost,
                "sequence": seat.last_sequence,
                "step": seat.step,
                "unsent_rows": seat.unsent_rows,
                "kept": asdict(seat.kept),
                "unseen": seat.offer.unseen,
                "met": seat.met,
            }
            for seat in self.seats
        ]
        return {
            "job": self.job,
            "origin": self.origin,
            "state": asdict(self.state),
            "formation": formation,
            "seats": seats,
            "recoveries": self.recoveries.to_record(),
            "summary": self.summary,
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_record(cls, record: Record, now: float) -> PersistedState:
        """The inverse; every lease begins `now`. Keys that earlier versions did not write have defaults.

        Raises UserError for an invalid record."""
        try:
            formation = record["formation"]
            return cls(
                job=str(record["job"]),
                origin=int(record["origin"]),
                state=JobState(**record["state"]),
                formation=None if formation is None else _formation(formation),
                seats=tuple(_seat(seat, now) for seat in record["seats"]),
                recoveries=Recoveries.from_record(record["recoveries"]),
                summary=record["summary"],
                warnings=tuple(str(text) for text in record.get("warnings", ())),
            )
        except (KeyError, TypeError, ValueError) as error:
            text = f"the coordinator's stored state of the job is damaged ({type(error).__name__}: {error})"
            raise UserError(text) from error


def _formation(record: dict[str, Any]) -> Formation:
    members = tuple(Member(**member) for member in record["members"])
    tables = tuple(TableSpec(**table) for table in record["tables"])
    return Formation(**{**record, "members": members, "tables": tables, "lacking": tuple(record["lacking"])})


def _seat(record: dict[str, Any], now: float) -> Seat:
    tables = record["tables"]
    return Seat(
        Member(**record["member"]),
        record["token"],
        now,
        joined=record["joined"],
        offer=Offer(
            None if tables is None else tuple(TableSpec(**table) for table in tables),
            str(record.get("data", "")),
            ResumeRange(**record["span"]),
            str(record.get("unseen", _NOT_ASKED)),
        ),
        left_code=record["left_code"],
        lost=record["lost"],
        last_sequence=record["sequence"],
        step=int(record["step"]),
        unsent_rows=int(record["unsent_rows"]),
        kept=Kept(**record.get("kept", {})),
        met=int(record.get("met", -1)),
    )

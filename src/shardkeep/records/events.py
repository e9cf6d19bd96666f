"""Events of metrics.jsonl: what happened to members, checkpoints and the job itself.

`text` is for people. What a program needs to know is in the other keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardkeep.records.record import Part, Record, key
from shardkeep.records.training import Scores


@dataclass(frozen=True, kw_only=True)
class FormedTable(Part):
    """A table of a generation."""

    name: str = key("name", empty=str)
    dim: int | None = key("values of a row")
    optimizer: str | None = key("name of its row optimizer")


@dataclass(frozen=True, kw_only=True)
class EventMember(Part):
    """A process that an event is about."""

    role: str = key("its role", empty=str)
    index: int = key("its number in its role", empty=int)
    cause: str | None = key("how it died, in words")
    reason: str | None = key("how it ended, where its launcher or itself said so")
    lost_from: int | None = key("step since which a server's updates are lost")

    @property
    def place(self) -> tuple[str, int]:
        """Role and index."""
        return self.role, self.index


@dataclass(frozen=True, kw_only=True)
class Event(Record):
    """Something that happened. Records of kinds `phase` and `event`."""

    text: str = key("for people", empty=str)
    phase: str | None = key(
        "what happened: `registered`, `left`, `lost`, `formed`, `recovering`, `recovery`, `checkpoint`, ..."
    )
    reason: str | None = key("why the job recovers or stops, or how a process ended")
    warning: str | None = key("what is not as it should be, although training continues")
    member: EventMember | None = key("the process that registered or left")
    code: int | None = key("the exit code with which it left")
    lost: str | None = key("role of a process that died")
    lost_index: int | None = key("its number in its role")
    tables: tuple[FormedTable, ...] = key("tables of the generation that formed", empty=tuple)
    journal: str | None = key(
        "what journals of that generation survive: `off`, `os` or `fsync`; empty = there are none"
    )
    unkept: str | None = key("what could not be written")

    @property
    def formed(self) -> bool:
        """Whether a generation has formed, or a coordinator has taken one over."""
        return "tables" in self.keys


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent(Event):
    """Phase `checkpoint`: one is complete, has failed, or its period was chosen."""

    step: int | None = key("steps that it holds")
    bytes: int | None = key("size of its files; absent where it is not complete")
    seconds: float | None = key("from its step boundary until it was complete")
    held_s: float | None = key("seconds that training stood still for it")
    every_steps: int | None = key("steps between two checkpoints, where the job chose them")


@dataclass(frozen=True, kw_only=True)
class RecoveryEvent(Event):
    """Phase `recovery`: training resumes after a death."""

    step: int | None = key("step at which training resumed; null = not known yet", null=True)
    cause: str | None = key("what happened first, in words")
    died: tuple[EventMember, ...] = key("who died", empty=tuple)
    generation: int | None = key("number of the generation that formed")
    seconds: float | None = key("seconds without a group")
    went_back: bool | None = key("whether the job went back to a checkpoint")
    lost_steps: int | None = key("trained steps whose updates were lost")
    lost_unsent_rows: int | None = key("rows whose residual died with a worker")


@dataclass(frozen=True, kw_only=True)
class ProgressiveEvent(Event, Scores):
    """Phase `progressive`: scores of samples before training on them."""


PHASES: Mapping[str, type[Event]] = {
    "checkpoint": CheckpointEvent,
    "recovery": RecoveryEvent,
    "progressive": ProgressiveEvent,
}
"""The phases that say figures; those of another name are an `Event`."""


def event_of(found: Mapping[str, Any]) -> Event:
    """The event of a JSON object."""
    return PHASES.get(str(found.get("phase")), Event).of(found)

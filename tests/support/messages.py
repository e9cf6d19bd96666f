"""Messages as objects, section by section: packed to the wire's form and read back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardkeep.base.arrays import Bytes
from shardkeep.ps.wire import message as wire
from shardkeep.ps.wire.message import Kind, allocate, read


@dataclass(frozen=True, slots=True)
class Section:
    """One table's part of a message. `ids` and `values` are encoded; `rows` says how many they are."""

    table: int
    rows: int
    ids: Bytes
    values: Bytes
    id_format: int = 0
    value_format: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    kind: Kind
    generation: int
    rank: int
    step: int
    sections: tuple[Section, ...] = ()
    value: int = 0


def pack(message: Message) -> Bytes:
    """The message as one fresh uint8 array."""
    sections = message.sections
    directory = [(s.table, s.rows, s.ids.size, s.values.size, s.id_format, s.value_format) for s in sections]
    columns = np.array(directory, dtype=np.int64).reshape(-1, 6).T
    packed = allocate(
        message.kind,
        generation=message.generation,
        rank=message.rank,
        step=message.step,
        value=message.value,
        tables_S=columns[0],
        rows_S=columns[1],
        id_bytes_S=columns[2],
        value_bytes_S=columns[3],
        id_formats_S=columns[4],
        value_formats_S=columns[5],
    )
    for s, section in enumerate(sections):
        packed.buffer[packed.ids_at_S1[s] : packed.ids_at_S1[s + 1]] = section.ids
        packed.values_of(s)[:] = section.values
    return packed.buffer


def unpack(buffer: Bytes) -> Message:
    """The message in `buffer` as objects; its sections are views of it. Raises CorruptMessage."""
    packed = read(buffer)
    sections = tuple(
        Section(
            table=int(packed.tables_S[s]),
            rows=int(packed.rows_S[s]),
            ids=packed.buffer[packed.ids_at_S1[s] : packed.ids_at_S1[s + 1]],
            values=packed.values_of(s),
            id_format=int(packed.id_formats_S[s]),
            value_format=int(packed.value_formats_S[s]),
        )
        for s in range(packed.tables_S.size)
    )
    return Message(packed.kind, packed.generation, packed.rank, packed.step, sections, packed.value)


def text_of(message: Message) -> str:
    """The text of an ASK, ANSWER or ERROR."""
    return wire.text_of(read(pack(message)))

"""From the sections of a message to ids and gradients. A message is wholly valid before any of it is used.

Knows the tables' specs only: no rows, no gate.
"""
# U = unique ids, D = embedding dim

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardkeep.base.errors import CorruptMessage, ProtocolError
from shardkeep.compression.codec import value_codec
from shardkeep.ps.config import TableSpec
from shardkeep.ps.message import Message, Section
from shardkeep.ps.shard import kernels

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]
Gradients = dict[int, tuple[Ids, Rows]]
"""A decoded push: ids (U) and gradients (U, D) by table index."""
Wanted = list[tuple[int, Ids]]
"""A decoded pull: table index and ids (U), in the order of the request."""


class Decoder:
    """Decodes requests to one server. Its methods raise CorruptMessage or ProtocolError."""

    def __init__(self, tables: Sequence[TableSpec]) -> None:
        self._tables = list(tables)

    def wanted(self, message: Message) -> Wanted:
        """The ids of a PULL or READ."""
        self._check_tables(message)
        for section in message.sections:
            if section.values.size:
                raise CorruptMessage(f"{message.kind.name} with {section.values.size} bytes of values")
        return [(section.table, self._ids(section)) for section in message.sections]

    def gradients(self, message: Message) -> Gradients:
        """The ids and gradients of a PUSH; the arrays may be views of the message."""
        self._check_tables(message)
        return {section.table: (self._ids(section), self._values(section)) for section in message.sections}

    def _check_tables(self, message: Message) -> None:
        named = [section.table for section in message.sections]
        if unknown := [index for index in named if index >= len(self._tables)]:
            raise ProtocolError(f"table {unknown[0]} of {len(self._tables)}")
        if len(set(named)) < len(named):
            raise CorruptMessage(f"a table stands twice in one {message.kind.name}")

    def _ids(self, section: Section) -> Ids:
        name = self._tables[section.table].name
        if section.id_format != 0:
            raise CorruptMessage(f"table {name}: unknown id format {section.id_format}; allowed: 0")
        if section.ids.size != 8 * section.rows:
            raise CorruptMessage(f"table {name}: {section.ids.size} bytes of ids for {section.rows} rows")
        ids_U = section.ids.view(np.int64)
        if not ids_U.flags.carray:  # read-only or unaligned: kernels take neither
            ids_U = ids_U.copy()
        if (at := kernels.first_disorder(ids_U)) >= 0:
            raise CorruptMessage(f"table {name}: id {ids_U[at]} follows {ids_U[at - 1]}; ids must rise")
        return ids_U

    def _values(self, section: Section) -> Rows:
        spec = self._tables[section.table]
        codec = value_codec(section.value_format)
        if section.values.size != section.rows * codec.row_bytes(spec.dim):
            raise CorruptMessage(
                f"table {spec.name}: {section.values.size} bytes of {codec.name} values "
                f"for {section.rows} rows of {spec.dim}"
            )
        return codec.decode(section.values, spec.dim).reshape(section.rows, spec.dim)

"""Compares what the workers derive from config and data: their tables, the data's fingerprint. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from shardkeep.base.errors import JobError, ProtocolError, UserError
from shardkeep.ps.config import TableSpec
from shardkeep.ps.control.records import Formation, Member


def agreed_tables(workers: Sequence[tuple[Member, tuple[TableSpec, ...] | None]]) -> tuple[TableSpec, ...]:
    """The tables that all workers define. Raises JobError if they differ, ProtocolError if a worker sent none."""
    first, tables = workers[0][0], workers[0][1] or ()
    for member, told in workers:
        if told is None:
            raise ProtocolError(f"{member} joined without table definitions")
        difference = first_difference(tables, told, first.name, member.name)
        if difference:
            raise JobError(f"the workers' tables differ: {difference}; all must read the same config and data")
    return tables


def agreed_data(workers: Sequence[tuple[Member, str]], before: Formation | None) -> tuple[str, list[str]]:
    """The fingerprint of the data that all workers read, and warnings about evaluation data that differ.

    `before`: the last formation of this start of the job. Raises UserError if the training data differ."""
    known, whose = (before.data, "the job began with") if before is not None else ("", "")
    remarks = []
    for member, data in workers:
        if not known:
            known, whose = data, f"{member} reads"
        for what, mine, others in zip(("training", "evaluation"), _parts(data), _parts(known), strict=True):
            if not data or mine == others:
                continue
            text = f"{member} reads other {what} data (fingerprint {mine}) than {whose} (fingerprint {others})"
            if what == "training":
                raise UserError(f"{text}; all workers must read the same files until the job ends")
            remarks.append(f"{text}; figures of evaluations cannot be compared")
    return known, remarks


def _parts(fingerprint: str) -> tuple[str, str]:
    train, _, evaluation = fingerprint.partition("-")
    return train, evaluation


def first_difference(
    left: Sequence[TableSpec], right: Sequence[TableSpec], left_name: str, right_name: str
) -> str | None:
    """The first difference in words, order included (a table's position is its number on the wire), or None."""
    left_tables, right_tables = [t.name for t in left], [t.name for t in right]
    for have, lack, who, other in (
        (left_tables, right_tables, left_name, right_name),
        (right_tables, left_tables, right_name, left_name),
    ):
        missing = [name for name in have if name not in lack]
        if missing:
            return f"{who} has table {missing[0]}, {other} has not"
    if left_tables != right_tables:
        orders = [", ".join(names) for names in (left_tables, right_tables)]
        return f"their order is {orders[0]} on {left_name} and {orders[1]} on {right_name}"
    for a, b in zip(left, right, strict=True):
        flat_a, flat_b = _flat(a), _flat(b)
        for key in sorted(flat_a | flat_b):
            ours, theirs = flat_a.get(key), flat_b.get(key)
            if ours != theirs:
                return f"{a.name}.{key} is {ours} on {left_name} and {theirs} on {right_name}"
    return None


def _flat(table: TableSpec) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in table.model_dump(mode="json").items():
        found |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
    return found

"""What members must agree on: versions, the config, the tables that workers derive from it and from data, the data's
fingerprint."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from shardkeep.base.config.differences import differences, listed
from shardkeep.base.errors import JobError, ProtocolError, UserError
from shardkeep.ps.config import TableSpec
from shardkeep.ps.control.records import PROTOCOL_VERSION, Formation, Hello, Member, Record

MUST_AGREE = ("shardkeep", "torch")
"""torch too: its RPC envelope and its collectives are not promised to be stable between releases."""


def own_versions() -> dict[str, str]:
    """Versions of shardkeep, torch and Python; a package without metadata is "unknown"."""
    return {
        "shardkeep": _version("shardkeep"),
        "torch": _version("torch"),
        "python": platform.python_version(),
    }


def check_versions(hello: Hello, own: Mapping[str, str]) -> None:
    """Raises ProtocolError that names both versions where they must agree and do not."""
    who = hello.member.name
    theirs, ours = (versions.get("shardkeep", "unknown") for versions in (hello.versions, own))
    if hello.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"{who} speaks control protocol {hello.protocol_version} (shardkeep {theirs}), the coordinator "
            f"speaks {PROTOCOL_VERSION} (shardkeep {ours}); install the same version everywhere"
        )
    for package in MUST_AGREE:
        theirs, ours = hello.versions.get(package, "unknown"), own.get(package, "unknown")
        if theirs != ours:
            raise ProtocolError(
                f"{who} runs {package} {theirs}, the coordinator {ours}; install the same version everywhere"
            )


def _version(package: str) -> str:
    try:
        return version(package).partition("+")[0]  # 2.13.0+cpu and 2.13.0+cu130 speak the same protocol
    except PackageNotFoundError:
        return "unknown"


def check_settings(member: Member, settings: Record, own: Record) -> None:
    """Raises UserError for a config that is not the coordinator's. Whole configs are compared, not digests of them, to
    name what differs. {} = not known."""
    if found := list(differences(own, settings)) if settings and own else []:
        raise UserError(
            f"{member.name} has another config than the coordinator: {listed(found)}; a config may change between two "
            "starts of a job alone"
        )


def agreed_tables(workers: Sequence[tuple[Member, tuple[TableSpec, ...]]]) -> tuple[TableSpec, ...]:
    """The tables that all workers define. Raises JobError if they differ."""
    first, tables = workers[0]
    for member, member_tables in workers:
        difference = member_tables != tables and _first_difference(tables, member_tables, first.name, member.name)
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
        for what, own_part, other_part in zip(("training", "evaluation"), _parts(data), _parts(known), strict=True):
            if not data or own_part == other_part:
                continue
            text = f"{member} reads other {what} data (fingerprint {own_part}) than {whose} (fingerprint {other_part})"
            if what == "training":
                raise UserError(f"{text}; all workers must read the same files until the job ends")
            remarks.append(f"{text}; figures of evaluations cannot be compared")
    return known, remarks


def _parts(fingerprint: str) -> tuple[str, str]:
    train, _, evaluation = fingerprint.partition("-")
    return train, evaluation


def _first_difference(left: Sequence[TableSpec], right: Sequence[TableSpec], one: str, other: str) -> str | None:
    """The first difference in words, order included (a table's position is its number on the wire), or None."""
    before, now = ({table.name: table.model_dump(mode="json") for table in tables} for tables in (left, right))
    for each in differences(before, now):
        if len(each.keys) > 1:
            return f"{each.key} is {each.before} on {one} and {each.now} on {other}"
        has, lacks = (one, other) if each.now is None else (other, one)
        return f"{has} has table {each.key}, {lacks} has not"
    orders = [", ".join(tables) for tables in (before, now)]
    return None if orders[0] == orders[1] else f"their order is {orders[0]} on {one} and {orders[1]} on {other}"

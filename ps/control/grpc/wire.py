"""protobuf <-> records. Pure functions."""

from __future__ import annotations

import json
from typing import Any, cast

from pydantic import ValidationError

from shardkeep.base.errors import ProtocolError
from shardkeep.proto import control_pb2 as pb
from shardkeep.ps.config import TableSpec
from shardkeep.ps.control.records import (
    Admission,
    Formation,
    Hello,
    JobState,
    Kept,
    Member,
    MemberStatus,
    Offer,
    Record,
    ResumeRange,
    Role,
    Shared,
    Status,
)


def member_to_pb(member: Member) -> pb.Member:
    return pb.Member(role=member.role, index=member.index, host=member.host, pid=member.pid, started=member.started)


def member_from_pb(message: pb.Member) -> Member:
    return Member(cast(Role, message.role), message.index, message.host, message.pid, message.started)


def hello_to_pb(hello: Hello) -> pb.RegisterRequest:
    return pb.RegisterRequest(
        protocol_version=hello.protocol_version,
        member=member_to_pb(hello.member),
        versions=hello.versions,
        token=hello.token,
    )


def hello_from_pb(message: pb.RegisterRequest) -> Hello:
    return Hello(member_from_pb(message.member), message.token, message.protocol_version, dict(message.versions))


def job_to_pb(job: JobState) -> pb.JobState:
    return pb.JobState(
        state=job.state,
        message=job.message,
        exit_code=-1 if job.exit_code is None else job.exit_code,
        lost=job.lost,
        generation=job.generation,
        version=job.version,
    )


def job_from_pb(message: pb.JobState) -> JobState:
    code = None if message.exit_code < 0 else message.exit_code
    return JobState(message.state, message.message, code, message.lost, message.generation, message.version)


def table_to_pb(table: TableSpec) -> pb.Table:
    return pb.Table(
        name=table.name,
        dim=table.dim,
        optimizer_json=table.optimizer.model_dump_json(),
        init_json=table.init.model_dump_json(),
        admit_json="" if table.admit is None else table.admit.model_dump_json(),
        evict_json="" if table.evict is None else table.evict.model_dump_json(),
        rows=table.rows,
        state=table.state,
        freeze=table.freeze,
        compression_json="" if table.compression is None else table.compression.model_dump_json(),
    )


def table_from_pb(message: pb.Table) -> TableSpec:
    """Raises ProtocolError where the other side's table is not one of ours."""
    parts = {
        "optimizer": record_from_json(message.optimizer_json),
        "init": record_from_json(message.init_json),
        "admit": record_from_json(message.admit_json) if message.admit_json else None,
        "evict": record_from_json(message.evict_json) if message.evict_json else None,
        "rows": message.rows,
        "state": message.state,
        "freeze": message.freeze,
        "compression": record_from_json(message.compression_json) if message.compression_json else None,
    }
    try:
        return TableSpec.model_validate({"name": message.name, "dim": message.dim, **parts})
    except ValidationError as error:
        raise ProtocolError(f"table {message.name!r} is not understood: {error.errors()[0]['msg']}") from error


def formation_to_pb(formation: Formation) -> pb.Formation:
    return pb.Formation(
        generation=formation.generation,
        store_host=formation.store_host,
        store_port=formation.store_port,
        members=[member_to_pb(member) for member in formation.members],
        tables=[table_to_pb(table) for table in formation.tables],
        start_step=formation.start_step,
        source=formation.source,
        lacking=formation.lacking,
        origin=formation.origin,
        data=formation.data,
        checkpoints=formation.checkpoints,
    )


def formation_from_pb(message: pb.Formation) -> Formation:
    return Formation(
        generation=message.generation,
        store_host=message.store_host,
        store_port=message.store_port,
        members=tuple(member_from_pb(member) for member in message.members),
        tables=tuple(table_from_pb(table) for table in message.tables),
        start_step=message.start_step,
        source=message.source,
        lacking=tuple(message.lacking),
        origin=message.origin,
        data=message.data,
        checkpoints=message.checkpoints if message.HasField("checkpoints") else None,
    )


def resume_range_to_pb(one: ResumeRange) -> pb.Span:
    return pb.Span(
        first=one.first, last=one.last, holds=one.holds, saved=one.saved, lost_from=one.lost_from, why=one.why
    )


def resume_range_from_pb(message: pb.Span) -> ResumeRange:
    lost_from = message.lost_from if message.HasField("lost_from") else None
    return ResumeRange(message.first, message.last, message.holds, message.saved, lost_from, message.why)


def offer_to_pb(offer: Offer) -> pb.JoinRequest:
    """A request to join with the offer alone."""
    return pb.JoinRequest(
        has_tables=offer.tables is not None,
        tables=[table_to_pb(table) for table in offer.tables or ()],
        data=offer.data,
        span=resume_range_to_pb(offer.resume_range),
        unseen=offer.unseen,
    )


def offer_from_pb(message: pb.JoinRequest) -> Offer:
    tables = tuple(table_from_pb(table) for table in message.tables) if message.has_tables else None
    return Offer(tables, message.data, resume_range_from_pb(message.span), message.unseen)


def kept_to_pb(kept: Kept) -> pb.Kept:
    return pb.Kept(host=kept.host, folder=kept.folder)


def kept_from_pb(message: pb.Kept) -> Kept:
    return Kept(message.host, message.folder)


def admission_to_pb(admission: Admission, job: str) -> pb.RegisterReply:
    formation, shared = admission.formation, admission.shared
    return pb.RegisterReply(
        config_yaml=admission.config_yaml,
        lease_s=admission.lease_s,
        job=job,
        formation=None if formation is None else formation_to_pb(formation),
        kept=kept_to_pb(admission.kept),
        shared=None if shared is None else pb.Shared(folder=shared.folder, token=shared.token),
        run_dir=admission.run_dir,
    )


def admission_from_pb(message: pb.RegisterReply) -> Admission:
    return Admission(
        message.config_yaml,
        message.lease_s,
        formation_from_pb(message.formation) if message.HasField("formation") else None,
        kept_from_pb(message.kept),
        Shared(message.shared.folder, message.shared.token) if message.HasField("shared") else None,
        message.run_dir,
    )


def status_to_pb(status: Status) -> pb.StatusReply:
    job = JobState(status.state, status.message, status.exit_code, generation=status.generation)
    return pb.StatusReply(
        job=job_to_pb(job),
        members=[_member_status_to_pb(member) for member in status.members],
        progress_json=record_to_json(status.progress),
        evaluation_json=record_to_json(status.evaluation),
        summary_json="" if status.summary is None else record_to_json(status.summary),
        events_json=[record_to_json(event) for event in status.events],
        missing=status.missing,
        left_s=status.left_s,
        telemetry_json=[record_to_json(record) for record in status.telemetry],
    )


def status_from_pb(message: pb.StatusReply) -> Status:
    job = job_from_pb(message.job)
    return Status(
        state=job.state,
        message=job.message,
        exit_code=job.exit_code,
        generation=job.generation,
        members=tuple(_member_status_from_pb(member) for member in message.members),
        progress=record_from_json(message.progress_json),
        evaluation=record_from_json(message.evaluation_json),
        summary=record_from_json(message.summary_json) if message.summary_json else None,
        events=tuple(record_from_json(event) for event in message.events_json),
        missing=tuple(message.missing),
        left_s=message.left_s,
        telemetry=tuple(record_from_json(record) for record in message.telemetry_json),
    )


def record_to_json(record: Record) -> str:
    """Numpy scalars become numbers. Raises TypeError where a value is not JSON."""
    return json.dumps(record, default=_plain, separators=(",", ":"))


def record_from_json(text: str) -> Record:
    """Raises ProtocolError unless `text` is a JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:  # the second: brackets in brackets
        raise ProtocolError(f"a record is not JSON: {text[:60]!r}") from error
    if not isinstance(found, dict):
        raise ProtocolError(f"a record is not a JSON object: {text[:60]!r}")
    return found


def _plain(value: Any) -> Any:
    convert = getattr(value, "tolist", None)  # numpy scalars and arrays, tensors
    if callable(convert):
        return convert()
    raise TypeError(f"{type(value).__name__} is not JSON: {value!r:.60}")


def _member_status_to_pb(member: MemberStatus) -> pb.MemberStatus:
    return pb.MemberStatus(
        member=pb.Member(role=member.role, index=member.index, host=member.host, pid=member.pid),
        condition=member.condition,
        age_s=member.age_s,
        step=member.step,
        phase=member.phase,
    )


def _member_status_from_pb(message: pb.MemberStatus) -> MemberStatus:
    m = member_from_pb(message.member)
    return MemberStatus(m.role, m.index, m.host, m.pid, message.condition, message.age_s, message.step, message.phase)

"""The control plane's decoders under bytes that nobody of ours would send: a record, or one of our own errors."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import example, given, strategies as st

from shardkeep.base.errors import ProtocolError, ShardkeepError
from shardkeep.proto import control_pb2 as pb
from shardkeep.ps.config import TableSpec
from shardkeep.ps.control.grpc.messages import from_message, to_message
from shardkeep.ps.control.record_forms import record_from_json
from shardkeep.ps.control.records import (
    Formation,
    Hello,
    JobState,
    JobStatus,
    Member,
    MemberStatus,
    Offer,
    Registration,
    ResumeRange,
)
from tests.support.control_job import TABLES, VERSIONS, Job
from tests.support.examples import examples

MEMBER = Member("worker", 1, "10.0.0.7", 100)
STATUS = JobStatus(
    "training", "", None, 1, (MemberStatus("server", 0, "h", 1, "joined", 0.5),), {"step": 1}, {}, {}, ({"seq": 1},)
)
RECORDS: dict[str, tuple[Any, type[Message]]] = {
    "hello": (Hello(MEMBER, "token", 1, VERSIONS), pb.RegisterRequest),
    "table": (TABLES[0], pb.Table),
    "offer": (Offer(TABLES, "1f-2e", ResumeRange(3, 9, lost_from=4)), pb.Offer),
    "admission": (Registration("name: job", 4.0, "job", Formation(1, "h", 4000, (MEMBER,), TABLES)), pb.RegisterReply),
    "formation": (Formation(1, "h", 4000, (MEMBER,), TABLES, lacking=(1, 2), checkpoints=""), pb.Formation),
    "job": (JobState("failed", "so it is", 1, True, 2, 3), pb.JobState),
    "status": (STATUS, pb.StatusReply),
}


@st.composite
def mutated(draw: Any, whole: bytes) -> bytes:
    found = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(found) - 1, 0)))
        found[at : at + draw(st.integers(0, 4))] = draw(st.binary(max_size=8))
    return bytes(found)


@examples(240)
@given(name=st.sampled_from(sorted(RECORDS)), data=st.data())
def test_a_decoder_gives_a_record_or_a_protocol_error(name: str, data: st.DataObject) -> None:
    known, kind = RECORDS[name]
    whole = to_message(known, kind)
    assert from_message(whole, type(known)) == known
    content = data.draw(st.one_of(mutated(whole.SerializeToString()), st.binary(max_size=80)))
    with contextlib.suppress(DecodeError):  # what gRPC answers on its own
        parsed = kind.FromString(content)
        with contextlib.suppress(ProtocolError):
            sent = to_message(from_message(parsed, type(known)), kind)
            again = to_message(from_message(sent, type(known)), kind)
            assert again == sent or "nan" in str(sent)  # what it holds can be sent on


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.floats(), st.integers(-(2**70), 2**70), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=8,
)
TEXTS = st.one_of(
    st.text(max_size=60),
    JSON.map(json.dumps),
    st.sampled_from(["[" * 3000, '{"a":' * 3000, "9" * 5000, '{"a":' + "9" * 5000 + "}"]),
)


@examples(120)
@given(text=TEXTS)
def test_a_record_is_an_object_or_a_protocol_error(text: str) -> None:
    with contextlib.suppress(ProtocolError):
        assert isinstance(record_from_json(text), dict)


@examples(80)
@given(optimizer=TEXTS, init=TEXTS, name=st.text(max_size=8), dim=st.integers(0, 2**32 - 1))
@example(TABLES[0].optimizer.model_dump_json(), TABLES[0].init.model_dump_json(), "user", 8)
def test_a_table_of_any_content_is_a_table_or_a_protocol_error(optimizer: str, init: str, name: str, dim: int) -> None:
    with contextlib.suppress(ProtocolError):
        sent = pb.Table(name=name, dim=dim, optimizer_json=optimizer, init_json=init, dtype="fp32", state_dtype="fp32")
        table = from_message(sent, TableSpec)
        assert (table.name, table.dim) == (name, dim)
        assert from_message(to_message(table, pb.Table), TableSpec) == table


def test_a_frozen_and_a_compressed_table_arrive_as_they_were_sent() -> None:
    compression = {"push": {"values": "int8", "scale": "fp16", "keep_rows": 0.1}, "pull": {"values": "fp16"}}
    tables = [TableSpec(name="f", dim=4, freeze=True), TableSpec(name="c", dim=4, compression=compression)]
    for table in tables:
        assert from_message(to_message(table, pb.Table), TableSpec) == table
    strange = pb.Table(
        name="t", dim=4, optimizer_json='{"name": "sgd"}', init_json="{}", compression_json='{"push": 1}'
    )
    with pytest.raises(ProtocolError, match="'t' is not understood"):
        from_message(strange, TableSpec)


@examples(80)
@given(data=st.data())
def test_a_coordinator_refuses_a_strange_registration_with_an_error_of_ours(data: st.DataObject) -> None:
    job = Job()
    whole = to_message(Hello(MEMBER, "token", 1, VERSIONS), pb.RegisterRequest).SerializeToString()
    with contextlib.suppress(DecodeError):
        request = pb.RegisterRequest.FromString(data.draw(mutated(whole)))
        with contextlib.suppress(ShardkeepError):
            job.coordinator.register(from_message(request, Hello))
    assert job.state.state == "forming" and len(job.coordinator.status().members) <= 1

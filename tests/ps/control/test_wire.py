"""Records survive protobuf and any other bytes do no harm, every error has its status code, and the committed stubs
match control.proto."""

from __future__ import annotations

import contextlib
import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import example, given, strategies as st

from shardkeep.base import errors
from shardkeep.base.errors import ProtocolError, ShardkeepError
from shardkeep.proto import control_pb2 as pb
from shardkeep.ps.config import TableSpec
from shardkeep.ps.control.grpc.messages import from_message, to_message
from shardkeep.ps.control.grpc.statuses import CODES, code_of
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
from shardkeep.ps.server.table.optimizers.ftrl import FtrlConfig
from shardkeep.ps.server.table.optimizers.registry import OPTIMIZERS as REGISTRY
from shardkeep.ps.server.table.optimizers.sgd import SgdConfig
from tests.support.cases import every
from tests.support.control_job import TABLES, VERSIONS, Job
from tests.support.examples import examples

MEMBER = Member("worker", 3, "10.1.2.3", 4242)
STATUS = JobStatus(
    "training", "", None, 1, (MemberStatus("server", 0, "h", 1, "joined", 0.5, -1, "serving"),),
    {"step": 1}, {"auc": 0.5}, {}, ({"seq": 1}, {"seq": 2}),
)  # fmt: skip
RECORDS: dict[str, tuple[Any, type[Message]]] = {
    "hello": (Hello(MEMBER, "token", 1, VERSIONS), pb.RegisterRequest),
    "table": (TABLES[0], pb.Table),
    "offer": (Offer(TABLES, "1f-2e", ResumeRange(3, 9, lost_from=4), settings={"seed": 3}), pb.Offer),
    "admission": (Registration("name: job", 4.0, "job", Formation(1, "h", 4000, (MEMBER,), TABLES)), pb.RegisterReply),
    "formation": (Formation(1, "h", 4000, (MEMBER,), TABLES, lacking=(1, 2), checkpoints=""), pb.Formation),
    "job": (JobState("failed", "so it is", 1, True, 2, 3), pb.JobState),
    "status": (STATUS, pb.StatusReply),
}
OPTIMIZERS = [SgdConfig(lr=1 / 3), FtrlConfig(l1=1e-7), *(entry.config() for entry in REGISTRY.values())]
TABLES_OF_ALL_KINDS = [
    *(TableSpec(name="größe", dim=7, optimizer=optimizer) for optimizer in OPTIMIZERS),
    TableSpec(name="t", dim=4, optimizer={"name": "adam"}, dtype="int8", state_dtype="bf16"),  # type: ignore[arg-type]
    TableSpec(name="f", dim=4, freeze=True),
    TableSpec(name="c", dim=4, compression="balanced"),
]


def test_records_survive_the_wire_bit_for_bit() -> None:
    formation = Formation(2, "h", 65535, (MEMBER,), tuple(TABLES_OF_ALL_KINDS), start_step=2**40, data="1f-2e")
    bytes_ = to_message(formation, pb.Formation).SerializeToString()
    assert from_message(pb.Formation.FromString(bytes_), Formation) == formation
    for exit_code, summary in ((None, {"steps": 3}), (0, None), (2, {})):
        job = JobState("failed", "so it is", exit_code, True, 3, 17)
        assert from_message(to_message(job, pb.JobState), JobState) == job
        status = replace(STATUS, exit_code=exit_code, summary=summary)
        assert from_message(to_message(status, pb.StatusReply), JobStatus) == status


@every(
    "change",
    [
        *({"optimizer_json": text} for text in ("", "{", "[1]", '{"lr": -1}')),
        {"compression": "zstd"},
        {"dtype": "int3"},
    ],
)
def test_a_table_of_another_kind_is_refused(change: dict[str, str]) -> None:
    table = to_message(TableSpec(name="t", dim=4), pb.Table)
    for field, text in change.items():
        setattr(table, field, text)
    with pytest.raises(ProtocolError, match=r"TableSpec 't' is not understood|a record is "):
        from_message(table, TableSpec)


EXCEPTIONS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ShardkeepError)]


@every("kind", EXCEPTIONS, ids=lambda kind: kind.__name__)
def test_every_error_keeps_its_exit_code_over_the_wire(kind: type[ShardkeepError]) -> None:
    code = code_of(kind("told"))
    back = next((known for known, found in CODES.items() if found == code), ShardkeepError)
    assert back.exit_code == kind.exit_code
    assert issubclass(kind, back) or code == CODES[errors.RemoteError]


def test_status_codes_are_unambiguous_and_none_that_grpc_makes_itself() -> None:
    assert len(set(CODES.values())) == len(CODES)
    made = {"CANCELLED", "UNKNOWN", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED"}
    assert not made & {code.name for code in CODES.values()}


def test_the_committed_stubs_match_the_proto() -> None:
    script = Path(__file__).parents[3] / "scripts" / "gen-proto"
    assert runpy.run_path(str(script))["drifted"]() == []


# ---- bytes that nobody of ours would send: a record, or one of our own errors ----


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

"""Records survive protobuf, every error has its status code, and the committed stubs match control.proto."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from shardkeep.base import errors
from shardkeep.base.errors import ProtocolError, ShardkeepError
from shardkeep.proto import control_pb2 as pb
from shardkeep.ps.config import TableSpec
from shardkeep.ps.control.grpc.messages import from_message, to_message
from shardkeep.ps.control.grpc.statuses import CODES, code_of
from shardkeep.ps.control.records import Formation, Hello, JobState, JobStatus, Member, MemberStatus
from shardkeep.ps.server.table.optimizers.ftrl import FtrlConfig
from shardkeep.ps.server.table.optimizers.registry import OPTIMIZERS as REGISTRY, RowOptimizerConfig
from shardkeep.ps.server.table.optimizers.sgd import SgdConfig
from tests.support.cases import every

MEMBER = Member("worker", 3, "10.1.2.3", 4242)
OPTIMIZERS = [SgdConfig(lr=1 / 3), FtrlConfig(l1=1e-7), *(entry.config() for entry in REGISTRY.values())]


@every("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_a_formation_survives_the_wire_bit_for_bit(
    optimizer: RowOptimizerConfig,
) -> None:
    table = TableSpec(name="größe", dim=7, optimizer=optimizer)
    formation = Formation(2, "h", 65535, (MEMBER,), (table,), start_step=2**40, data="1f-2e")
    bytes_ = to_message(formation, pb.Formation).SerializeToString()
    assert from_message(pb.Formation.FromString(bytes_), Formation) == formation


@every("exit_code", [None, 0, 2], ids=str)
def test_a_job_state_survives_the_wire(exit_code: int | None) -> None:
    job = JobState("failed", "so it is", exit_code, True, 3, 17)
    assert from_message(to_message(job, pb.JobState), JobState) == job


@every("summary", [None, {}, {"steps": 3}], ids=str)
def test_a_status_survives_the_wire(summary: dict[str, int] | None) -> None:
    member = MemberStatus("server", 0, "h", 1, "joined", 0.5, -1, "serving")
    status = JobStatus("training", "", None, 1, (member,), {"step": 1}, {"auc": 0.5}, summary, ({"seq": 1}, {"seq": 2}))
    assert from_message(to_message(status, pb.StatusReply), JobStatus) == status


def test_a_hello_survives_the_wire() -> None:
    hello = Hello(MEMBER, "token", 1, {"torch": "2.13.0"})
    assert from_message(to_message(hello, pb.RegisterRequest), Hello) == hello


@every("text", ["", "{", "[1]", '{"lr": -1}'], ids=["empty", "broken", "list", "value"])
def test_a_table_of_another_kind_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError):
        from_message(
            pb.Table(name="t", dim=4, optimizer_json=text, init_json="{}", dtype="fp32", state_dtype="fp32"), TableSpec
        )


def test_the_precision_of_a_table_survives_the_wire_and_another_one_is_refused() -> None:
    table = TableSpec(name="t", dim=4, optimizer={"name": "adam"}, dtype="int8", state_dtype="bf16")  # type: ignore[arg-type]
    sent = to_message(table, pb.Table)
    assert from_message(sent, TableSpec) == table
    sent.dtype = "int3"
    with pytest.raises(ProtocolError, match="TableSpec 't' is not understood"):
        from_message(sent, TableSpec)


EXCEPTIONS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ShardkeepError)]


@every("kind", EXCEPTIONS, ids=lambda kind: kind.__name__)
def test_every_error_keeps_its_exit_code_over_the_wire(kind: type[ShardkeepError]) -> None:
    code = code_of(kind("told"))
    back = next((known for known, found in CODES.items() if found == code), ShardkeepError)
    assert back.exit_code == kind.exit_code
    assert issubclass(kind, back) or code == CODES[errors.RemoteError]


def test_status_codes_are_unambiguous() -> None:
    assert len(set(CODES.values())) == len(CODES)


@every("name", ["CANCELLED", "UNKNOWN", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED"])
def test_codes_that_grpc_makes_itself_stand_for_none_of_our_refusals(name: str) -> None:
    assert name not in {code.name for code in CODES.values()}


def test_the_committed_stubs_match_the_proto() -> None:
    script = Path(__file__).parents[3] / "scripts" / "gen-proto"
    assert runpy.run_path(str(script))["drifted"]() == []

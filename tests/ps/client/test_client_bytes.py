"""Formats of rows and gradients as a client sends them, and every byte that is counted."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from shardkeep.compression.config import CompressionConfig, PullConfig, PushConfig
from shardkeep.compression.selection.shares import num_kept
from shardkeep.ps.transport.metered import WorkerTraffic
from shardkeep.ps.wire.admin import GetReport
from shardkeep.ps.wire.message import Kind
from tests.support.cases import every
from tests.support.clients import Recorded, connect, ids_of, many, metered, services
from tests.support.codecs import codec_of, there_and_back
from tests.support.examples import examples
from tests.support.one_table import pulled


def messages(parts: dict[str, int]) -> int:
    """The messages themselves, without what RPC adds."""
    return sum(parts.values()) - parts.get("rpc", 0)


@examples(40)
@given(
    keep=st.sampled_from([1.0, 0.5, 0.25, 0.01]),
    push=st.sampled_from(["fp32", "fp16"]),
    pull=st.sampled_from(["fp32", "fp16"]),
    num_servers=st.integers(1, 3),
    num_ids=st.integers(0, 60),
    seed=st.integers(0, 99),
)
def test_every_format_keeps_signs_sends_the_largest_rows_and_counts_every_byte(
    keep: float, push: str, pull: str, num_servers: int, num_ids: int, seed: int
) -> None:
    recorded = [Recorded(shard) for shard in services(num_servers, pull={"values": pull})]
    sent_later = PushConfig(keep=keep, values=push, pool_rows=200 if keep < 1.0 else 0)
    compression = CompressionConfig(push=sent_later, pull=PullConfig(values=pull))
    traffic = WorkerTraffic()
    client = connect(recorded, traffic=traffic, compression=compression)
    ids = many(num_ids, seed)
    grad = np.random.default_rng(seed).normal(size=(ids.size, 3)).astype(np.float32) + np.float32(0.01)
    request = client.request({"item": ids, "user": ids[: ids.size // 2]})
    client.pull(0, request).result()
    client.push(0, request, {"item": grad})
    after = client.pull(1, request).result()["item"]  # zeros - 1.0 * gradient, through both formats
    client.wait_acknowledged()
    sent = np.flatnonzero(after.any(axis=1))
    codecs = codec_of(push), codec_of(pull)
    assert sent.size == (num_kept(ids.size, keep) if ids.size else 0)
    assert (np.sign(after[sent]) == -np.sign(grad[sent])).all()
    carried = there_and_back(codecs[0], grad[sent])
    assert (after[sent] == there_and_back(codecs[1], -carried)).all()
    norms = np.linalg.norm(grad, axis=1)
    assert sent.size == ids.size or norms[sent].min() >= np.delete(norms, sent).max()
    totals = traffic.ledger.totals()
    assert messages(totals["push"]) == sum(server.num_bytes(Kind.PUSH) for server in recorded)
    assert messages(totals["pull"]) == sum(server.num_bytes(Kind.PULL) for server in recorded)
    assert totals["push"]["values"] == sent.size * codecs[0].row_bytes(3)
    assert totals["push"]["ids"] == sent.size * 8


def test_messages_retries_questions_and_what_rpc_adds_are_counted() -> None:
    recorded, traffic = Recorded(services()[0]), WorkerTraffic()
    client = connect([recorded], traffic=traffic)
    request = client.request({"user": many(10)})

    def step(number: int) -> None:
        client.pull(number, request).result()
        client.push(number, request, {"user": np.ones((10, 4), np.float32)})
        client.wait_acknowledged()

    # 129 bytes around 96 and 131 around 256 to the server, 129 around 176 and 128 around 6 back. The kernel counts the
    # same around messages of these sizes: tests/ps/rpc/test_envelope.py.
    step(0)
    assert (recorded.sizes(Kind.PULL), recorded.sizes(Kind.PUSH)) == ([(96, 176)], [(256, 6)])
    totals = traffic.ledger.totals()
    assert (totals["pull"]["rpc"], totals["push"]["rpc"]) == (129 + 129, 131 + 128)
    assert (totals["to_servers"], totals["from_servers"]) == (96 + 129 + 256 + 131, 176 + 129 + 6 + 128)
    assert totals["total"] == totals["to_servers"] + totals["from_servers"]

    step(1)
    once = traffic.ledger.totals()
    client.regroup(metered([recorded], traffic), 0, 1)
    step(1)
    step(2)
    totals = traffic.ledger.totals()
    for direction in ("pull", "push"):
        assert totals[direction]["retries"] == sum(once[direction].values()) / 2
        assert totals[direction]["values"] == once[direction]["values"] / 2 * 3
    client.read(request).result()
    client.calls.ask(GetReport(), dict)
    totals = traffic.ledger.totals()
    assert messages(totals["read"]) == recorded.num_bytes(Kind.READ) > 0
    assert totals["control"] > recorded.num_bytes(Kind.ASK) > 0


@every(("values", "saturated"), [("fp32", 0), ("fp16", 2), ("int8", 0)])
def test_values_beyond_a_16_bit_range_are_counted(values: str, saturated: int) -> None:
    push = PushConfig(values=values, second_moment=True, pool_rows=10)
    shard = services(push=push)[0]
    client = connect([shard.handle], compression=CompressionConfig(push=push))
    request = client.request({"item": ids_of(1, 2)})
    grad = np.array([[1e6, 1.0, 0.0], [-7e5, 60000.0, -1e-3]], np.float32)
    for step in range(2):
        client.push(step, request, {"item": grad})
    assert client.compressor.counts.saturated == 2 * saturated
    client.wait_acknowledged()
    assert np.isfinite(pulled(shard.tables[1], ids_of(1, 2))).all()

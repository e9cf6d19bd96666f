"""Codecs of the user's own in pushes and pulls, against real services in this process."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
import pytest

from shardkeep.base.errors import ConfigError, RemoteError, UserError
from shardkeep.compression.config import CompressionConfig
from shardkeep.compression.values.codecs import Codecs
from shardkeep.ps.config import TableSpec
from shardkeep.ps.transport.transport import LocalTransport
from shardkeep.ps.wire.message import Kind
from tests.support.cases import every
from tests.support.clients import SUMS, Job, grads_of_step, ids_of, ids_of_step, many, servers_of
from tests.support.messages import Message, Section, pack, text_of
from tests.support.services import answer, raw

EXAMPLES = "shardkeep.examples.compression"
CODECS: dict[str, Any] = {
    "sign": f"{EXAMPLES}.sign:Sign",
    "qsgd": {"name": f"{EXAMPLES}.qsgd:Qsgd", "options": {"levels": 3}},
    "fp8": f"{EXAMPLES}.fp8:Fp8",
    "huffman": f"{EXAMPLES}.huffman:Huffman",
}
OURS = "tests.support.own_codecs"
POOL = {"pool_rows": 2000}
STEPS = range(2)


def both(codec: str, **push: Any) -> dict[str, Any]:
    return {"push": {"values": CODECS[codec], **push}, "pull": {"values": CODECS[codec]}}


MOMENTS = {**POOL, "second_moment": True, "keep": 0.4}


@every(("codec", "more"), [("sign", POOL), ("qsgd", {}), ("fp8", MOMENTS), ("huffman", MOMENTS)])
def test_the_number_of_servers_changes_no_bit(codec: str, more: dict[str, Any]) -> None:
    own = {"small": {"compression": "none"}}
    jobs = [Job(own, servers=servers, workers=2, mode="sync", ids="coded", **both(codec, **more)) for servers in (1, 3)]
    one, three = (job.run(STEPS) for job in jobs)
    assert jobs[0].digests() == jobs[1].digests()
    for a, b in zip(one, three, strict=True):
        assert all(np.array_equal(x[name], y[name]) for x, y in zip(a, b, strict=True) for name in x)


def test_every_byte_of_packets_of_their_own_length_is_counted_as_what_it_is() -> None:
    """By hand: 12 codes of three kinds, 6, 3 and 3 times, take 6 + 2 * 3 + 2 * 3 bits, so 3 bytes. A packet begins with
    a scale per row and 8 bytes of lengths, and 4 moments follow it."""
    spec = TableSpec(name="one", dim=3, **SUMS)
    push = {"values": CODECS["huffman"], "pool_rows": 10, "second_moment": True}
    job = Job({}, specs=[spec], push=push, pull={"values": CODECS["huffman"]})
    request = job.client.request({"one": ids_of(1, 2, 3, 4)})
    grad = np.array([[7, 7, 0], [7, 0, -7], [7, 7, -7], [7, -7, 0]], np.float32)
    job.client.push(0, request, {"one": grad})
    (message,) = job.sent(Kind.PUSH)
    assert message.value_sizes.tolist() == [4 + 8 + 3 + 4] and message.value_formats_S.tolist() == [128 | 64]
    parts = job.traffic.ledger.totals()["push"]
    assert (parts["values"], parts["scales"], parts["moments"], parts["ids"]) == (8 + 3, 4, 4, 32)
    assert np.array_equal(job.client.pull(1, request).result()["one"], -grad)
    parts = job.traffic.ledger.totals()["pull"]
    assert (parts["values"], parts["scales"]) == (8 + 3, 4) and "moments" not in parts


def test_draws_are_of_the_step_and_the_worker_and_a_step_that_is_sent_again_has_the_same() -> None:
    job = Job({}, workers=2, mode="bounded", **both("qsgd"))
    request = [client.request({"big": many(50)}) for client in job.clients]
    rows = [[client.pull(step, request[0]).result()["big"].copy() for client in job.clients] for step in range(2)]
    assert np.array_equal(rows[0][0], rows[0][1]) and not np.array_equal(rows[0][0], rows[1][0])
    grad = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    for step in range(2):
        for client in job.clients:
            client.push(step, request[0], {"big": grad})
    sent = {(message.step, message.rank): bytes(message.values_area) for message in job.sent(Kind.PUSH)}
    assert len(set(sent.values())) == 4
    job.client.regroup(LocalTransport(job.handlers), 0, 1)
    job.client.push(1, request[0], {"big": grad})
    assert bytes(job.sent(Kind.PUSH)[-1].values_area) == sent[1, 0]


def test_random_rounding_has_the_gradients_as_its_mean() -> None:
    """Each of 150 steps rounds the same gradient otherwise; a row is minus the sum of what arrives."""
    job = Job({"big": SUMS}, push={"values": CODECS["qsgd"]})
    request = job.client.request({"big": np.arange(20)})
    grad = np.random.default_rng(1).normal(size=(20, 8)).astype(np.float32)
    for step in range(150):
        job.client.push(step, request, {"big": grad})
    job.client.wait_acknowledged()
    mean = -np.array([row for _, row in sorted(job.weights("big").items())]) / 150
    largest = np.abs(grad).max(axis=1, keepdims=True)
    assert np.abs((mean - grad) / largest).max() < 5 * 0.5 / 3 / np.sqrt(150)


@every(("push", "tag", "width"), [("int8", 9, 1 + 8), (CODECS["sign"], 128, 1 + 1)])
def test_each_direction_has_its_own_codec(push: Any, tag: int, width: int) -> None:
    job = Job({}, push={"values": push}, pull={"values": CODECS["fp8"]})
    job.run(STEPS)
    for message in job.sent(Kind.PUSH):
        assert set(message.value_formats_S.tolist()) == {tag} and message.value_sizes[0] == message.rows_S[0] * width


# ---- what is wrong with a codec ----


LOAD = {
    "no module": ("nowhere_x:Codec", {}, "module 'nowhere_x' cannot be imported"),
    "no class": (f"{OURS}:Nothing", {}, "has no 'Nothing'"),
    "no method": (
        f"{OURS}:NoPack",
        {},
        "NoPack: has no method pack; expected pack(encoded_KR: Bytes, dim: int) -> Bytes",
    ),
    "abstract": (
        f"{OURS}:Unfinished",
        {},
        "cannot be made with options {}: TypeError: Can't instantiate abstract class",
    ),
    "option": (f"{EXAMPLES}.qsgd:Qsgd", {"bit": 1}, "cannot be made with options {'bit': 1}: TypeError"),
}


@every(("name", "way"), zip(LOAD, cycle(["push", "pull"])))
def test_a_codec_that_cannot_be_loaded_is_refused_in_one_line(name: str, way: str) -> None:
    codec, options, says = LOAD[name]
    compression = CompressionConfig(**{way: {"values": {"name": codec, "options": options}}})
    with pytest.raises(ConfigError) as refused:
        Codecs(compression)
    text = str(refused.value)
    assert text.startswith(f"compression.{way}.values: ") and says in text and "\n" not in text


WRONG_SHAPE = f"{OURS}:Halved: encode returned uint8 ({{}}, 16); expected uint8 ({{}}, 32)"


def test_a_codec_that_returns_another_shape_is_named_at_both_ends() -> None:
    halved, ids = {"values": f"{OURS}:Halved"}, ids_of_step(0)
    with pytest.raises(UserError) as refused:
        pushing = Job({}, push=halved)
        pushing.client.push(0, pushing.client.request(ids), grads_of_step(0, ids))
    assert "compression.push.values: " + WRONG_SHAPE.format(*[ids["big"].size + ids["small"].size] * 2) in str(
        refused.value
    )
    pulling = Job({}, pull=halved)
    with pytest.raises(RemoteError) as answered:
        pulling.client.pull(0, pulling.client.request({"big": many(5)})).result()
    assert "compression.pull.values: " + WRONG_SHAPE.format(5, 5) in str(answered.value)


HUFFMAN = {"values": CODECS["huffman"], "pool_rows": 10, "second_moment": True}
HOSTILE: dict[str, tuple[int, int, str]] = {  # (format, bytes, error)
    "no room for moments": (128 | 64, 3, "3 bytes of 4 rows and their moments"),
    "no room for scales": (128 | 64, 7, "3 bytes of 4 rows; expected 12 and their codes"),
    "no codes": (128 | 64, 16, "0 bits are too few of 12 codes"),
    "no such tag": (130 | 64, 16, "unknown value format 130"),
}


@every("name", HOSTILE)
def test_a_section_that_is_no_packet_is_refused_and_changes_nothing(name: str) -> None:
    value_format, size, says = HOSTILE[name]
    (service,) = servers_of([TableSpec(name="one", dim=3)], compression=CompressionConfig(push=HUFFMAN))
    ids = raw(ids_of(1, 2, 3, 4))
    section = Section(0, 4, ids, np.zeros(size, np.uint8), value_format=value_format)
    message = answer(service.handle(pack(Message(Kind.PUSH, 0, 0, 0, (section,)))))
    assert message.kind is Kind.ERROR and says in text_of(message)
    assert service.tables.digests() == {"one": 0}

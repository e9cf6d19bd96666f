"""What a loop of the user's own counts: its records agree with its client, and no bit depends on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from shardkeep import Bag, EmbeddingClient, TableSpec
from shardkeep.base.errors import UserError
from shardkeep.compression.config import CompressionConfig
from shardkeep.loop.joining import join_local, loop_config
from shardkeep.loop.metering import StepMeter
from shardkeep.nn import EmbeddingBagCollection
from shardkeep.records.telemetry import check_record
from tests.support.cases import every
from tests.support.metered_loops import Records, metered_client

TABLES = [TableSpec(name="user", dim=4, optimizer={"name": "sgd", "lr": 0.5}), TableSpec(name="item", dim=3)]
IDS = torch.tensor([[1, 2], [2, 9]])


def step(client: EmbeddingClient, ids: Any = IDS, table: str = "user") -> None:
    rows = client.lookup({table: ids})
    rows[table].square().sum().backward()
    client.apply(rows)


def ended(client: EmbeddingClient, records: Records) -> dict[str, Any]:
    """The last telemetry record, after the client has left."""
    client.close()
    found: dict[str, Any] = records.of("telemetry")[-1]
    check_record(found, "worker 0")
    return found


def in_two_lookups(client: EmbeddingClient) -> None:
    lookups = [client.lookup({"user": ids}) for ids in IDS]
    for rows in lookups:
        rows["user"].square().sum().backward()
    client.apply(*lookups)


def in_bags(client: EmbeddingClient) -> None:
    rows = client.pool({"user": Bag(IDS.flatten(), torch.tensor([2, 2]))})
    rows["user"].square().sum().backward()
    client.apply(rows)


def of_a_module(client: EmbeddingClient) -> None:
    EmbeddingBagCollection(client, {"f": "user"})({"f": IDS})["f"].square().sum().backward()


@every("mode", ["sync", "bounded"])
@every("one", [step, in_two_lookups, in_bags, of_a_module])
def test_the_last_record_agrees_with_the_client(one: Callable[[EmbeddingClient], None], mode: str) -> None:
    client, records, _ = metered_client(TABLES, consistency=mode, seed=5)
    for _ in range(7):
        one(client)
    client.read({"item": torch.arange(3)})
    summary = client.summary(digest=True)
    record = ended(client, records)
    assert (record["step"], record["steps"], record["generation"]) == (7, 7, 0)
    for way in ("push", "read") if mode == "sync" else ("push", "read", "pull"):  # in sync, closing is an empty pull
        assert record["bytes"][way] == summary["bytes"][way], way
    sent = {way: sum(record["bytes"][way].values()) for way in ("pull", "push")}
    assert record["fp32_bytes"] == {**sent, "tower": 0}, "nothing is compressed"
    assert record["ids"] == 4 * 7 and record["unique_ids"] == (4 if one is in_two_lookups else 3) * 7
    assert sum(record["staleness"].values()) == sum(summary["staleness"].values()) > 0
    with EmbeddingClient.local(TABLES, consistency=mode, seed=5) as plain:
        for _ in range(7):
            one(plain)
        assert plain.summary(digest=True)["state_digest"] == summary["state_digest"], "no bit depends on the meter"


def test_compressed_bytes_are_beside_those_of_fp32() -> None:
    bytes_of = []
    for values in ("fp32", "fp16"):
        compression = CompressionConfig(pull={"values": values}, push={"values": values})
        client, records, _ = metered_client(TABLES, compression=compression)
        for _ in range(5):
            step(client, torch.arange(100))
        bytes_of.append(ended(client, records))
    for way in ("pull", "push"):
        plain, packed = (record["fp32_bytes"][way] for record in bytes_of)
        assert plain == sum(bytes_of[0]["bytes"][way].values()) > sum(bytes_of[1]["bytes"][way].values())
        assert 0 <= plain - packed < 8 * 2 * 5, "only raw values are padded"


def test_the_parts_of_a_step_are_those_of_the_clients_calls() -> None:
    client, records, clock = metered_client(TABLES)
    clock.add(100.0)  # building a model is no step
    for batch, rows in client.ahead(clock.slow([IDS] * 4, seconds=0.5), lambda ids: {"user": ids}, depth=1):
        assert batch is IDS
        clock.add(0.25)
        rows["user"].sum().backward()
        client.apply(rows)
    record = ended(client, records)
    assert record["step_ms"]["data"] == pytest.approx(500.0) and record["step_ms"]["other"] == pytest.approx(250.0)
    assert record["step_ms"]["total"] == pytest.approx(750.0), "no time passes in the client's calls"


def test_an_evaluation_between_two_steps_belongs_to_none() -> None:
    client, records, clock = metered_client(TABLES)
    for number in range(4):
        step(client)
        clock.add(0.01)
        if number == 1:
            with torch.no_grad():
                client.read({"user": IDS})
                clock.add(30.0)  # the model scores
        if number == 2:
            client.summary()
    record = ended(client, records)
    assert record["step_ms"]["total"] == pytest.approx(10.0), "40 ms of the loop, 30 s of the evaluation"


def test_a_read_within_a_step_is_a_wait_of_this_step_and_one_between_steps_of_none() -> None:
    client, records, clock = metered_client(TABLES, read_s=0.03)
    rows = client.lookup({"user": IDS})
    client.read({"item": torch.arange(3)})
    clock.add(0.02)
    rows["user"].sum().backward()
    client.apply(rows)
    client.read({"item": torch.arange(3)})
    times = ended(client, records)["step_ms"]
    assert [times[part] for part in ("pull_wait", "other", "total")] == pytest.approx([30.0, 20.0, 50.0])


def test_loss_samples_and_evaluations_are_what_the_loop_reports() -> None:
    client, records, clock = metered_client(TABLES, report_every_s=1.0)
    for number in range(6):
        clock.add(0.5)
        step(client)
        client.report(loss=torch.tensor(float(number), requires_grad=True), samples=32)
    client.report(eval={"auc": torch.tensor(0.75), "hits": np.float32(0.5)})
    record = ended(client, records)
    assert (record["loss"], record["samples"]) == (2.5, 6 * 32)
    assert record["samples_per_s"] == pytest.approx(6 * 32 / 2.5)
    (evaluation,) = records.of("eval")
    assert evaluation == {"step": 6, "auc": 0.75, "hits": 0.5, "train_samples": 192}
    progress = records.of("progress")
    assert [each["loop"] for each in progress] == [True] * len(progress) and progress[-1]["step"] == 6
    assert sum(each["loss"] * steps for each, steps in zip(progress, (2, 2, 1), strict=False)) <= 15
    assert all("total_steps" not in each and each["step_ms"]["total"] > 0 for each in progress)


def test_a_loop_without_a_finite_loss_has_records_without_it() -> None:
    client, records, _ = metered_client(TABLES)
    rows = client.lookup({"user": torch.tensor([1, 2])})
    (rows["user"] * torch.tensor([[float("nan")], [1.0]])).sum().backward()
    client.apply(rows)
    record = ended(client, records)
    assert record["loss"] is None and not {"samples", "samples_per_s"} & set(record)
    assert record["dropped_rows"] == 1
    (progress,) = records.of("progress")
    assert not {"loss", "samples", "samples_per_s"} & set(progress)
    client, records, _ = metered_client(TABLES)
    for loss in (1.0, float("nan")):
        step(client)
        client.report(loss=loss)
    assert ended(client, records)["loss"] is None


@every(
    ("given", "text"),
    [
        ({"loss": "high"}, "report: loss is 'high'; allowed: a number"),
        ({"loss": torch.zeros(2)}, "report: loss is 'tensor.*'; allowed: a number, or a tensor with one"),
        ({"samples": -1}, "report: samples is -1; allowed: a whole number"),
        ({"samples": 1.5}, "report: samples is 1.5"),
        ({"eval": 0.5}, "report: eval is a float; allowed: a dict"),
        ({"eval": {"auc": None}}, "report: auc is 'None'; allowed: a number"),
        ({"eval": {"step": 3}}, "report: a metric is named 'step'; allowed: any name except step, samples"),
    ],
)
def test_a_wrong_report_is_refused_in_one_line(given: dict[str, Any], text: str) -> None:
    with EmbeddingClient.local(TABLES) as client:
        client.report(loss=1.0, samples=2, eval={"auc": 0.5})
        assert client.page is None
        with pytest.raises(UserError, match=text) as told:
            client.report(**given)
    assert "\n" not in str(told.value)


def test_samples_are_those_of_all_trainers() -> None:
    config = loop_config(0, 0, "sync", None).model_copy(update={"workers": 3})
    joined = join_local(TABLES, config)
    meter = StepMeter(joined.rows, joined.ledger, config, Records(), samples=0, generation=lambda: 0, metrics=None)
    meter.report(0, None, 10, {})
    assert meter.samples == 30
    joined.ending.close()

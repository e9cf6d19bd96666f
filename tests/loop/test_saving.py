"""Checkpoints of a loop: rows and dense state, for other numbers of servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from shardkeep import EmbeddingClient, TableSpec
from shardkeep.base.errors import CheckpointError, UserError
from shardkeep.compression.config import CompressionConfig
from shardkeep.run.folder import RunFolder
from tests.support.cases import every
from tests.support.cluster import kill, within

TABLES = [TableSpec(name="item", dim=4, optimizer={"name": "adam", "lr": 0.1}), TableSpec(name="tag", dim=2)]
LATER = CompressionConfig.model_validate({"push": {"keep": 0.25, "pool_rows": 256}})
STATE = {"model": {"weight": torch.arange(3.0)}, "steps": [1, None, "two"], 5: {"exp": 0.5}}


def some_steps(client: EmbeddingClient, count: int) -> None:
    for _ in range(count):
        random = torch.Generator().manual_seed(client.step)
        rows = client.lookup({t.name: torch.randint(0, 40, (12,), generator=random) for t in TABLES})
        sum((row**2).sum() for row in rows.values()).backward()  # type: ignore[union-attr]
        client.apply(rows)


def digest(client: EmbeddingClient) -> Any:
    return client.summary(digest=True)["state_digest"]


@every("compression", [None, LATER], ids=["plain", "residuals"])
def test_a_loop_that_is_loaded_ends_with_the_rows_of_one_that_went_on(tmp_path: Path, compression: Any) -> None:
    with EmbeddingClient.local(TABLES, consistency="sync", compression=compression) as client:
        for number in range(2):
            some_steps(client, 3)
            client.save(tmp_path / "saved", STATE | {"number": number})
        some_steps(client, 6)
        expected = digest(client)
    with EmbeddingClient.local(TABLES, consistency="sync", compression=compression) as client:
        found = client.restore(tmp_path / "saved")
        assert client.step == 6 and client.dense_state is found
        assert torch.equal(found["model"]["weight"], torch.arange(3.0))
        assert (found["steps"], found[5], found["number"]) == ([1, None, "two"], {"exp": 0.5}, 1)
        some_steps(client, 6)
        assert digest(client) == expected


def test_what_cannot_be_saved_or_loaded_is_told(tmp_path: Path) -> None:
    with EmbeddingClient.local(TABLES) as client:
        with pytest.raises(UserError, match="no run folder; allowed: save"):
            client.checkpoint()
        with pytest.raises(UserError, match="3 is no state; the step is the client's"):
            client.checkpoint(3)
        with pytest.raises(UserError, match="has no checkpoint"):
            client.restore(tmp_path / "nothing")
        some_steps(client, 1)
        with pytest.raises(UserError, match="set is not JSON serializable; allowed: tensors"):
            client.save(tmp_path / "saved", {"ids": {1, 2}})
        client.save(tmp_path / "saved")
        with pytest.raises(UserError, match="the loop has begun"):
            client.restore(tmp_path / "saved")
        (tmp_path / "file").touch()
        with pytest.raises(CheckpointError):
            client.save(tmp_path / "file")
    others = [TableSpec(name="item", dim=8, optimizer={"name": "adam"}), TABLES[1]]
    with EmbeddingClient.local(others) as client, pytest.raises(CheckpointError, match="table item has dim 4"):
        client.restore(tmp_path / "saved")


@pytest.mark.slow
@pytest.mark.waits_for_processes
def test_a_server_that_dies_after_a_load_or_a_fill_has_the_rows_again(tmp_path: Path) -> None:
    def kill_a_server(run: str) -> None:
        server = next(m for m in RunFolder(tmp_path / run).member_list() if m["role"] == "server")
        kill([psutil.Process(server["pid"])])

    with EmbeddingClient.local(TABLES, consistency="sync") as client:
        some_steps(client, 4)
        client.save(tmp_path / "saved")
        some_steps(client, 6)
        expected = digest(client)
    with EmbeddingClient.serve(TABLES, servers=2, consistency="sync", run_dir=tmp_path / "loaded") as client:
        client.restore(tmp_path / "saved")
        for _ in range(2):
            kill_a_server("loaded")
            some_steps(client, 3)
        assert client.step == 10 and digest(client) == expected
    with EmbeddingClient.serve(TABLES, servers=2, run_dir=tmp_path / "filled") as client:
        client.fill(ROWS)
        kill_a_server("filled")
        found = client.read({"item": torch.arange(80), "tag": torch.arange(7)})
        assert torch.equal(found["item"], ROWS["item"]) and torch.equal(found["tag"], ROWS["tag"].float())


ROWS = {"item": torch.arange(320.0).view(80, 4) / 320, "tag": torch.randn(7, 2, dtype=torch.float64)}


def test_tables_filled_with_rows_have_them_and_train_like_others(tmp_path: Path) -> None:
    with EmbeddingClient.local(TABLES, consistency="sync") as client:
        start = client.read({"item": torch.arange(200)})["item"]
        client.fill({"item": start[:50]})
        assert torch.equal(client.read({"item": torch.arange(200)})["item"], start)
        some_steps(client, 4)
        filled = digest(client), client.read({"item": torch.arange(50)})["item"]
        with pytest.raises(UserError, match="fill: the loop has begun"):
            client.fill(ROWS)
    with EmbeddingClient.local(TABLES, consistency="sync") as client:
        some_steps(client, 4)
        assert torch.equal(client.read({"item": torch.arange(50)})["item"], filled[1])
        assert digest(client) != filled[0]  # fewer rows exist


def test_rows_that_do_not_fit_are_refused() -> None:
    with EmbeddingClient.local(TABLES) as client:
        for rows, why in (
            ({"x": ROWS["tag"]}, "no table x; the client has item, tag"),
            ({"item": ROWS["tag"]}, r"rows of item are float64 \(7, 2\); allowed: floats, \(rows, 4\)"),
            ({"tag": torch.zeros(2, 2, dtype=torch.int64)}, r"rows of tag are int64 \(2, 2\)"),
        ):
            with pytest.raises(UserError, match=why):
                client.fill(rows)


def test_a_loop_whose_last_checkpoint_cannot_be_written_trains_on_and_says_so_at_its_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with (
        pytest.raises(CheckpointError, match=r"the last checkpoint is not saved: .*File exists"),
        EmbeddingClient.serve(TABLES, servers=1, run_dir=run, quiet=True) as client,
    ):
        (run / "checkpoints").mkdir()
        (run / "checkpoints" / ".step-00000004").touch()  # in the way
        some_steps(client, 2)
        client.checkpoint(STATE)
        some_steps(client, 2)
        client.checkpoint(STATE)
        some_steps(client, 2)
        rows = client.summary()["tables"][0]["rows"]
    summary = RunFolder(run).summary() or {}
    assert (summary["status"], summary["steps"], summary["tables"][0]["rows"]) == ("incomplete", 6, rows)
    assert summary["warnings"] == [f"no checkpoint at step 4: {summary['message'].partition(': ')[2]}"]


@pytest.mark.chaos
def test_a_last_checkpoint_that_failed_is_tried_again_when_the_client_closes(tmp_path: Path) -> None:
    run, place = tmp_path / "run", tmp_path / "run" / "checkpoints" / ".step-00000002"
    with EmbeddingClient.serve(TABLES, servers=1, run_dir=run, quiet=True) as client:
        place.parent.mkdir()
        place.touch()
        some_steps(client, 2)
        client.checkpoint(STATE)
        client.summary()
        within(60, lambda: "no checkpoint" in RunFolder(run).metrics_path.read_text(), "no failure", lambda: True)
        place.unlink()
    assert (RunFolder(run).summary() or {})["status"] == "completed"
    assert [path.name for path in place.parent.glob("step-*")] == ["step-00000002"]

"""Marks and snapshots as requests reach a server: what is refused, what continues meanwhile, how they end."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import TransportError
from shardkeep.ps.checkpoints.folder import Checkpoints, FileRecord
from shardkeep.ps.server import admin
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.server.snapshot import walk
from shardkeep.ps.wire.message import Kind
from tests.support.cases import every
from tests.support.services import IDS, LIMIT_S, answer, gradient, make_service, pull, push, wanted
from tests.support.snapshots import ask, loaded, saved, told


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path)


def at_step_1(checkpoints: Checkpoints) -> ShardService:
    """A server with rows in the first table."""
    service = make_service(checkpoints=checkpoints)
    push(service, 0, gradient(0))
    checkpoints.begin(1)
    return service


@pytest.fixture
def service(checkpoints: Checkpoints) -> ShardService:
    return at_step_1(checkpoints)


class Held:
    """A walk that stops where it rests, until it is let go."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def sleep(self, seconds: float) -> None:
        self.reached.set()
        assert self.go_on.wait(LIMIT_S)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held()
    monkeypatch.setattr(walk, "time", held)
    yield held
    held.go_on.set()
    for thread in threading.enumerate():
        if thread.name == "snapshot":
            thread.join(LIMIT_S)


def test_training_goes_on_between_mark_and_answer_and_there_is_one_snapshot_at_a_time(
    service: ShardService, checkpoints: Checkpoints, held: Held
) -> None:
    before = service.tables.digests()
    accepted(service, ask="mark", step=1)
    push(service, 1, gradient(0))
    snapshot = ask(service, ask="snapshot", step=1)
    assert held.reached.wait(LIMIT_S)
    assert answer(push(service, 2, gradient(0), gradient(1))).kind is Kind.ACK
    assert answer(pull(service, 3, wanted(0))).kind is Kind.ROWS
    assert refused(service, ask="mark", step=3) == "the snapshot of step 1 is still being written"
    assert not snapshot.done()
    held.go_on.set()
    kind, text = told(snapshot)
    assert kind is Kind.ANSWER
    kept = checkpoints.commit(1, [FileRecord(**file) for file in json.loads(text)["files"]], {})
    assert loaded(kept).digests() == before != service.tables.digests()
    accepted(service, ask="mark", step=3)


def refused(service: ShardService, **question: Any) -> str:
    kind, text = told(ask(service, **question))
    assert kind is Kind.ERROR
    return text


def accepted(service: ShardService, **question: Any) -> dict[str, Any]:
    kind, text = told(ask(service, **question))
    assert kind is Kind.ANSWER, text
    return json.loads(text)  # type: ignore[no-any-return]


def writing(service: ShardService, held: Held) -> Future[Bytes]:
    """The answer to come of a snapshot that is being written."""
    accepted(service, ask="mark", step=1)
    snapshot = ask(service, ask="snapshot", step=1)
    assert held.reached.wait(LIMIT_S)
    return snapshot


@every("mode", ["sync", "bounded"])
def test_a_mark_needs_its_step_boundary(tmp_path: Path, mode: str) -> None:
    service = make_service(mode, checkpoints=Checkpoints(tmp_path))
    push(service, 0, gradient(0))
    wrong = 1 if mode == "sync" else 0  # staged, or applied
    expected = f"a snapshot of step {wrong} while pushes of other steps are here"
    assert refused(service, ask="mark", step=wrong) == expected
    assert refused(service, ask="mark") == "step None; allowed: a whole number"
    answer(pull(service, 1))
    accepted(service, ask="mark", step=1)


def test_a_snapshot_needs_a_mark_of_its_step_and_a_folder(service: ShardService, checkpoints: Checkpoints) -> None:
    for step in (1, 2):
        expected = f"cannot write the snapshot of step {step}: no snapshot was taken at that step"
        assert refused(service, ask="snapshot", step=step) == expected
        accepted(service, ask="mark", step=1)
    homeless = make_service()
    accepted(homeless, ask="mark", step=0)
    assert refused(homeless, ask="snapshot", step=0) == "this server has no folder for checkpoints"
    checkpoints.abandon(1)  # a folder that cannot be written: the mark is given back
    expected = f"{checkpoints.partial(1) / 'server-0'}: No such file or directory"
    assert refused(service, ask="snapshot", step=1) == expected
    assert not any(table.pre_images for table in service.tables)
    assert answer(push(service, 1, gradient(0))).kind is Kind.ACK


def test_a_snapshot_goes_to_another_folder_and_is_loaded_from_there(service: ShardService, tmp_path: Path) -> None:
    other = Checkpoints(tmp_path / "other")
    other.begin(1)
    accepted(service, ask="mark", step=1)
    found = accepted(service, ask="snapshot", step=1, folder=str(other.folder))
    other.commit(1, [FileRecord(**file) for file in found["files"]], {})
    fresh = make_service()
    assert accepted(fresh, ask="load", step=1, servers=1, folder=str(other.folder)) == {}
    assert fresh.tables.digests() == service.tables.digests()
    assert (service.snapshots.rows_done, fresh.snapshots.rows_done) == (IDS.size + len(found["files"]) - 1, IDS.size)
    accepted(fresh, ask="mark", step=1)


def test_rows_are_loaded_into_empty_tables_of_a_checkpoint_that_is_there(service: ShardService, tmp_path: Path) -> None:
    good, fresh = {"ask": "load", "step": 1, "servers": 1, "folder": str(tmp_path)}, make_service()
    assert refused(service, **good) == "server 0 has rows; a checkpoint is loaded before the first step"
    assert "step-00000001" in refused(fresh, **good)
    assert refused(fresh, **good | {"servers": 0}) == "server 0 of 0; allowed: a job that has this server"
    assert refused(fresh, **good | {"folder": 5}) == "folder 5; allowed: a path"
    assert refused(fresh, **good | {"folder": "a\0b"}).startswith("folder ")
    assert not any(table.num_rows for table in fresh.tables)


def test_pulls_wait_while_rows_are_loaded(service: ShardService, checkpoints: Checkpoints) -> None:
    saved(service, checkpoints, 1)
    rows = answer(pull(service, 0, wanted(0), kind=Kind.READ)).sections[0].values.tobytes()
    manifest = checkpoints.folder / "step-00000001" / "manifest.json"
    text = manifest.read_bytes()
    manifest.unlink()
    os.mkfifo(manifest)
    fresh = make_service()
    loading = ask(fresh, ask="load", step=1, servers=1, folder=str(checkpoints.folder))
    with ThreadPoolExecutor(1) as pool:
        with manifest.open("wb") as writer:  # it opens when the server reads
            reading = pool.submit(lambda: answer(pull(fresh, 0, wanted(0), kind=Kind.READ)))
            assert not wait([reading], timeout=0.1).done
            writer.write(text)
            manifest.unlink()
            manifest.write_bytes(text)  # which is read again
        assert told(loading) == (Kind.ANSWER, "{}")
        assert reading.result(LIMIT_S).sections[0].values.tobytes() == rows


def test_a_snapshot_that_does_not_move_is_given_up(
    service: ShardService, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "SILENCE_S", 0.02)
    assert told(writing(service, held)) == (Kind.ERROR, "a snapshot is stuck: 0 rows, none for 0.02 s")
    assert not any(table.pre_images for table in service.tables)


def test_what_is_given_up_or_closed_ends_at_once_and_leaves_room_for_the_next(
    service: ShardService, checkpoints: Checkpoints, held: Held
) -> None:
    snapshot = writing(service, held)
    accepted(service, ask="unmark")
    assert told(snapshot) == (Kind.ERROR, "the snapshot of step 1 was given up")
    assert not any(table.pre_images for table in service.tables)
    checkpoints.begin(1)
    held.reached.clear()
    snapshot = writing(service, held)
    service.close("the job is over")
    service.close("again")
    with pytest.raises(TransportError, match="the job is over"):
        snapshot.result(timeout=LIMIT_S)
    assert not any(table.pre_images for table in service.tables)


# ---- increments ----


@every("how", ["disk", "unmark", "close", "another mark", "another server"])
def test_an_increment_after_one_that_failed_has_the_changes_of_both(tmp_path: Path, how: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    service = at_step_1(checkpoints)
    service.tables.changed.follow("")
    base = saved(service, checkpoints, 1)
    push(service, 1, gradient(0, IDS[:1]))
    if how != "disk":
        checkpoints.begin(2)
    told(ask(service, ask="mark", step=2, base=base.id))
    if how in ("disk", "another server"):  # the latter: this one is done, and told of no complete checkpoint
        kind = told(ask(service, ask="snapshot", step=2))[0]
        assert kind is (Kind.ERROR if how == "disk" else Kind.ANSWER)
    push(service, 2, gradient(0, IDS[1:2]), gradient(1))
    if how in ("unmark", "another server"):
        told(ask(service, ask="unmark"))
    elif how == "close":
        service.life.suspend("a worker died")
        service.life.begin(0, 3)
    told(ask(service, ask="saved", step=2, id="never complete"))
    increment = saved(service, checkpoints, 3, base)
    assert loaded(increment).digests() == service.tables.digests()
    parts = json.loads((increment.folder / "server-0" / "snapshot.json").read_text())["parts"]
    assert sum(part[4] for part in parts) == 2 + IDS.size


def test_a_server_that_was_not_told_of_the_base_writes_all_rows(
    service: ShardService, checkpoints: Checkpoints
) -> None:
    service.tables.changed.follow("")
    base = saved(service, checkpoints, 1)
    accepted(service, ask="saved", step=0, id="late")
    for known in ("", "another", base.id):
        checkpoints.begin(1)
        accepted(service, ask="mark", step=1, base=known)
        assert accepted(service, ask="snapshot", step=1)["full"] == (known != base.id)
    assert refused(service, ask="mark", step=1, base=7) == "base 7; allowed: the id of a checkpoint"

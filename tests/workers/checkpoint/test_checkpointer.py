"""A worker's part in checkpoints: their interval, who must see their folder, how long training is held up."""

from __future__ import annotations

import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.errors import CheckpointError, JobStopped
from shardkeep.config import JobConfig, parse_config
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.server.snapshot import writer as snapshot_writer
from shardkeep.workers.checkpoint import checkpointer, interval, writer
from shardkeep.workers.checkpoint.interval import CheckpointInterval
from shardkeep.workers.collectives.collective import Solo, ThreadCollective
from shardkeep.workers.collectives.operations import all_reduce_sum
from tests.support.cases import every
from tests.support.local_job import LocalJob
from tests.support.ranks import run_ranks
from tests.support.samples import as_data, draw

SLOW_S = 0.4


def job_config(workers: int, every_steps: int | str = 1, max_steps: int = 3) -> JobConfig:
    return parse_config(
        f"""
        {{workers: {workers}, model: {{name: dlrm, bottom: [8], hidden: [8]}}, tables: {{default: {{dim: 4}}}},
        tower: {{compile: off}}, train: {{batch_size: 8, epochs: 1, max_steps: {max_steps}}},
        checkpoint: {{every_steps: {every_steps}, keep: 100}}}}
        """
    )


def job(folder: Path, workers: int) -> LocalJob:
    return LocalJob(job_config(workers), as_data(draw(100)), checkpoints=Checkpoints(folder))


class Clock:
    """Time that passes when a test sets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in (checkpointer, interval, writer):
            monkeypatch.setattr(module, "time", self)

    def perf_counter(self) -> float:
        return self.now


def held_s(job: LocalJob) -> list[float]:
    records = [r for kind, r in job.records if kind == "phase" and r["phase"] == "checkpoint"]
    assert [f"training held up {r['held_s']:.2f} s" in r["text"] for r in records] == [True] * 3
    return [float(r["held_s"]) for r in records]


@every("rank", [1, 2])
def test_a_worker_that_does_not_see_the_folder_is_told_before_the_first_step(tmp_path: Path, rank: int) -> None:
    elsewhere = {rank: Checkpoints(tmp_path / "elsewhere")}
    run = LocalJob(job_config(3), as_data(draw(100)), checkpoints=Checkpoints(tmp_path / "new"), elsewhere=elsewhere)
    with pytest.raises(CheckpointError, match=r"elsewhere is not the folder .* must be storage that all members"):
        run.run()


def test_gathering_what_ranks_have_not_sent_counts_as_holding_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, rank_state = Clock(monkeypatch), checkpointer.rank_state

    def slow(*args: Any) -> Any:
        clock.now += SLOW_S
        return rank_state(*args)

    monkeypatch.setattr(checkpointer, "rank_state", slow)
    for workers in (1, 2):
        run = job(tmp_path / str(workers), workers)
        run.run()
        assert min(held_s(run)) >= 0.999 * SLOW_S


def test_waiting_for_the_checkpoint_before_counts_as_holding_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is written while the next one waits for it, or the end of training."""
    clock, waited, write_snapshot = Clock(monkeypatch), threading.Condition(), snapshot_writer.write_snapshot
    run = job(tmp_path, 2)
    leader: Any = run.workers[0].checkpoints
    wait_for_writer, waits, writes = leader.wait_for_writer, [], []

    def slow(*args: Any, **more: Any) -> Any:
        with waited:
            writes.append(1)
            if len(writes) % len(run.services) == 0:  # the last server; a checkpoint waits twice before it begins
                assert waited.wait_for(lambda: len(waits) > 2 * len(writes) // len(run.services), 60.0)
                clock.now += SLOW_S
        return write_snapshot(*args, **more)

    def wait(*writes: Any) -> None:
        with waited:
            waits.append(1)
            waited.notify_all()
        wait_for_writer(*writes)

    monkeypatch.setattr(snapshot_writer, "write_snapshot", slow)
    leader.wait_for_writer = wait
    run.run()
    assert len(writes) == 3 * len(run.services) and held_s(run) == pytest.approx([0.0, SLOW_S, SLOW_S])


def test_ranks_meet_within_their_deadlines_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met, meetings, write_snapshot = threading.Condition(), [], snapshot_writer.write_snapshot

    def meet(*args: Any, **more: Any) -> None:
        all_reduce_sum(*args, **more)
        with met:
            meetings.append(1)
            met.notify_all()

    def slow(*args: Any, **more: Any) -> Any:
        with met:
            assert met.wait_for(lambda: len(meetings) > 6, 60.0)
        return write_snapshot(*args, **more)

    monkeypatch.setattr(checkpointer, "all_reduce_sum", meet)
    monkeypatch.setattr(snapshot_writer, "write_snapshot", slow)
    config = job_config(2, max_steps=2)
    fast = config.model_copy(update={"liveness": config.liveness.model_copy(update={"step_timeout_s": 1.0})})
    LocalJob(fast, as_data(draw(100)), checkpoints=Checkpoints(tmp_path)).run()
    assert [step for step, _ in Checkpoints(tmp_path).complete()] == [1, 2]


def test_waiting_for_a_slower_worker_is_not_holding_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, clock, waits = job(tmp_path, 2), Clock(monkeypatch), threading.Event()
    writers: list[Any] = [worker.checkpoints for worker in run.workers]
    finish, begin = writers[0].finish, writers[1].begin

    def meet(*last: int) -> None:
        waits.set()
        finish(*last)

    def late(step: int) -> None:
        assert waits.wait(60.0)
        waits.clear()
        clock.now += SLOW_S
        begin(step)

    writers[0].finish, writers[1].begin = meet, late
    run.run()
    assert held_s(run) == [0.0] * 3


@every(
    ("steps", "step_s", "text"),
    [
        (6, 0.01, "a regular one after the last step only"),
        (9, 100.0, "a regular one after the last step only"),
        (11, 100.0, "one every 10 steps from here on"),
    ],
)
def test_auto_takes_a_checkpoint_as_often_as_the_pace_of_the_first_steps_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, step_s: float, text: str
) -> None:
    monkeypatch.setattr(interval, "AUTO_AFTER_STEPS", 5)
    monkeypatch.setattr(interval, "AUTO_FEWEST_STEPS", 10)
    clock = Clock(monkeypatch)
    began, config = clock.now, job_config(1, "auto", steps)
    run = LocalJob(config, as_data(draw(100)), checkpoints=Checkpoints(tmp_path))

    def pass_time(step: int) -> bool:
        clock.now = began + step * step_s
        return False

    run.run(pass_time)
    (record,) = [r for kind, r in run.records if kind == "phase" and "every_steps" in r]
    assert record["text"] == text
    assert record["every_steps"] == max(10, int(600.0 * 5 / (4 * step_s)))


def test_a_job_that_stops_before_its_first_step_writes_none_and_the_same_people_can_read_each_file_of_one(
    tmp_path: Path,
) -> None:
    run = job(tmp_path, 1)  # two agree a step later
    with pytest.raises(JobStopped, match="stopped at step 0"):
        run.run(lambda step: True)
    assert not list(tmp_path.glob("step-*"))
    job(tmp_path, 1).run()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_file()}
    assert any(name.endswith(".safetensors") for name in modes) and not any("token" in name for name in modes)
    assert set(modes.values()) == {modes["manifest.json"]}


@every(("grown_bytes", "expected"), [(4 * 10**9, 100), (10**9, 200)], ids=["the fewest", "by the journal"])
def test_an_open_interval_is_chosen_from_the_steps_of_its_generation_and_a_newcomer_takes_it(
    grown_bytes: int, expected: int
) -> None:
    journals = iter([[0, 0], [7, 9], [8, 9 + grown_bytes]])
    knows, newcomer = CheckpointInterval(None, lambda: next(journals)), CheckpointInterval(None, lambda: [0])
    knows.enter(10, rank=0)
    assert knows.choose(10 + 49, Solo()) is None
    run_ranks(ThreadCollective.group(1), knows.share)
    knows.enter(200, rank=0)  # another generation, before any choice
    assert knows.choose(200 + 49, Solo()) is None
    assert knows.choose(200 + 50, Solo()) == expected
    assert knows.ends(expected) and not newcomer.ends(expected)
    run_ranks(ThreadCollective.group(2), lambda ranks: (newcomer, knows)[ranks.rank].share(ranks))
    assert newcomer.ends(expected) and not newcomer.ends(expected + 1)
    assert newcomer.choose(10**6, Solo()) is None

"""Checkpoints and what resumes from them: in `sync` the very model of an undisturbed run, with any servers."""

from __future__ import annotations

import functools
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep.base.errors import CheckpointError, ConfigError, MemberLost, UserError
from shardkeep.config import JobConfig
from shardkeep.ps.checkpoints.folder import Checkpoint, Checkpoints
from shardkeep.ps.checkpoints.owner import Hold, owner_here
from shardkeep.ps.server.snapshot import writer as snapshot_writer
from shardkeep.run.folder import RunFolder
from shardkeep.run.origin.resume import newest, plan_resume
from shardkeep.workers.data.batch import Batch
from tests.support.cases import every
from tests.support.local_job import LocalJob
from tests.support.resumed_jobs import drawn_data, job_config
from tests.support.samples import ArrayDataset, as_data, draw


def trained(config: JobConfig, folder: Path, resumed: Checkpoint | None = None) -> dict[str, Any]:
    return LocalJob(config, drawn_data(), checkpoints=Checkpoints(folder), resumed=resumed).run()


@dataclass(frozen=True)
class Undisturbed:
    """A job that ran to its end, for reading."""

    summary: dict[str, Any]
    checkpoints: Checkpoints


Run = Callable[..., Undisturbed]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs the job of a config, given as for `job_config`, once for all tests."""

    @functools.cache
    def run(servers: int, workers: int, **more: Any) -> Undisturbed:
        folder = tmp_path_factory.mktemp("undisturbed")
        return Undisturbed(trained(job_config(servers, workers, **more), folder), Checkpoints(folder))

    return run


@every(("tower", "then", "now", "step"), [("sgd", 1, 1, 9), ("adam", 2, 1, 3), ("adam", 1, 3, 9)])
def test_a_sync_job_ends_with_the_model_of_an_undisturbed_one(
    tmp_path: Path, undisturbed: Run, tower: str, then: int, now: int, step: int
) -> None:
    before = undisturbed(then, 2, tower=tower)
    whole = before.summary
    assert [step for step, _ in before.checkpoints.complete()] == [3, 6, 9, 12, 14]
    rest = trained(job_config(now, 2, tower=tower), tmp_path / "rest", before.checkpoints.load(step))
    assert rest["state_digest"] == whole["state_digest"]
    assert (rest["steps"], rest["samples"], rest["eval"]) == (14, 200, whole["eval"])


COMPRESSED = (
    "{ids: coded, push: {values: int4, keep_rows: 0.3, pool_rows: 500, second_moment: true}, pull: {values: int8},"
    " tower: {name: %s}}"
)


@pytest.mark.parametrize(("tower", "then", "now"), [("int8", 2, 3), ("topk", 1, 1), ("powersgd", 1, 3)])
def test_a_compressed_sync_job_goes_on_with_what_it_had_not_sent(
    tmp_path: Path, undisturbed: Run, then: int, now: int, tower: str
) -> None:
    how = {"compression": COMPRESSED % tower}
    before = undisturbed(then, 2, **how)
    whole = before.summary
    rest = trained(job_config(now, 2, **how), tmp_path, before.checkpoints.load(9))
    assert rest["state_digest"] == whole["state_digest"]
    assert rest["residuals_and_cache"] == pytest.approx(whole["residuals_and_cache"])
    assert rest["tower"]["unsent_norm"] == pytest.approx(whole["tower"]["unsent_norm"])
    assert whole["tower"]["unsent_norm"] > 0.0 and whole["tower"]["unsent_steps"] > 0.0
    assert rest["delivered_by_age"] == pytest.approx(whole["delivered_by_age"])
    assert sum(whole["delivered_by_age"].values()) == pytest.approx(1) and len(whole["delivered_by_age"]) > 1
    plain = undisturbed(then, 2).summary
    assert whole["state_digest"] != plain["state_digest"] and "unsent_norm" not in plain["tower"]


@every("workers", [1, 3])
def test_what_ranks_had_not_sent_is_shared_out_among_other_ranks(undisturbed: Run, workers: int) -> None:
    how = {"compression": COMPRESSED % "topk"}
    found = undisturbed(1, 2, **how).checkpoints.load(9)
    owed = [LocalJob(job_config(1, n, **how), drawn_data(), resumed=found).workers for n in (2, workers)]
    for sizes in ([w.client.memory.state() for w in job] for job in owed):
        assert sum(len(state["4/ids"]) for state in sizes) > 0
    sums = []
    for job in owed:
        states = [worker.client.memory.state() for worker in job]
        sums.append(np.sum([state["4/rests"].sum(0, dtype=np.float64) for state in states], axis=0))
        residuals = [r for w in job for r in w.tower.sums.compression.local_state_dict().get("residuals", {}).values()]
        sums.append(float(sum(float(r.double().sum()) for r in residuals)))
    np.testing.assert_allclose(sums[0], sums[2], atol=1e-6)
    assert sums[1] == pytest.approx(sums[3], abs=1e-6)


def test_writing_checkpoints_changes_nothing(tmp_path: Path, undisturbed: Run) -> None:
    unwritten = trained(job_config(2, 2, checkpoint__every_steps="off"), tmp_path / "none")
    assert unwritten["state_digest"] == undisturbed(2, 2).summary["state_digest"]
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("then", "now"), [(2, 1), (1, 3)])
def test_a_sync_job_goes_on_from_increments_and_writes_more(
    tmp_path: Path, undisturbed: Run, then: int, now: int
) -> None:
    every = {"checkpoint__full_every": 3}
    whole = undisturbed(then, 2).summary
    trained(job_config(then, 2, **every), tmp_path / "run")
    found = Checkpoints(tmp_path / "run")
    assert [(step, len(found.load(step).chain)) for step, _ in found.complete()] == CHAINS
    for step in (14, 12, 9):  # as a job that was killed between 6 and 9 leaves it
        shutil.rmtree(found.load(step).folder)
    rest = trained(job_config(now, 2, **every), found.folder, found.load(6))
    assert (rest["state_digest"], rest["steps"]) == (whole["state_digest"], 14)
    assert [(step, len(found.load(step).chain)) for step, _ in found.complete()] == CHAINS
    rest = trained(job_config(then, 2, **every), tmp_path / "again", found.load(9))
    assert (rest["state_digest"], rest["samples"]) == (whole["state_digest"], 200)


CHAINS = [(3, 1), (6, 2), (9, 3), (12, 1), (14, 2)]
"""Steps with `full_every: 3`, and how many checkpoints each is made of."""


def test_an_increment_after_a_full_disk_is_on_the_last_complete_checkpoint(
    tmp_path: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = undisturbed(2, 2).summary
    write = snapshot_writer.write_snapshot

    def full(mark: Any, partial: Path, *, shard: int) -> Any:
        if partial.name == ".step-00000006" and shard == 0:  # the other server's part is whole
            raise OSError(28, "No space left on device", str(partial / "rows"))
        return write(mark, partial, shard=shard)

    monkeypatch.setattr(snapshot_writer, "write_snapshot", full)
    job = LocalJob(job_config(2, 2, checkpoint__full_every=9), drawn_data(), checkpoints=Checkpoints(tmp_path))
    job.run()
    texts = [record["text"] for kind, record in job.records if kind == "phase" and record["phase"] == "checkpoint"]
    assert [" kB changed since step 3, " in text for text in texts] == [False, False, True, False, False]
    assert [link.step for link in Checkpoints(tmp_path).load(12).chain] == [3, 9, 12]
    rest = trained(job_config(1, 2), tmp_path / "again", Checkpoints(tmp_path).load(9))
    assert rest["state_digest"] == whole["state_digest"]


@every(("mode", "workers"), [("sync", 1), ("bounded", 3), ("async", 1)])
def test_other_workers_see_each_sample_that_is_left_exactly_once(
    tmp_path: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch, mode: str, workers: int
) -> None:
    before = undisturbed(2, 2, mode=mode)
    drawn: list[int] = []
    gather = ArrayDataset.gather

    def noted(self: ArrayDataset, rows_B: np.ndarray) -> Batch:
        drawn.extend(rows_B.tolist() if len(self) == 100 else ())
        return gather(self, rows_B)

    with monkeypatch.context() as patch:
        patch.setattr(ArrayDataset, "gather", noted)
        summary = trained(job_config(1, workers, mode=mode), tmp_path, before.checkpoints.load(9))
    assert summary["samples"] == 200
    assert len(drawn) == 200 - 9 * 16 + 12  # 16 samples a step; the first epoch's last step has 4
    assert np.bincount(drawn, minlength=100).max() == 1


def test_a_checkpoint_that_cannot_be_written_is_told_and_training_goes_on(
    tmp_path: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = snapshot_writer.write_snapshot

    def full(mark: Any, partial: Path, *, shard: int) -> Any:
        if partial.name == ".step-00000010":
            raise OSError(28, "No space left on device", str(partial / "rows"))
        return write(mark, partial, shard=shard)

    whole = undisturbed(2, 2).summary
    monkeypatch.setattr(snapshot_writer, "write_snapshot", full)
    checkpoints = Checkpoints(tmp_path / "full")
    job = LocalJob(job_config(2, 2, checkpoint__every_steps=5), drawn_data(), checkpoints=checkpoints)
    assert job.run()["state_digest"] == whole["state_digest"]
    texts = [record["text"] for kind, record in job.records if kind == "phase" and record["phase"] == "checkpoint"]
    why = f"server 0: {checkpoints.partial(10) / 'rows'}: No space left on device"
    assert texts[1] == f"no checkpoint at step 10: {why}"
    assert [step for step, _ in checkpoints.complete()] == [5, 14]
    assert not checkpoints.partial(10).exists()


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, later = snapshot_writer.write_snapshot, threading.Event()

    def held(mark: Any, partial: Path, *, shard: int) -> Any:
        assert partial.name != ".step-00000003" or later.wait(90)
        return write(mark, partial, shard=shard)

    def stop(step: int) -> bool:
        if step == 5:
            assert not (tmp_path / "step-00000003").exists()
            later.set()
        return False

    whole = undisturbed(2, 2).summary
    monkeypatch.setattr(snapshot_writer, "write_snapshot", held)
    job = LocalJob(job_config(2, 2), drawn_data(), checkpoints=Checkpoints(tmp_path))
    job.run(stop)
    texts = [record["text"] for kind, record in job.records if kind == "phase" and record["phase"] == "checkpoint"]
    assert [text.split(":")[0] for text in texts] == [f"step {n} in step-{n:08d}" for n in (3, 6, 9, 12, 14)]
    rest = trained(job_config(1, 2), tmp_path / "from-3", Checkpoints(tmp_path).load(3))
    assert rest["state_digest"] == whole["state_digest"]


def test_a_checkpoint_that_training_left_behind_touches_nothing_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, closed = snapshot_writer.write_snapshot, threading.Event()

    def held(mark: Any, partial: Path, *, shard: int) -> Any:
        assert closed.wait(90)
        return write(mark, partial, shard=shard)

    def lost(step: int) -> bool:
        if step == 5:
            raise MemberLost("the generation is lost")
        return False

    monkeypatch.setattr(snapshot_writer, "write_snapshot", held)
    checkpoints = Checkpoints(tmp_path)
    job = LocalJob(job_config(1, 1), drawn_data(), checkpoints=checkpoints)
    with pytest.raises(MemberLost):
        job.run(lost)
    checkpoints.begin(3)  # by the process that continues
    job.services[0].close("the generation is lost")
    closed.set()
    for thread in threading.enumerate():
        if thread.name in ("checkpoint", "snapshot"):
            thread.join(90)
    assert checkpoints.partial(3).exists() and not checkpoints.complete()


def test_a_mark_that_a_server_refuses_leaves_none_on_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = LocalJob(job_config(2, 2, checkpoint__every_steps=5), drawn_data(), checkpoints=Checkpoints(tmp_path))
    mark = job.services[1].snapshots.take

    def refused(step: int, base: str) -> None:
        if step == 10:
            raise CheckpointError("no room for a mark")
        mark(step, base)

    monkeypatch.setattr(job.services[1].snapshots, "take", refused)
    marked: list[bool] = []
    job.run(lambda step: bool(step == 11 and marked.append(any(table.pre_images for table in job.services[0].tables))))
    texts = [record["text"] for kind, record in job.records if kind == "phase" and record["phase"] == "checkpoint"]
    assert texts[1] == "no checkpoint at step 10: server 1: no room for a mark"
    assert [step for step, _ in Checkpoints(tmp_path).complete()] == [5, 14]
    assert set(marked) == {False}


def test_a_folder_with_later_checkpoints_of_another_run_is_refused(undisturbed: Run) -> None:
    found = undisturbed(1, 1).checkpoints
    with pytest.raises(ConfigError, match="holds step 26 of another run, and this one starts at step 0"):
        trained(job_config(1, 1), found.folder)
    with pytest.raises(ConfigError, match="and this one starts at step 3"):
        trained(job_config(1, 1), found.folder, found.load(3))


def test_other_data_or_another_seed_are_refused(tmp_path: Path, undisturbed: Run) -> None:
    kept = undisturbed(1, 1).checkpoints.load(26)
    with pytest.raises(ConfigError, match=r"seed: 4; the checkpoint .* was taken with 3$"):
        trained(job_config(1, 1, seed=4), tmp_path, kept)
    told = r"data: the training data are not those of .*step-00000026 \(99 samples now, 100 then\); put those back$"
    with pytest.raises(ConfigError, match=told):
        LocalJob(job_config(1, 1), as_data(draw(99)), resumed=kept)


def test_a_run_does_not_resume_from_the_checkpoints_of_another_run(tmp_path: Path, undisturbed: Run) -> None:
    config = job_config(1, 1, checkpoint__dir=tmp_path / "shared")
    shutil.copytree(undisturbed(1, 1).checkpoints.folder, tmp_path / "shared")
    for name in ("first", "second"):
        RunFolder.create(tmp_path / name, config)
    Hold(tmp_path / "shared", owner_here("job", str(tmp_path / "second"))).release()
    with pytest.raises(UserError, match=rf"are those of another run, {tmp_path / 'second'}; resume that one"):
        newest(config, tmp_path / "first")
    assert newest(config, tmp_path / "second").step == 26
    shutil.rmtree(tmp_path / "second")  # or renamed
    assert newest(config, tmp_path / "first").step == 26


def test_what_a_run_cannot_go_on_with_is_refused_in_one_line(tmp_path: Path, undisturbed: Run) -> None:
    run = tmp_path / "run"
    config = job_config(1, 1)
    shutil.copytree(undisturbed(1, 1).checkpoints.folder, run / "checkpoints")
    (run / "config.yaml").write_text(config.to_yaml())
    resumed = plan_resume(run, ["workers=3", "train.epochs=4", "checkpoint.keep=1"])
    assert (resumed.config.workers, resumed.checkpoint.step) == (3, 26)
    assert resumed.text() == ("at step 26 from step-00000026; changed: workers=3, train.epochs=4, checkpoint.keep=1")
    for override in ("seed=4", "train.batch_size=9", "tables.b.dim=8", "consistency.mode=async"):
        with pytest.raises(UserError, match=r"may not change when a job continues; allowed: servers, workers"):
            plan_resume(run, [override])
    with pytest.raises(UserError, match="is not a run folder"):
        plan_resume(tmp_path)
    with pytest.raises(UserError, match="there is no complete checkpoint"):
        plan_resume(run, [f"checkpoint.dir={tmp_path / 'none'}"])
    next((run / "checkpoints" / "step-00000026").glob("server-0/rows-*")).unlink()
    with pytest.raises(CheckpointError, match="missing; delete step-00000026 to resume from the checkpoint before it"):
        plan_resume(run)
    (run / "summary.json").write_text("{")
    with pytest.raises(UserError, match=r"summary.json: is damaged: "):
        plan_resume(run)

"""Checkpoints and what resumes from them: in `sync` the very model of an undisturbed run, with any servers."""

from __future__ import annotations

import functools
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shardkeep.base.errors import CheckpointError, ConfigError, MemberLost, UserError
from shardkeep.config import JobConfig
from shardkeep.ps.checkpoints.folder import Checkpoint, Checkpoints
from shardkeep.ps.checkpoints.owner import Hold, owner_here
from shardkeep.ps.server.snapshot import writer as snapshot_writer
from shardkeep.run.folder import RunFolder
from shardkeep.run.origin.resume import newest, plan_resume
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.samples import Dataset
from tests.support.cases import every
from tests.support.local_job import LocalJob
from tests.support.resumed_jobs import COMPRESSION, drawn_data, job_config
from tests.support.samples import as_data, draw


def trained(config: JobConfig, folder: Path, resumed: Checkpoint | None = None) -> dict[str, Any]:
    return LocalJob(config, drawn_data(), checkpoints=Checkpoints(folder), resumed=resumed).run()


def told_of_checkpoints(job: LocalJob) -> list[str]:
    return [record["text"] for kind, record in job.records if kind == "phase" and record["phase"] == "checkpoint"]


@dataclass(frozen=True)
class Undisturbed:
    summary: dict[str, Any]
    checkpoints: Checkpoints


Run = Callable[..., Undisturbed]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs the job of two workers of a config, given as for `job_config`, once for all tests."""

    @functools.cache
    def run(servers: int = 2, **more: Any) -> Undisturbed:
        folder = tmp_path_factory.mktemp("undisturbed")
        return Undisturbed(trained(job_config(servers, 2, **more), folder), Checkpoints(folder))

    return run


@every(("tower", "then", "now", "step"), [("sgd", 1, 1, 9), ("adam", 2, 1, 3), ("adam", 2, 3, 9)])
def test_a_sync_job_ends_with_the_model_of_an_undisturbed_one(
    tmp_path: Path, undisturbed: Run, tower: str, then: int, now: int, step: int
) -> None:
    before = undisturbed(then, tower=tower)
    whole = before.summary
    assert [step for step, _ in before.checkpoints.complete()] == [3, 6, 9, 12, 14]
    rest = trained(job_config(now, 2, tower=tower), tmp_path / "rest", before.checkpoints.load(step))
    assert rest["state_digest"] == whole["state_digest"]
    assert (rest["steps"], rest["samples"], rest["eval"]) == (14, 200, whole["eval"])


@every(("tower", "then", "now"), [("topk", 2, 1), ("topk", 1, 3)])
def test_a_compressed_sync_job_goes_on_with_what_it_had_not_sent(
    tmp_path: Path, undisturbed: Run, then: int, now: int, tower: str
) -> None:
    """With powersgd: `test_whoever_is_lost`."""
    how = {"compression": COMPRESSION % tower}
    before = undisturbed(then, **how)
    whole = before.summary
    rest = trained(job_config(now, 2, **how), tmp_path, before.checkpoints.load(9))
    assert rest["state_digest"] == whole["state_digest"]
    assert rest["residuals_and_cache"] == pytest.approx(whole["residuals_and_cache"])
    assert rest["tower"]["unsent_norm"] == pytest.approx(whole["tower"]["unsent_norm"])
    assert whole["tower"]["unsent_norm"] > 0.0 and whole["tower"]["unsent_steps"] > 0.0
    plain = undisturbed().summary
    assert whole["state_digest"] != plain["state_digest"] and "unsent_norm" not in plain["tower"]


@every("workers", [1, 3])
def test_what_ranks_had_not_sent_is_shared_out_among_other_ranks(undisturbed: Run, workers: int) -> None:
    how = {"compression": COMPRESSION % "topk"}
    found = undisturbed(1, **how).checkpoints.load(9)
    sums = []
    for count in (2, workers):
        job = LocalJob(job_config(1, count, **how), drawn_data(), resumed=found).workers
        states = [worker.client.memory.state() for worker in job]
        assert sum(len(state["4/ids"]) for state in states) > 0
        residuals = [r for w in job for r in w.tower.sums.compression.memory.local_state_dict().values()]
        rows_D = np.sum([state["4/rests"].sum(0, dtype=np.float64) for state in states], axis=0)
        sums.append([*rows_D, float(sum(float(r.double().sum()) for r in residuals))])
    np.testing.assert_allclose(*sums, atol=1e-6)


CHAINS = [(3, 1), (6, 2), (9, 3), (12, 1), (14, 2)]
"""Steps with `full_every: 3`, and how many checkpoints each is made of."""


def test_a_sync_job_goes_on_from_increments_and_writes_more(tmp_path: Path, undisturbed: Run) -> None:
    whole, config = undisturbed().summary, {"checkpoint__full_every": 3}
    trained(job_config(1, 2, **config), tmp_path / "run")
    found = Checkpoints(tmp_path / "run")
    chains = lambda: [(step, len(found.load(step).chain)) for step, _ in found.complete()]  # noqa: E731
    assert chains() == CHAINS
    for step in (14, 12, 9):  # as a job that was killed between 6 and 9 leaves it
        shutil.rmtree(found.load(step).folder)
    rest = trained(job_config(3, 2, **config), found.folder, found.load(6))
    assert (rest["state_digest"], rest["steps"]) == (whole["state_digest"], 14)
    assert chains() == CHAINS
    rest = trained(job_config(2, 2, checkpoint__every_steps="off"), tmp_path / "none", found.load(9))
    assert (rest["state_digest"], rest["samples"]) == (whole["state_digest"], 200)
    assert not (tmp_path / "none").exists()


# ---- checkpoints that are late or cannot be written ----


def before_writing(monkeypatch: pytest.MonkeyPatch, first: Callable[[Path, int], None]) -> None:
    """`first` gets the folder and the number of a server that writes its part."""
    write = snapshot_writer.write_snapshot

    def written(mark: Any, partial: Path, *, shard: int, **more: Any) -> Any:
        first(partial, shard)
        return write(mark, partial, shard=shard, **more)

    monkeypatch.setattr(snapshot_writer, "write_snapshot", written)


def test_the_next_checkpoint_after_a_full_disk_is_on_the_last_complete_one(
    tmp_path: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, found = undisturbed().summary, Checkpoints(tmp_path / "full")

    def full(partial: Path, shard: int) -> None:
        if (partial, shard) == (found.partial(6), 0):  # the other server's part is whole
            raise OSError(28, "No space left on device", str(partial / "rows"))

    before_writing(monkeypatch, full)
    job = LocalJob(job_config(2, 2, checkpoint__full_every=9), drawn_data(), checkpoints=found)
    assert job.run()["state_digest"] == whole["state_digest"]
    texts = told_of_checkpoints(job)
    assert texts[1] == f"no checkpoint at step 6: server 0: {found.partial(6) / 'rows'}: No space left on device"
    assert [" kB changed since step 3, " in text for text in texts] == [False, False, True, False, False]
    assert [step for step, _ in found.complete()] == [3, 9, 12, 14] and not found.partial(6).exists()
    assert [link.step for link in found.load(12).chain] == [3, 9, 12]
    rest = trained(job_config(1, 2), tmp_path / "again", found.load(9))
    assert rest["state_digest"] == whole["state_digest"]


def test_a_checkpoint_that_training_left_behind_touches_nothing_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, checkpoints = threading.Event(), Checkpoints(tmp_path)

    def lost(step: int) -> bool:
        if step == 5:
            raise MemberLost("the generation is lost")
        return False

    before_writing(monkeypatch, lambda *_: None if closed.wait(90) else pytest.fail("never closed"))
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
    job = LocalJob(job_config(2, 2, train__epochs=1), drawn_data(), checkpoints=Checkpoints(tmp_path))
    mark = job.services[1].snapshots.take

    def refused(step: int, base: str) -> None:
        if step == 3:
            raise CheckpointError("no room for a mark")
        mark(step, base)

    monkeypatch.setattr(job.services[1].snapshots, "take", refused)
    marked: list[bool] = []
    job.run(lambda step: bool(step == 4 and marked.append(any(table.pre_images for table in job.services[0].tables))))
    assert told_of_checkpoints(job)[0] == "no checkpoint at step 3: server 1: no room for a mark"
    assert [step for step, _ in Checkpoints(tmp_path).complete()] == [6, 7]
    assert set(marked) == {False}


# ---- what is refused, or said ----


def test_another_run_another_seed_and_fewer_data_are_refused(tmp_path: Path, undisturbed: Run) -> None:
    found = undisturbed().checkpoints
    with pytest.raises(ConfigError, match="holds step 14 of another run, and this one starts at step 0"):
        trained(job_config(1, 1), found.folder)
    with pytest.raises(ConfigError, match="and this one starts at step 3"):
        trained(job_config(1, 1), found.folder, found.load(3))
    with pytest.raises(ConfigError, match=r"seed: 4; the checkpoint .* was taken with 3$"):
        trained(job_config(1, 1, seed=4), tmp_path, found.load(14))
    told = r"data: the training data are not those of .*step-00000014 \(99 samples now, 100 then\); put those back$"
    with pytest.raises(ConfigError, match=told):
        LocalJob(job_config(1, 1), replace(as_data(draw(99)), fingerprint=""), resumed=found.load(14))


def test_other_data_of_as_many_samples_are_refused_until_they_are_accepted(tmp_path: Path, undisturbed: Run) -> None:
    found = undisturbed().checkpoints.load(9)
    told = (
        r"\(fingerprint bbbb now, aaaa then; 100 samples now, 100 then\); put those back, or --set data.accept=bbbb to "
    )
    for config in (job_config(1, 1), job_config(1, 1, data__accept="cccc")):
        with pytest.raises(ConfigError, match=told):
            LocalJob(config, drawn_data("bbbb-eeee"), resumed=found)
    accepted = job_config(1, 1, data__accept="bbbb", train__max_steps=12)
    LocalJob(accepted, drawn_data("bbbb-eeee"), Checkpoints(tmp_path), found).run()
    assert Checkpoints(tmp_path).load(12).facts["data"] == "bbbb-eeee"
    more = replace(as_data(draw(130, pooling="mean")), fingerprint="bbbb")  # the epoch goes on at the same position
    assert LocalJob(job_config(1, 1, data__accept="bbbb"), more, resumed=found).run()["samples"] == 2 * 130


def test_other_evaluation_data_and_a_checkpoint_without_a_fingerprint_are_gone_on_with(
    undisturbed: Run, caplog: pytest.LogCaptureFixture
) -> None:
    found = undisturbed().checkpoints.load(9)
    caplog.set_level("INFO", logger="shardkeep")
    LocalJob(job_config(1, 1), drawn_data("aaaa-ffff"), resumed=found)
    told = [getattr(record, "fields", {}).get("why", "") for record in caplog.records]
    assert any("the evaluation data are not those of step-00000009" in text for text in told)
    facts = {key: value for key, value in found.facts.items() if key != "data"}  # as of a source without one
    LocalJob(job_config(1, 1), drawn_data("bbbb-eeee"), resumed=replace(found, facts=facts))


class ReadAhead:
    """Samples that remember how often some were named before the first of them was read."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset, self.schema, self.named, self.calls, self.first = dataset, dataset.schema, set[int](), 0, 0

    def __len__(self) -> int:
        return len(self._dataset)

    def prefetch(self, start: int, stop: int) -> None:
        self.named.update(range(start, stop))
        self.calls += 1

    def gather(self, rows_B: NDArray[np.int64]) -> Batch:
        self.first = self.first or self.calls
        return self._dataset.gather(rows_B)


@every(("shuffle", "named", "calls"), [("blocks", 100, 130), ("auto", 0, 0)])
def test_samples_of_a_shuffle_in_blocks_are_named_before_they_are_read(shuffle: str, named: int, calls: int) -> None:
    data = drawn_data()
    train = ReadAhead(data.train)
    LocalJob(job_config(1, 1, data__shuffle=shuffle, train__max_steps=2), replace(data, train=train)).run()
    assert (len(train.named), train.first) == (named, calls)  # 65 blocks, each in two parts: they go on at row 0


def test_a_run_does_not_resume_from_the_checkpoints_of_another_run(tmp_path: Path, undisturbed: Run) -> None:
    config = job_config(1, 1, checkpoint__dir=tmp_path / "shared")
    shutil.copytree(undisturbed().checkpoints.folder, tmp_path / "shared")
    for name in ("first", "second"):
        RunFolder.create(tmp_path / name, config)
    Hold(tmp_path / "shared", owner_here("job", str(tmp_path / "second"))).release()
    with pytest.raises(UserError, match=rf"are those of another run, {tmp_path / 'second'}; resume that one"):
        newest(config, tmp_path / "first")
    assert newest(config, tmp_path / "second").step == 14
    shutil.rmtree(tmp_path / "second")  # or renamed
    assert newest(config, tmp_path / "first").step == 14


def test_what_a_run_cannot_go_on_with_is_refused_in_one_line(tmp_path: Path, undisturbed: Run) -> None:
    run, config = tmp_path / "run", job_config(2, 2)
    shutil.copytree(undisturbed().checkpoints.folder, run / "checkpoints")
    (run / "config.yaml").write_text(config.to_yaml())
    resumed = plan_resume(run, ["workers=3", "train.epochs=4", "checkpoint.keep=1"])
    assert (resumed.config.workers, resumed.checkpoint.step) == (3, 14)
    assert resumed.text() == ("at step 14 from step-00000014; changed: workers=3, train.epochs=4, checkpoint.keep=1")

    def refused(kind: type[Exception], text: str, *overrides: str, folder: Path = run) -> None:
        with pytest.raises(kind, match=text):
            plan_resume(folder, list(overrides))

    refused(UserError, "may not change when a job continues; allowed: servers, workers", "seed=4")
    refused(UserError, 'data.shuffle="blocks" in place of "auto": may not change', "data.shuffle=blocks")
    refused(UserError, "is not a run folder", folder=tmp_path)
    refused(UserError, "there is no complete checkpoint", f"checkpoint.dir={tmp_path / 'none'}")
    next((run / "checkpoints" / "step-00000014").glob("server-0/rows-*")).unlink()
    refused(CheckpointError, "missing; delete step-00000014 to resume from the checkpoint before it")
    (run / "summary.json").write_text("{")
    refused(UserError, r"summary.json: is damaged: ")


def test_a_run_that_continues_names_the_modules_that_were_edited(tmp_path: Path, undisturbed: Run) -> None:
    for name in ("mine", "theirs"):
        (tmp_path / f"{name}.py").write_text("import theirs")
    config = job_config(2, 2, compression="{tower: 'mine:Form'}", data__root=tmp_path)
    run = RunFolder.create(tmp_path / "run", config, code_folder=tmp_path)
    shutil.copytree(undisturbed().checkpoints.folder, run.path / "checkpoints")
    assert plan_resume(run.path).text() == "at step 14 from step-00000014"
    code = run.path / "code.json"
    code.write_text(code.read_text().replace('"theirs.py": "', '"theirs.py": "0'))
    assert plan_resume(run.path, ["workers=3"]).changed == ("workers=3", "theirs.py")


# ---- whoever is lost ----


ADAPTIVE = "'shardkeep.examples.compression.powersgd_adaptive:AdaptivePowerSGD', options: {miss: 0.2}"
FEATURES: dict[str, dict[str, Any]] = {
    "compression": {
        "compression": COMPRESSION % ADAPTIVE,
        "tables__b__compression": "safe",
    },
    "policies": {
        "tables__default__evict": "{ttl_steps: 2, sweep_steps: 1}",
        "tables__b__admit": "{min_count: 2, window_steps: 4}",
        "tables__b__evict": "{ttl_steps: 3, max_rows: 262144, decay: 0.8, decay_steps: 2, sweep_steps: 2}",
        "checkpoint__full_every": 3,
        "train__epochs": 2,
    },
    "packed rows, decay, norm, falling rate": {
        "tables__default__dtype": "int8",
        "tables__default__optimizer": "{name: adam, lr: 0.01, weight_decay: 0.001, weight_decay_on: table}",
        "tables__b": "{dim: 6, dtype: fp16, optimizer: adam, state_dtype: bf16}",
        "model__norm": "batch",
        "eval__every_steps": 2,
        "train__plateau": "{metric: logloss, patience: 1, min_delta: 1.0, factor: 0.3}",
        "train__early_stopping": "{metric: logloss, patience: 9, min_delta: 1.0}",
    },
}
LOST_AT, SAVED_AT = 5, {"policies": 6}
"""The first checkpoint is that of step 3; of step 6 with policies: an increment."""


def end_of(job: LocalJob) -> tuple[str, dict[str, Any]]:
    summary = job.run()
    return summary["state_digest"], summary["eval"]


@pytest.mark.parametrize("feature", FEATURES)
def test_whoever_is_lost_a_job_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path, feature: str) -> None:
    config = job_config(2, 2, **{"train__epochs": 1} | FEATURES[feature])
    whole = Checkpoints(tmp_path / "undisturbed")
    undisturbed = end_of(LocalJob(config, drawn_data(), whole))
    again = LocalJob(config, drawn_data(), Checkpoints(tmp_path / "again"), whole.load(SAVED_AT.get(feature, 3)))
    assert end_of(again) == undisturbed, "everything is lost but a checkpoint"
    folder = tmp_path / "lost"
    folder.mkdir()
    job = LocalJob(
        config, drawn_data(), Checkpoints(folder / "checkpoints"), rewinds=folder, journals=folder / "journals"
    )
    job.lose(LOST_AT)
    job.replace_server(1)  # it has the rows of a checkpoint and of its journal
    replaced = () if feature == "compression" else (1,)  # what a worker has not sent dies with it
    job.continue_at(LOST_AT, replaced=replaced)  # another worker takes the tower of the first
    assert end_of(job) == undisturbed

"""A job's event files, read back by TensorBoard's own reader. Needs tensorboard (CONTRIBUTING.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardkeep
from tests.support.callbacks import Notes
from tests.support.configs import ALONE
from tests.support.full_disk import FullMeanwhile
from tests.support.late_import import Late, late_import

EVERY = {"eval": {"every_steps": 10}, "checkpoint": {"every_steps": 20}}
TINY: dict[str, Any] = {**ALONE, **EVERY, "train": {**ALONE["train"], "report_every_s": 0.001}}
late_import("tensorboard")
ours = Late("shardkeep.callbacks.tensorboard")
pytestmark = pytest.mark.filterwarnings("ignore")  # of tensorboard's dependencies


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every point that TensorBoard shows, by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def points(notes: Notes) -> dict[str, list[tuple[int, float]]]:
    trained, evaluated = notes.of("on_progress"), notes.of("on_evaluation")
    tags = {
        "train/loss": [(event.step, event.loss) for event in trained],
        "train/samples_per_s": [(event.step, event.samples_per_s) for event in trained],
        "train/bytes_per_sample": [(event.step, event.bytes_per_sample) for event in evaluated],
    }
    for name in evaluated[0].metrics:
        tags[f"eval/{name}"] = [(event.step, event.metrics[name]) for event in evaluated]
    return tags


def same(found: dict[str, list[tuple[int, float]]], expected: dict[str, list[tuple[int, float]]]) -> bool:
    """Whether all points are equal, in the float32 of event files."""
    flat = {(tag, step): value for tag, line in expected.items() for step, value in line}
    read = {(tag, step): value for tag, line in found.items() for step, value in line}
    return read == pytest.approx(flat, rel=1e-6)


def test_every_point_and_the_config_are_read_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config, notes = shardkeep.JobConfig.model_validate(TINY), Notes()
    shardkeep.train(config, run_dir=tmp_path / "run", quiet=True, callbacks=[notes, ours.TensorBoardCallback()])
    assert same(scalars(tmp_path / "run" / "tensorboard"), points(notes))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    (text,) = events.Tensors("config/text_summary")
    assert "batch_size: 25" in text.tensor_proto.string_val[0].decode()


def test_points_of_steps_that_a_resume_repeats_are_shown_once(tmp_path: Path) -> None:
    def stop(event: Any) -> None:
        if event.step == 30:
            raise InterruptedError

    folder, config = tmp_path / "events", shardkeep.JobConfig.model_validate(TINY)
    first, second = Notes(on_evaluation=stop), Notes()
    with pytest.raises(InterruptedError):
        shardkeep.train(
            config, run_dir=tmp_path / "run", quiet=True, callbacks=[ours.TensorBoardCallback(folder), first]
        )
    (tmp_path / "run" / "checkpoints" / "step-00000030").rename(tmp_path / "lost")  # as if it was killed before
    shardkeep.resume(tmp_path / "run", quiet=True, callbacks=[second, ours.TensorBoardCallback(folder)])
    assert second.of("on_start")[0].step == 20
    kept = {tag: [point for point in line if point[0] <= 20] for tag, line in points(first).items()}
    again = points(second)
    assert same(scalars(folder), {tag: kept[tag] + again[tag] for tag in kept})


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config, callback = shardkeep.JobConfig.model_validate(TINY), ours.TensorBoardCallback(tmp_path / "file")
    with pytest.raises(shardkeep.UserError, match=r"^TensorBoardCallback: .*/file cannot be written \(File exists\)$"):
        shardkeep.train(config, run_dir=tmp_path / "run", quiet=True, callbacks=[callback])


def test_event_files_on_a_full_disk_are_given_up_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = shardkeep.JobConfig.model_validate({**TINY, "eval": {}, "checkpoint": {}})
    full = FullMeanwhile()
    callbacks = [full, ours.TensorBoardCallback(tmp_path / "events", flush_s=0)]
    summary = shardkeep.train(config, run_dir=tmp_path / "run", quiet=True, callbacks=callbacks)
    assert full.full and summary.status == "completed"
    (warning,) = [record.getMessage() for record in caplog.records if "events: " in record.getMessage()]
    assert warning == f"{tmp_path}/events: not written (File too large); the job continues without"

"""The page of a training loop of the user's own, which may say neither its loss nor its samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardkeep.loop.joining import loop_config
from shardkeep.page.records import RunRecords
from shardkeep.page.state import RunState
from shardkeep.page.warnings import learning, processes, steps
from shardkeep.page.warnings.warning import Check
from tests.support.cases import every
from tests.support.seen_runs import at, progress, sight, step_of, telemetry

LOOP = {"data": {"source": ""}, "train": {"loss": {"name": "bce"}}}


def loop_run(path: Path, *records: Any) -> Path:
    path.mkdir()
    (path / "config.yaml").write_text(loop_config(2, 0, "bounded", None).to_yaml())
    for name, kinds in (("metrics.jsonl", ("progress", "eval")), ("telemetry.jsonl", ("telemetry",))):
        lines = [json.dumps(record) + "\n" for record in records if record["kind"] in kinds]
        (path / name).write_text("".join(lines))
    return path


def of_steps(seconds: float, step: int, **others: Any) -> dict[str, Any]:
    """A progress record of a loop that reports nothing."""
    return {"time": at(seconds), "kind": "progress", "step": step, "loop": True, "step_ms": {"total": 20.0}, **others}


def worker(seconds: float, step: int, **others: Any) -> Any:
    """A telemetry record of a trainer, which has sent 1,000 bytes a step."""
    sent = {"pull": {"values": 600 * step}, "push": {"values": 400 * step}, "tower": {}, "read": {}, "control": 0}
    return telemetry(seconds, "worker", 0, step=step, bytes=sent, **others)


def test_without_samples_curves_are_over_steps(tmp_path: Path) -> None:
    records = [each for n in range(1, 5) for each in (of_steps(n, 10 * n), worker(n, 10 * n, steps=10))]
    scored = {"time": at(4), "kind": "eval", "step": 40, "hits": 0.5}
    seen = RunState(loop_run(tmp_path / "run", *records, scored)).sections()
    overview, curves = seen["overview"], seen["curves"]
    assert overview["loop"] and (overview["step"], overview["steps_per_s"]) == (40, 50.0)
    assert [overview[key] for key in ("samples", "samples_per_s", "loss", "total_steps", "left_s")] == [None] * 5
    columns = curves["training"]["columns"]
    rows = [dict(zip(columns, row, strict=True)) for row in curves["training"]["rows"]]
    assert [(row["step"], row["bytes"], row["steps_per_s"]) for row in rows] == [
        (10 * n, 10_000 * n, 50.0) for n in range(1, 5)
    ]
    assert {(row["samples"], row["loss"], row["samples_per_s"]) for row in rows} == {(None, None, None)}
    (evaluation,) = curves["evaluation"]["rows"]
    assert evaluation[1:] == [40, None, 40_000, 0.5]


def test_a_record_without_a_step_does_not_hide_where_steps_went(tmp_path: Path) -> None:
    times = {"step_ms": {"total": 8.0, "pull_wait": 2.0}, "wait_ms": {"server 0": 2.0}}
    none = {"step_ms": {"total": 0.0, "pull_wait": 0.0}, "wait_ms": {}}
    run = loop_run(tmp_path / "run", worker(1, 10, steps=10, **times), worker(6, 10, steps=0, **none))
    (row,) = RunState(run).sections()["steps"]
    assert (row["total"], row["parts"], row["waits"]) == (8.0, {"pull_wait": 2.0}, {"server 0": 2.0})


def test_a_loop_without_a_loss_has_no_loss_that_is_not_finite(tmp_path: Path) -> None:
    records = RunRecords(loop_run(tmp_path / "run", of_steps(1, 10), of_steps(3, 20)))
    records.refresh()
    assert not records.losses
    assert not learning.not_finite(sight(tmp_path / "other", of_steps(1, 10), config=LOOP))
    assert learning.not_finite(sight(tmp_path / "another", of_steps(1, 10, loss=None), config=LOOP))


def test_no_loss_of_a_loop_is_compared_with_guessing(tmp_path: Path) -> None:
    records = [progress(n, 100 * n, loss=2.0) for n in range(1, 5)]
    assert not learning.worse_than_guessing(sight(tmp_path / "run", *records, config=LOOP))


def test_a_slower_loop_is_told_in_steps(tmp_path: Path) -> None:
    records = [of_steps(n, 10 * n, step_ms={"total": 10.0 if n < 12 else 50.0}) for n in range(1, 16)]
    (found,) = steps.slower(sight(tmp_path / "run", *records, config=LOOP))
    assert found.text == "the speed fell from 100 to 20 steps/s"


@every(
    ("check", "records", "state", "advice"),
    [
        (processes.failed, [], "gone", "Start the loop again."),
        (steps.waits, [step_of(0, pull_wait=50.0)], "training", "client.ahead"),
        (steps.waits_for_samples, [step_of(0, data=50.0)], "training", "read in more processes."),
        (learning.not_finite, [progress(1, 10, dropped_rows=3)], "training", "clip gradients."),
    ],
    ids=["gone", "waits", "samples", "not finite"],
)
def test_advice_is_something_that_a_loop_can_do(
    tmp_path: Path, check: Check, records: list[Any], state: str, advice: str
) -> None:
    (found,) = check(sight(tmp_path / "run", *records, state=state, config=LOOP))
    assert advice in found.advice and "shardkeep train" not in found.advice and "train." not in found.advice

"""The page's warnings: each is seen when it should be, and not when all is well."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from types import ModuleType

import pytest

from shardkeep.page.warnings import checks, learning, processes, steps
from shardkeep.page.warnings.checks import warnings_of
from shardkeep.page.warnings.warning import Check, Sight, Warning
from tests.support.seen_runs import at, event, progress, sight, step_of, telemetry


def only(check: Check, seen: Sight) -> Warning:
    """The one warning of a check."""
    (found,) = check(seen)
    return found


def losses(values: list[float], *, every: int = 100) -> list[object]:
    return [progress(i, every * (i + 1), loss) for i, loss in enumerate(values)]


def test_a_job_without_records_has_no_warning(tmp_path: Path) -> None:
    assert warnings_of(sight(tmp_path / "run", state="starting")) == []


def test_a_failed_job_says_why(tmp_path: Path) -> None:
    seen = sight(tmp_path / "run", state="failed", summary={"status": "failed", "message": "worker 0 ended"})
    assert only(processes.failed, seen).text == "the job failed: worker 0 ended"
    assert not processes.failed(sight(tmp_path / "other", state="completed"))


def test_a_job_whose_processes_are_gone_says_how_to_resume(tmp_path: Path) -> None:
    found = only(processes.failed, sight(tmp_path / "run", state="gone"))
    assert "no process" in found.text and f"--resume {tmp_path / 'run'}" in found.advice


def test_a_job_that_recovers_says_from_what(tmp_path: Path) -> None:
    death = event(1, "server 1 ended: killed by SIGKILL", lost="server", lost_index=1)
    found = only(processes.recovering, sight(tmp_path / "run", death, state="recovering"))
    assert found.text == "the job recovers: server 1 ended: killed by SIGKILL"
    assert found.advice == "Training resumes when all members are back."
    assert not processes.recovering(sight(tmp_path / "run", death))


def test_a_job_that_recovers_says_who_is_awaited_and_for_how_long(tmp_path: Path) -> None:
    seen = sight(
        tmp_path / "run",
        event(1, "worker 0 ended", lost="worker", lost_index=0),
        event(2, "generation 2 formed", tables=[]),
        event(3, "server 1 ended", lost="server", lost_index=1),
        event(10, "server 0 ended", lost="server", lost_index=0),
        state="recovering",
        now=70,
        config={"recovery": {"replace_timeout_s": 900.0}},
    )
    advice = only(processes.recovering, seen).advice
    assert advice == "Training resumes when all members are back, server 1, server 0 for 60 seconds of 900 s."


@pytest.mark.parametrize(("now", "warned"), [(59, False), (130, True)])
def test_no_step_for_a_minute_is_a_problem(tmp_path: Path, now: float, warned: bool) -> None:
    seen = sight(tmp_path / "run", progress(0, 100), now=now)
    assert [w.text for w in processes.no_step(seen)] == (["no step for 2 minutes"] if warned else [])


def test_no_step_is_no_warning_once_the_job_has_ended(tmp_path: Path) -> None:
    assert not processes.no_step(sight(tmp_path / "run", progress(0, 100), now=500, state="completed"))


def test_a_process_without_a_record_for_several_intervals_is_named(tmp_path: Path) -> None:
    records = telemetry(0, "server", 1), telemetry(40, "server", 0)
    assert (
        only(processes.silent, sight(tmp_path / "run", *records, now=41)).text == "server 1 sent nothing for 41 seconds"
    )
    assert not processes.silent(sight(tmp_path / "run", *records, now=15))


def test_silence_is_measured_by_the_interval_of_the_records(tmp_path: Path) -> None:
    assert not processes.silent(sight(tmp_path / "run", telemetry(0, "server", 1, every_s=30.0), now=100))


def test_a_worker_that_waits_names_the_server(tmp_path: Path) -> None:
    seen = sight(
        tmp_path / "run",
        step_of(0, pull_wait=5.0),
        step_of(1, pull_wait=38.0, waits={"server 0": 30.0, "server 1": 8.0}),
    )
    assert only(steps.waits, seen).text == "worker 1 waits 38 % of its step for server 0"
    assert not steps.waits(sight(tmp_path / "run", step_of(0, pull_wait=19.0)))


def test_many_workers_that_wait_for_one_server_are_one_warning(tmp_path: Path) -> None:
    workers = [step_of(i, pull_wait=30.0 + i, waits={"server 2": 30.0}) for i in range(5)]
    assert (
        only(steps.waits, sight(tmp_path / "run", *workers)).text
        == "5 workers wait up to 34 % of their step for server 2"
    )


def test_a_slow_worker_is_found_by_its_own_work_not_by_its_step(tmp_path: Path) -> None:
    workers = [step_of(0, dense_reduce=60.0, backward=30.0), step_of(1, dense_reduce=2.0, backward=88.0)]
    found = only(steps.slow_worker, sight(tmp_path / "run", *workers))
    assert found.text.startswith("worker 1 is slower") and "98.0 ms" in found.text and "backward" in found.text


def test_equal_workers_and_a_single_one_are_not_slow(tmp_path: Path) -> None:
    assert not steps.slow_worker(sight(tmp_path / "run", step_of(0), step_of(1, total=130.0)))
    assert not steps.slow_worker(sight(tmp_path / "run", step_of(0)))


def test_the_worker_that_waits_longest_for_samples_is_named(tmp_path: Path) -> None:
    records = step_of(0, data=25.0), step_of(1, data=19.0), step_of(2, total=120.0, data=37.2)
    (found,) = warnings_of(sight(tmp_path / "run", *records))
    assert found.text == "worker 2 waits 31 % of its step for samples" and found.level == "warn"
    assert found.advice == "Reading data is the bottleneck: check the disk, or convert the data once."


@pytest.mark.parametrize(("waited_ms", "warned"), [(38.0, False), (40.0, True)])
def test_a_wait_for_samples_is_a_share_of_the_step(tmp_path: Path, waited_ms: float, warned: bool) -> None:
    found = warnings_of(sight(tmp_path / "run", step_of(0, total=200.0, data=waited_ms, pull_wait=30.0)))
    assert [w.text for w in found] == (["worker 0 waits 20 % of its step for samples"] if warned else [])


@pytest.mark.parametrize("module", [learning, processes, steps], ids=lambda module: module.__name__.split(".")[-1])
def test_every_check_is_asked(module: ModuleType) -> None:
    asked = {check.__name__ for check in checks.CHECKS}
    functions = dict(inspect.getmembers(module, inspect.isfunction))
    found = {name for name, each in functions.items() if each.__annotations__.get("return") == "list[Warning]"}
    assert found and found <= asked


@pytest.mark.parametrize(("age_min", "warned"), [(9, False), (41, True)])
def test_an_old_checkpoint_has_its_age(tmp_path: Path, age_min: float, warned: bool) -> None:
    seen = sight(tmp_path / "run", now=600 + 60 * age_min, checkpoints=[{"step": 1, "at": 300}, {"step": 2, "at": 600}])
    found = [w.text for w in processes.old_checkpoint(seen)]
    assert found == (["the newest checkpoint is 41 minutes old"] if warned else [])


def test_a_checkpoint_that_is_written_each_hour_may_be_an_hour_old(tmp_path: Path) -> None:
    rare = [{"step": 1, "at": 0}, {"step": 2, "at": 3600}]
    assert not processes.old_checkpoint(sight(tmp_path / "run", now=3600 + 4000, checkpoints=rare))


def test_a_loss_that_is_no_number_and_dropped_rows_blame_the_learning_rate(tmp_path: Path) -> None:
    found = only(learning.not_finite, sight(tmp_path / "run", progress(0, 700, None, dropped_rows=1200)))
    assert (
        found.text
        == "the loss is not finite at step 700; 1,200 rows of gradients were dropped because they were not finite"
    )
    assert "learning rate" in found.advice
    assert not learning.not_finite(sight(tmp_path / "run", progress(0, 700, 0.4, dropped_rows=0)))


def test_a_rising_loss_is_told_from_noise(tmp_path: Path) -> None:
    falls = [0.6 - 0.01 * i for i in range(12)]
    found = only(learning.rising_loss, sight(tmp_path / "run", *losses([*falls, 0.7, 0.9, 1.2, 1.5])))
    assert found.text.startswith("the loss rises: 0.5") and found.text.endswith("1.2000 now")
    noise = [0.45 + 0.01 * math.sin(7 * i) for i in range(30)]
    assert not learning.rising_loss(sight(tmp_path / "run", *losses(noise)))


def test_a_loss_above_guessing(tmp_path: Path) -> None:
    found = only(learning.worse_than_guessing, sight(tmp_path / "run", *losses([0.9, 0.95, 1.0]), config=BCE))
    assert "0.950" in found.text and "0.693" in found.text
    assert not learning.worse_than_guessing(sight(tmp_path / "run", *losses([0.9, 0.95, 1.0])))
    assert not learning.worse_than_guessing(sight(tmp_path / "run", *losses([0.6, 0.6, 0.6]), config=BCE))


BCE = {"train": {"loss": {"name": "bce"}}}


def evaluated(*aucs: float, every: int = 100) -> list[dict[str, object]]:
    """Records of evaluations."""
    return [{"time": at(i), "kind": "eval", "step": every * i, "auc": auc} for i, auc in enumerate(aucs)]


def test_a_loss_that_exploded_and_fell_to_that_of_a_constant_prediction_blames_the_learning_rate(
    tmp_path: Path,
) -> None:
    exploded = losses([4202.3, 104.1, *[0.63] * 9], every=4)
    found = only(learning.exploded_loss, sight(tmp_path / "run", *exploded, config=BCE))
    assert (found.level, found.text) == (
        "bad", "the loss was 4,202.3 at step 4; a constant prediction of 0.5 has 0.693")  # fmt: skip
    assert "learning rate" in found.advice
    learned = sight(tmp_path / "run", *exploded, *evaluated(0.5, 0.7), config=BCE)
    assert only(learning.exploded_loss, learned).level == "note"
    assert not learning.exploded_loss(sight(tmp_path / "run", *exploded))
    assert not learning.exploded_loss(sight(tmp_path / "run", *losses([1.3, 0.7, *[0.6] * 9]), config=BCE))


def test_probabilities_that_are_worse_than_their_average(tmp_path: Path) -> None:
    def found(step: int, entropy: float | None) -> list[Warning]:
        record = {"time": at(0), "kind": "eval", "step": step, "auc": 0.63, "normalized_entropy": entropy}
        return learning.worse_than_average(sight(tmp_path / "run", record))

    (told,) = found(630, 1.6503)
    assert told.text.startswith("normalized entropy is 1.65 at step 630")
    assert not found(630, 0.99) and not found(50, 1.65) and not found(630, None)


def test_a_model_that_guesses_twice_in_a_row(tmp_path: Path) -> None:
    found = only(learning.guessing, sight(tmp_path / "run", *evaluated(0.5, 0.5, 0.4998)))
    assert (found.level, found.text) == ("bad", "after 200 steps AUC is 0.4998: the model guesses")
    assert not learning.guessing(sight(tmp_path / "run", *evaluated(0.5, 0.5, 0.6)))
    assert not learning.guessing(sight(tmp_path / "run", *evaluated(0.5, 0.5, every=50)))
    assert not learning.guessing(sight(tmp_path / "run", *evaluated(0.5)))


def test_an_auc_that_only_a_model_has_that_is_given_the_label(tmp_path: Path) -> None:
    found = only(learning.too_good, sight(tmp_path / "run", *evaluated(0.8, 0.99995)))
    assert (found.level, found.text) == ("warn", "AUC is 0.99995: a feature probably tells the label")
    assert not learning.too_good(sight(tmp_path / "run", *evaluated(0.99995, 0.9999)))


def test_a_loss_that_has_not_moved(tmp_path: Path) -> None:
    falling = [1.0 - 0.02 * i for i in range(20)]
    still = [0.6 + 0.001 * (-1) ** i for i in range(22)]
    found = only(learning.stuck_loss, sight(tmp_path / "run", *losses([*falling, *still], every=50)))
    assert found.text == "the loss has not moved for 1,000 steps"
    assert not learning.stuck_loss(sight(tmp_path / "run", *losses([1.0 - 0.01 * i for i in range(40)], every=50)))
    assert not learning.stuck_loss(sight(tmp_path / "run", *losses(still[:4], every=50)))


def test_an_auc_that_falls(tmp_path: Path) -> None:
    found = only(learning.falling_auc, sight(tmp_path / "run", *evaluated(0.7, 0.8, 0.79, 0.78)))
    assert found.text == "AUC falls: 0.8000 at step 100, 0.7800 at step 300"
    assert not learning.falling_auc(sight(tmp_path / "run", *evaluated(0.7, 0.78, 0.8, 0.799)))


def test_each_of_several_labels_has_its_own_warnings(tmp_path: Path) -> None:
    aucs = {
        "auc/clicked": (0.7, 0.71, 0.72, 0.73),
        "auc/bought": (0.7, 0.8, 0.79, 0.78),
        "auc/x": (0.5, 0.5, 0.5, 0.51),
    }
    records = [
        {"time": at(i), "kind": "eval", "step": 100 * i} | {key: values[i] for key, values in aucs.items()}
        for i in range(4)
    ]
    found = sight(tmp_path / "run", *records)
    assert only(learning.falling_auc, found).text == "AUC/bought falls: 0.8000 at step 100, 0.7800 at step 300"
    assert only(learning.guessing, found).text == "after 300 steps AUC/x is 0.5100: the model guesses"
    several = BCE | {"data": {"labels": [{"column": "clicked"}, {"column": "bought"}]}}
    assert not learning.worse_than_guessing(sight(tmp_path / "run", *losses([0.9, 0.95, 1.0]), config=several))


@pytest.mark.parametrize(("slope", "advice"), [(-0.01, "overfits"), (0.01, "learning rate")], ids=["falls", "rises"])
def test_an_auc_that_falls_is_overfitting_only_while_the_training_loss_falls(
    tmp_path: Path, slope: float, advice: str
) -> None:
    values = losses([0.5 + slope * i for i in range(12)], every=30)
    found = only(learning.falling_auc, sight(tmp_path / "run", *values, *evaluated(0.7, 0.8, 0.79, 0.78)))
    assert advice in found.advice


def test_a_job_that_became_slower(tmp_path: Path) -> None:
    rates = [900.0, *[1000.0] * 8, 400.0, 400.0, 400.0]
    records = [progress(i, i, samples_per_s=rate) for i, rate in enumerate(rates)]
    assert only(steps.slower, sight(tmp_path / "run", *records)).text == "the speed fell from 1,000 to 400 samples/s"
    assert not steps.slower(sight(tmp_path / "run", *records[:10]))


def test_a_restarted_server_is_named_with_its_time(tmp_path: Path) -> None:
    recovery = {"phase": "recovery", "cause": "server 1 ended", "died": [{"role": "server", "index": 1}]}
    records = (
        event(0, "server 1 ended", lost="server", lost_index=1),
        event(3, "it recovered", **recovery, kind="phase"),
    )
    found = only(processes.restarts, sight(tmp_path / "run", *records, now=183))
    assert (found.level, found.text) == ("warn", "server 1 died and was restarted 3 minutes ago; 1 recovery so far")
    assert only(processes.restarts, sight(tmp_path / "run", *records, now=4000)).level == "note"
    assert not processes.restarts(sight(tmp_path / "run"))


def test_a_restart_says_how_the_process_died(tmp_path: Path) -> None:
    cause = "server 1 (pid 7 on 127.0.0.1) ended: killed by SIGKILL, the job was at step 46"
    died = [{"role": "server", "index": 1, "cause": cause, "reason": "killed by SIGKILL"}]
    recovery = event(3, "it recovered", kind="phase", phase="recovery", cause=cause, died=died)
    found = only(processes.restarts, sight(tmp_path / "run", recovery, now=183))
    assert found.text.startswith("server 1 died (killed by SIGKILL) and was restarted 3 minutes ago;")


def test_four_recoveries_within_an_hour_are_a_problem(tmp_path: Path) -> None:
    records = [event(60 * i, f"recovery {i}", kind="phase", phase="recovery") for i in range(4)]
    assert only(processes.restarts, sight(tmp_path / "run", *records, now=300)).level == "bad"


def test_a_process_near_its_memory_limit(tmp_path: Path) -> None:
    near, far = (
        telemetry(0, "server", 0, rss_bytes=93, limit_bytes=100),
        telemetry(0, "server", 1, rss_bytes=50, limit_bytes=100),
    )
    assert only(processes.memory, sight(tmp_path / "run", near, far)).text == "server 0 uses 93 % of its memory limit"
    assert not processes.memory(sight(tmp_path / "run", far))
    other = telemetry(0, "worker", 0, rss_bytes=96, limit_bytes=100)
    assert (
        only(processes.memory, sight(tmp_path / "run", near, other)).text
        == "server 0, worker 0 use up to 96 % of their memory limits"
    )


def test_warnings_of_the_job_itself_appear_once_each(tmp_path: Path) -> None:
    records = [event(i, "warning: worker 1 misses a column", warning="worker 1 misses a column") for i in range(3)]
    assert only(checks.told, sight(tmp_path / "run", *records)).text == "worker 1 misses a column"


def test_the_worst_warning_comes_first(tmp_path: Path) -> None:
    seen = sight(
        tmp_path / "run",
        event(0, "warning: a remark", warning="a remark"),
        step_of(0, pull_wait=50.0),
        progress(0, 10, None),
        now=1,
    )
    assert [w.level for w in warnings_of(seen)] == ["bad", "warn", "note"]


def of_evaluation(logloss: float, samples: int = 100_000, **others: object) -> dict[str, object]:
    """A record of an evaluation after step 1,200."""
    return {"time": at(20), "kind": "eval", "step": 1200, "auc": 0.7, "logloss": logloss, "samples": samples, **others}


def test_a_loss_on_evaluation_rows_above_that_of_training_names_the_settings_that_help(tmp_path: Path) -> None:
    training = losses([0.7] * 9 + [0.557, 0.558, 0.559])
    found = only(learning.overfits, sight(tmp_path / "run", *training, of_evaluation(0.654), config=BCE))
    assert found.text == "the loss is 0.6540 on evaluation rows, 17 % above 0.5580 in training"
    assert found.level == "warn"
    for setting in ("train.early_stopping", "epochs", "weight_decay", "model.dropout", "dim", "admit.min_count"):
        assert setting in found.advice


@pytest.mark.parametrize(
    ("evaluation", "config"),
    [
        (of_evaluation(0.58), BCE),
        (of_evaluation(0.62, samples=900), BCE),
        (of_evaluation(0.7), {"train": {"loss": {"name": "huber"}}}),
        (of_evaluation(0.7), {}),
    ],
    ids=["within the margin", "within the noise of few rows", "no metric is the loss", "no loss"],
)
def test_a_loss_on_evaluation_rows_that_is_not_clearly_above_is_no_warning(
    tmp_path: Path, evaluation: dict[str, object], config: dict[str, object]
) -> None:
    training = losses([0.7] * 9 + [0.557, 0.558, 0.559])
    assert not learning.overfits(sight(tmp_path / "run", *training, evaluation, config=config))


def test_a_loss_of_training_that_jumps_is_noise(tmp_path: Path) -> None:
    training = losses([0.7] * 9 + [0.45, 0.65, 0.57])
    assert not learning.overfits(sight(tmp_path / "run", *training, of_evaluation(0.65), config=BCE))


def test_only_losses_before_the_evaluation_are_compared_with_it(tmp_path: Path) -> None:
    training = losses([0.654] * 12 + [0.4] * 9)
    assert not learning.overfits(sight(tmp_path / "run", *training, of_evaluation(0.654), config=BCE))


def test_a_large_dense_model_has_its_parameters_beside_the_rows(tmp_path: Path) -> None:
    summary = {"status": "completed", "tower": {"parameters": 1_234_567}, "tables": [{"name": "a", "rows": 200},
               {"name": "b", "rows": 1000}]}  # fmt: skip
    record = step_of(0, forward=30.0, backward=30.0, optimizer=5.0, dense_reduce=5.0, pull_wait=10.0)
    found = only(steps.large_tower, sight(tmp_path / "run", record, summary=summary))
    assert (found.level, found.text) == ("note", "products, sums and updates of the dense model take 70 % of a step: "
                                         "1,234,567 parameters beside 1,200 rows")  # fmt: skip
    few = {**summary, "tower": {"parameters": 1_200}}
    assert not steps.large_tower(sight(tmp_path / "few", record, summary=few))
    short = step_of(0, forward=30.0, backward=29.0)
    assert not steps.large_tower(sight(tmp_path / "small", short, summary=summary))


@pytest.mark.parametrize(
    ("waited_ms", "wall_s", "warned"), [(49.0, 90.0, False), (310.0, 59.0, False), (310.0, 90.0, True)]
)
def test_threads_that_wait_for_a_core_are_told_of_runs_that_are_not_short(
    tmp_path: Path, waited_ms: float, wall_s: float, warned: bool
) -> None:
    cpu = {"waited": waited_ms, "worker": 200.0}
    summary = {"status": "completed", "wall_s": wall_s, "cpu_ms": cpu, "step_ms": {"total": 100.0}}
    found = steps.waits_for_cores(sight(tmp_path / "run", summary=summary))
    text = (
        "the threads of a worker wait 310.0 ms for a core in a step of 100.0 ms: more threads run than there are cores"
    )
    assert [warning.text for warning in found] == ([text] if warned else [])
    assert not steps.waits_for_cores(sight(tmp_path / "old", summary={"status": "completed", "cpu_ms": {}}))


def test_a_job_of_one_thread_is_not_advised_to_set_fewer(tmp_path: Path) -> None:
    summary = {"status": "completed", "wall_s": 90.0, "cpu_ms": {"waited": 310.0}, "step_ms": {"total": 100.0}}
    config = {"servers": 0, "workers": 1, "threads": 1}
    alone = only(steps.waits_for_cores, sight(tmp_path / "one", summary=summary, config=config))
    assert alone.advice == "Other programs take its cores."
    more = only(steps.waits_for_cores, sight(tmp_path / "two", summary=summary, config=config | {"threads": 2}))
    assert more.advice.startswith("Set fewer threads or workers")

"""The page's warnings: each is seen when it should be, and not when all is well."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from shardkeep.page.warnings import checks, learning, processes, steps
from shardkeep.page.warnings.checks import warnings_of
from shardkeep.page.warnings.learning import (
    exploded_loss,
    falling_auc,
    guessing,
    not_finite,
    overfits,
    rising_loss,
    stuck_loss,
    too_good,
    worse_than_average,
    worse_than_guessing,
)  # fmt: skip
from shardkeep.page.warnings.processes import failed, memory, no_step, old_checkpoint, recovering, restarts, silent
from shardkeep.page.warnings.steps import large_tower, slow_worker, slower, waits, waits_for_cores, waits_for_samples
from shardkeep.page.warnings.warning import Check
from tests.support.cases import every
from tests.support.seen_runs import Record, at, event, progress, sight, step_of, telemetry

BCE = {"train": {"loss": {"name": "bce"}}}
LOOP = {"data": {"source": ""}, **BCE}


def says(
    check: Check,
    text: str | tuple[str, ...] | None,
    *records: Record,
    level: str | None = None,
    advice: str | tuple[str, ...] = (),
    **sees: Any,
) -> tuple[Any, ...]:
    """A check that gives one warning. `text`, `advice`: all of it, or parts of it; None = there is no warning.
    `sees`: as of `sight`."""
    return check, records, sees, text, level, advice


def silence(check: Check, *records: Record, **sees: Any) -> tuple[Any, ...]:
    return says(check, None, *records, **sees)


def has(found: str, expected: str | tuple[str, ...]) -> bool:
    return found == expected if isinstance(expected, str) else all(part in found for part in expected)


def losses(values: list[float], *, every: int = 100) -> list[Record]:
    return [progress(i, every * (i + 1), loss) for i, loss in enumerate(values)]


def evaluated(*aucs: float, every: int = 100, name: str = "auc") -> list[Record]:
    return [{"time": at(i), "kind": "eval", "step": every * i, name: auc} for i, auc in enumerate(aucs)]


def of_steps(seconds: float, step: int, **others: Any) -> Record:
    """A progress record of a loop of the user's own, which reports no loss."""
    return {"time": at(seconds), "kind": "progress", "step": step, "loop": True, "step_ms": {"total": 20.0}, **others}


def lost(seconds: float, role: str, index: int, text: str = "") -> Record:
    return event(seconds, text or f"{role} {index} ended", lost=role, lost_index=index)


def recovery(seconds: float, **others: Any) -> Record:
    return event(seconds, "it recovered", kind="phase", phase="recovery", **others)


def entropy(step: int, value: float | None) -> Record:
    return {"time": at(0), "kind": "eval", "step": step, "auc": 0.63, "normalized_entropy": value}


def of_evaluation(logloss: float, samples: int = 100_000) -> Record:
    return {"time": at(20), "kind": "eval", "step": 1200, "auc": 0.7, "logloss": logloss, "samples": samples}


def tower(parameters: int) -> Record:
    return {"status": "completed", "tower": {"parameters": parameters},
            "tables": [{"name": "a", "rows": 200}, {"name": "b", "rows": 1000}]}  # fmt: skip


KILLED = "server 1 (pid 7 on 127.0.0.1) ended: killed by SIGKILL, the job was at step 46"
DIED = [{"role": "server", "index": 1, "cause": KILLED, "reason": "killed by SIGKILL"}]
DEATH = event(1, "server 1 ended: killed by SIGKILL", lost="server", lost_index=1)
AWAITED = (
    lost(1, "worker", 0), event(2, "generation 2 formed", tables=[]), lost(3, "server", 1), lost(10, "server", 0)
)  # fmt: skip
RESTART = lost(0, "server", 1), recovery(3, cause="server 1 ended", died=[{"role": "server", "index": 1}])
NEAR, FAR = (telemetry(0, "server", i, rss_bytes=rss, limit_bytes=100) for i, rss in enumerate((93, 50)))
OLD, RARE = [{"step": 1, "at": 300}, {"step": 2, "at": 600}], [{"step": 1, "at": 0}, {"step": 2, "at": 3600}]
SPEEDS = [progress(i, i, samples_per_s=rate) for i, rate in enumerate([900.0, *[1000.0] * 8, 400.0, 400.0, 400.0])]
SLOW_LOOP = [of_steps(n, 10 * n, step_ms={"total": 10.0 if n < 12 else 50.0}) for n in range(1, 16)]
FALLS, NOISE = [0.6 - 0.01 * i for i in range(12)], [0.45 + 0.01 * math.sin(7 * i) for i in range(30)]
EXPLODED = losses([4202.3, 104.1, *[0.63] * 9], every=4)
STILL = [0.6 + 0.001 * (-1) ** i for i in range(22)]
FALLING = evaluated(0.7, 0.8, 0.79, 0.78)
AUCS = {"clicked": (0.7, 0.71, 0.72, 0.73), "bought": (0.7, 0.8, 0.79, 0.78), "x": (0.5, 0.5, 0.5, 0.51)}
LABELS: list[Record] = [
    {"time": at(i), "kind": "eval", "step": 100 * i, **{f"auc/{name}": aucs[i] for name, aucs in AUCS.items()}}
    for i in range(4)
]
TWO_LABELS = BCE | {"data": {"labels": [{"column": "clicked"}, {"column": "bought"}]}}
TRAINED = losses([0.7] * 9 + [0.557, 0.558, 0.559])
HELPS = ("train.early_stopping", "epochs", "weight_decay", "model.dropout", "dim", "admit.min_count")
DENSE = step_of(0, forward=30.0, backward=30.0, optimizer=5.0, dense_reduce=5.0, pull_wait=10.0)
TIMES = {"step_ms": {"total": 100.0}, "cpu_ms": {"waited": 310.0, "worker": 200.0}}
CORES = {"status": "completed", "wall_s": 90.0, **TIMES}
ONE_THREAD = {"servers": 0, "workers": 1, "threads": 1}

SEEN = {
    "a failed job": says(failed, "the job failed: worker 0 ended", state="failed",
                         summary={"status": "failed", "message": "worker 0 ended"}),
    "a completed job": silence(failed, state="completed"),
    "processes that are gone": says(failed, ("no process",), state="gone", advice=("--resume ",)),
    "a loop that is gone": says(failed, ("no process",), state="gone", config=LOOP, advice=("Start the loop again.",)),
    "a recovery": says(recovering, "the job recovers: server 1 ended: killed by SIGKILL", DEATH, state="recovering",
                       advice="Training resumes when all members are back."),
    "a death of a job that trains": silence(recovering, DEATH),
    "a recovery that waits for members": says(
        recovering, (), *AWAITED, state="recovering", now=70, config={"recovery": {"replace_timeout_s": 900.0}},
        advice="Training resumes when all members are back, server 1, server 0 for 60 seconds of 900 s."),
    "a step 59 seconds ago": silence(no_step, progress(0, 100), now=59),
    "a step 130 seconds ago": says(no_step, "no step for 2 minutes", progress(0, 100), now=130),
    "a step before the end": silence(no_step, progress(0, 100), now=500, state="completed"),
    "a process without a record": says(silent, "server 1 sent nothing for 41 seconds", telemetry(0, "server", 1),
                                       telemetry(40, "server", 0), now=41),
    "a record 15 seconds ago": silence(silent, telemetry(0, "server", 1), telemetry(40, "server", 0), now=15),
    "records each 30 seconds": silence(silent, telemetry(0, "server", 1, every_s=30.0), now=100),
    "a restart": says(restarts, "server 1 died and was restarted 3 minutes ago; 1 recovery so far", *RESTART, now=183,
                      level="warn"),
    "an old restart": says(restarts, (), *RESTART, now=4000, level="note"),
    "no restart": silence(restarts),
    "a restart after a signal": says(
        restarts, ("server 1 died (killed by SIGKILL) and was restarted 3 minutes ago;",),
        recovery(3, cause=KILLED, died=DIED), now=183),
    "a server that lost updates": says(
        restarts, "server 1 died and was restarted 3 minutes ago; 1 recovery so far; 7 steps were lost; it ends early",
        recovery(3, died=[{"role": "server", "index": 1, "why": "it ends early"}], lost_steps=7), now=183),
    "four recoveries within an hour": says(restarts, (), *(recovery(60 * i) for i in range(4)), now=300, level="bad"),
    "a process near its limit": says(memory, "server 0 uses 93 % of its memory limit", NEAR, FAR),
    "a process far from its limit": silence(memory, FAR),
    "two near their limits": says(memory, "server 0, worker 0 use up to 96 % of their memory limits", NEAR,
                                  telemetry(0, "worker", 0, rss_bytes=96, limit_bytes=100)),
    "a checkpoint of 9 minutes": silence(old_checkpoint, now=1140, checkpoints=OLD),
    "a checkpoint of 41 minutes": says(old_checkpoint, "the newest checkpoint is 41 minutes old", now=3060,
                                       checkpoints=OLD),
    "a checkpoint each hour": silence(old_checkpoint, now=7600, checkpoints=RARE),
    "a warning of the job": says(checks.told, "worker 1 misses a column",
                                 *(event(i, "warning: it", warning="worker 1 misses a column") for i in range(3))),
    "a wait for a server": says(waits, "worker 1 waits 38 % of its step for server 0", step_of(0, pull_wait=5.0),
                                step_of(1, pull_wait=38.0, waits={"server 0": 30.0, "server 1": 8.0})),
    "a short wait for a server": silence(waits, step_of(0, pull_wait=19.0)),
    "a wait of a loop": says(waits, (), step_of(0, pull_wait=50.0), config=LOOP, advice=("client.ahead",)),
    "many that wait": says(waits, "5 workers wait up to 34 % of their step for server 2",
                           *(step_of(i, pull_wait=30.0 + i, waits={"server 2": 30.0}) for i in range(5))),
    "a slow worker": says(slow_worker, ("worker 1 is slower", "98.0 ms", "backward"),
                          step_of(0, dense_reduce=60.0, backward=30.0), step_of(1, dense_reduce=2.0, backward=88.0)),
    "equal workers": silence(slow_worker, step_of(0), step_of(1, total=130.0)),
    "one worker": silence(slow_worker, step_of(0)),
    "waits for samples": says(
        warnings_of, "worker 2 waits 31 % of its step for samples", step_of(0, data=25.0), step_of(1, data=19.0),
        step_of(2, total=120.0, data=37.2), level="warn",
        advice="Reading data is the bottleneck: check the disk, or convert the data once."),
    "a wait of 19 %": silence(warnings_of, step_of(0, total=200.0, data=38.0, pull_wait=30.0)),
    "a wait of 20 %": says(warnings_of, "worker 0 waits 20 % of its step for samples",
                           step_of(0, total=200.0, data=40.0, pull_wait=30.0)),
    "a loop's wait for samples": says(waits_for_samples, (), step_of(0, data=50.0), config=LOOP,
                                      advice=("read in more processes.",)),
    "a job that became slower": says(slower, "the speed fell from 1,000 to 400 samples/s", *SPEEDS),
    "two slow records": silence(slower, *SPEEDS[:10]),
    "a slower loop": says(slower, "the speed fell from 100 to 20 steps/s", *SLOW_LOOP, config=LOOP),
    "a large dense model": says(
        large_tower, "products, sums and updates of the dense model take 70 % of a step: 1,234,567 parameters beside "
        "1,200 rows", DENSE, summary=tower(1_234_567), level="note"),
    "as many rows": silence(large_tower, DENSE, summary=tower(1_200)),
    "short products": silence(large_tower, step_of(0, forward=30.0, backward=29.0), summary=tower(1_234_567)),
    "threads that wait": says(
        waits_for_cores, "the threads of a worker wait 310.0 ms for a core in a step of 100.0 ms: more threads run "
        "than there are cores", summary=CORES),
    "threads that wait shortly": silence(waits_for_cores, summary=CORES | {"cpu_ms": {"waited": 49.0}}),
    "threads of a short run": silence(waits_for_cores, summary=CORES | {"wall_s": 59.0}),
    "an old summary": silence(waits_for_cores, summary={"status": "completed", "cpu_ms": {}}),
    "one thread": says(waits_for_cores, (), summary=CORES, config=ONE_THREAD, advice="Other programs take its cores."),
    "two threads": says(waits_for_cores, (), summary=CORES, config=ONE_THREAD | {"threads": 2},
                        advice=("Set fewer threads or workers",)),
    "a loss that is no number": says(
        not_finite, "the loss is not finite at step 700; 1,200 rows of gradients were dropped because they were not "
        "finite", progress(0, 700, None, dropped_rows=1200), advice=("learning rate",)),
    "a finite loss": silence(not_finite, progress(0, 700, 0.4, dropped_rows=0)),
    "a loop without a loss": silence(not_finite, of_steps(1, 10), config=LOOP),
    "a loop whose loss is no number": says(not_finite, (), of_steps(1, 10, loss=None), config=LOOP),
    "a loop's dropped rows": says(not_finite, (), progress(1, 10, dropped_rows=3), config=LOOP,
                                  advice=("clip gradients.",)),
    "a rising loss": says(rising_loss, ("the loss rises: 0.5", "1.2000 now"), *losses([*FALLS, 0.7, 0.9, 1.2, 1.5])),
    "noise": silence(rising_loss, *losses(NOISE)),
    "a loss above guessing": says(worse_than_guessing, ("0.950", "0.693"), *losses([0.9, 0.95, 1.0]), config=BCE),
    "a loss of another kind": silence(worse_than_guessing, *losses([0.9, 0.95, 1.0])),
    "a loss below guessing": silence(worse_than_guessing, *losses([0.6, 0.6, 0.6]), config=BCE),
    "a loss of two labels": silence(worse_than_guessing, *losses([0.9, 0.95, 1.0]), config=TWO_LABELS),
    "a loss of a loop": silence(worse_than_guessing, *losses([2.0] * 4), config=LOOP),
    "a loss that exploded": says(
        exploded_loss, "the loss was 4,202.3 at step 4; a constant prediction of 0.5 has 0.693", *EXPLODED, config=BCE,
        level="bad", advice=("learning rate",)),
    "a loss that exploded and a model that learned": says(exploded_loss, (), *EXPLODED, *evaluated(0.5, 0.7),
                                                          config=BCE, level="note"),
    "a large loss of another kind": silence(exploded_loss, *EXPLODED),
    "a large first loss": silence(exploded_loss, *losses([1.3, 0.7, *[0.6] * 9]), config=BCE),
    "worse than their average": says(worse_than_average, ("normalized entropy is 1.65 at step 630",),
                                     entropy(630, 1.6503)),
    "better than their average": silence(worse_than_average, entropy(630, 0.99)),
    "an early entropy": silence(worse_than_average, entropy(50, 1.65)),
    "a model that guesses": says(guessing, "after 200 steps AUC is 0.4998: the model guesses",
                                 *evaluated(0.5, 0.5, 0.4998), level="bad"),
    "a model that learns": silence(guessing, *evaluated(0.5, 0.5, 0.6)),
    "an early model": silence(guessing, *evaluated(0.5, 0.5, every=50)),
    "one evaluation": silence(guessing, *evaluated(0.5)),
    "a label that guesses": says(guessing, "after 300 steps AUC/x is 0.5100: the model guesses", *LABELS),
    "an AUC too good": says(too_good, "AUC is 0.99995: a feature probably tells the label", *evaluated(0.8, 0.99995),
                            level="warn"),
    "a good AUC": silence(too_good, *evaluated(0.99995, 0.9999)),
    "a loss that does not move": says(stuck_loss, "the loss has not moved for 1,000 steps",
                                      *losses([*(1.0 - 0.02 * i for i in range(20)), *STILL], every=50)),
    "a loss that moves": silence(stuck_loss, *losses([1.0 - 0.01 * i for i in range(40)], every=50)),
    "few losses": silence(stuck_loss, *losses(STILL[:4], every=50)),
    "an AUC that falls": says(falling_auc, "AUC falls: 0.8000 at step 100, 0.7800 at step 300", *FALLING),
    "an AUC that fell once": silence(falling_auc, *evaluated(0.7, 0.78, 0.8, 0.799)),
    "an AUC of a label that falls": says(falling_auc, "AUC/bought falls: 0.8000 at step 100, 0.7800 at step 300",
                                         *LABELS),
    "an AUC that falls with the loss": says(falling_auc, (), *losses([0.5 - 0.01 * i for i in range(12)], every=30),
                                            *FALLING, advice=("overfits",)),
    "an AUC that falls while the loss rises": says(
        falling_auc, (), *losses([0.5 + 0.01 * i for i in range(12)], every=30), *FALLING, advice=("learning rate",)),
    "overfitting": says(overfits, "the loss is 0.6540 on evaluation rows, 17 % above 0.5580 in training", *TRAINED,
                        of_evaluation(0.654), config=BCE, level="warn", advice=HELPS),
    "a loss of 0": says(overfits, ("0.6540 on evaluation rows, above 0.0000",), *losses([0.0] * 12),
                        of_evaluation(0.654), config=BCE),
    "a loss within the margin": silence(overfits, *TRAINED, of_evaluation(0.58), config=BCE),
    "a loss of few rows": silence(overfits, *TRAINED, of_evaluation(0.62, samples=900), config=BCE),
    "no metric is the loss": silence(overfits, *TRAINED, of_evaluation(0.7),
                                     config={"train": {"loss": {"name": "huber"}}}),
    "no loss": silence(overfits, *TRAINED, of_evaluation(0.7)),
    "a training loss that jumps": silence(overfits, *losses([0.7] * 9 + [0.45, 0.65, 0.57]), of_evaluation(0.65),
                                          config=BCE),
    "losses after the evaluation": silence(overfits, *losses([0.654] * 12 + [0.4] * 9), of_evaluation(0.654),
                                           config=BCE),
    "no records": silence(warnings_of, state="starting"),
}  # fmt: skip


@every(("check", "records", "sees", "text", "level", "advice"), SEEN.values(), ids=SEEN)
def test_what_is_wrong_gives_its_warning_and_what_is_not_gives_none(
    tmp_path: Path, check: Check, records: Any, sees: Any, text: Any, level: str | None, advice: Any
) -> None:
    found = check(sight(tmp_path / "run", *records, **sees))
    if text is None:
        assert found == []
        return
    (warning,) = found
    assert has(warning.text, text) and has(warning.advice, advice) and level in (None, warning.level), warning
    if sees.get("config") is LOOP:
        assert "shardkeep train" not in warning.advice and "train." not in warning.advice
    if sees.get("state") == "gone" and "config" not in sees:
        assert f"--resume {tmp_path / 'run'}" in warning.advice


def with_bad(value: Any, names: Collection[str], bad: Any) -> Any:
    """Records with another number wherever one of these names has one."""
    if isinstance(value, Mapping):
        number = {key: isinstance(each, int | float) and key in names for key, each in value.items()}
        return {key: bad if number[key] else with_bad(each, names, bad) for key, each in value.items()}
    return [with_bad(each, names, bad) for each in value] if isinstance(value, list | tuple) else value


def names_in(value: Any) -> set[str]:
    own = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    names = {key for key, each in value.items() if isinstance(each, int | float)} if own and own is not value else set()
    return names.union(*map(names_in, own))


@every(("check", "records", "sees", "text", "level", "advice"), SEEN.values(), ids=SEEN)
def test_no_warning_judges_a_number_that_is_not_finite(
    tmp_path: Path, check: Check, records: Any, sees: Any, text: Any, level: str | None, advice: Any
) -> None:
    whole = {"records": list(records), "summary": sees.get("summary")}
    names = names_in(whole) if text is not None else set()
    for bad in (math.nan, math.inf, -math.inf, None):
        single = names & {"waited", "total", "parameters", "loss", "logloss", "auc", "normalized_entropy"}
        for own in [{name} for name in single] + [names - {"step", "rows"}] * bool(names):
            changed = with_bad(whole, own, bad)
            found = check(sight(tmp_path / "run", *changed["records"], **sees | {"summary": changed["summary"]}))
            assert not any(re.search(r"\b(nan|inf)\b", one.text + one.advice) for one in found), (own, bad)
            if len(own) > 1 and check not in (not_finite, warnings_of) and check.__module__ != processes.__name__:
                assert not found, (own, bad)


@every("module", [learning, processes, steps])
def test_every_check_is_asked_and_has_a_case(module: Any) -> None:
    functions = inspect.getmembers(module, inspect.isfunction)
    found = {name for name, each in functions if each.__annotations__.get("return") == "list[Warning]"}
    assert found and found <= {check.__name__ for check in checks.CHECKS}
    assert found <= {check.__name__ for check, _, _, text, *_ in SEEN.values() if text is not None}


def test_the_worst_warning_comes_first(tmp_path: Path) -> None:
    remark = event(0, "warning: a remark", warning="a remark")
    seen = sight(tmp_path / "run", remark, step_of(0, pull_wait=50.0), progress(0, 10, None), now=1)
    assert [warning.level for warning in warnings_of(seen)] == ["bad", "warn", "note"]

"""The trials of a search: what a killed process leaves, what counts as best, what stops early; and the report."""

from __future__ import annotations

import csv
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardkeep.automl.space import space_of
from shardkeep.base.errors import UserError
from shardkeep.experiments.journal import Ended, Journal
from shardkeep.experiments.plan import Trial
from tests.support.cases import every
from tests.support.tuning import search

if TYPE_CHECKING:
    from shardkeep.experiments.tune import Search

LR = "tower.optimizer.lr"


class Runs:
    """A search and its journal, with trials that a test begins and ends. A second one in the same folder continues."""

    def __init__(self, folder: Path, over: list[str], *overrides: str, first_look: int = 1, **options: Any) -> None:
        self.search: Search = search(folder, over, *overrides, **options)
        (self.search.out / "runs").mkdir(parents=True, exist_ok=True)
        self.journal = Journal(self.search.out)
        self.search.open(self.journal, first_look)

    def begin(self) -> Trial:
        trial = self.search.ask()
        assert isinstance(trial, Trial)
        self.journal.begin(trial.name, trial.settings, pid=1)
        return trial

    def end(self, trial: Trial, value: float | None = None, state: Any = "completed", **facts: Any) -> str:
        ended = Ended(trial.name, state, dict(trial.settings), value=value, **facts)
        self.journal.end(ended)
        return self.search.end(ended)


DROPOUT = ["model.dropout=0,0.1,0.2,0.4"]


def test_what_ended_stays_and_what_ran_runs_again_with_its_name_and_settings(tmp_path: Path) -> None:
    runs = Runs(tmp_path, DROPOUT)
    first, second, third = runs.begin(), runs.begin(), runs.begin()
    assert first.settings.items() >= runs.search.searched.own.items(), "the first is the job as it stands"
    runs.end(first, 0.7, values=[0.6, 0.7])
    again = Runs(tmp_path, DROPOUT)
    assert list(again.journal.ended) == ["0"] and again.search.best == runs.search.best
    assert [(each.name, each.settings) for each in (again.begin(), again.begin())] == [
        ("1", second.settings), ("2", third.settings)
    ]  # fmt: skip
    fourth = again.begin()
    assert fourth.name == "3" and fourth.settings not in (first.settings, second.settings, third.settings)


@every("damage", [b"\n", b"[1]\n", b"\xff\n"], ids=["blank", "another writer's", "no text"])
def test_a_journal_that_is_damaged_before_its_end_is_refused_in_a_line(tmp_path: Path, damage: bytes) -> None:
    journal = Journal(tmp_path)
    for name in "01":
        journal.begin(name, {}, pid=1)
    path = tmp_path / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], damage, lines[1]]))
    with pytest.raises(UserError) as caught:
        Journal(tmp_path)
    assert str(caught.value).startswith(f"{path}: damaged (") and "\n" not in str(caught.value)
    assert str(caught.value).endswith("); give --out a new folder")
    path.write_bytes(b"".join(lines) + b'{"began": "2", "sett')  # killed while it wrote
    assert list(Journal(tmp_path).begun) == ["0", "1"]
    assert path.read_bytes() == b"".join(lines)


def test_a_trial_of_a_killed_runner_is_waited_for_while_its_process_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkeep.experiments.journal.ORPHAN_S", 0.0)
    journal = Journal(tmp_path)
    journal.begin("3", {}, pid=2**22 + 1)  # no process has it
    Journal(tmp_path).await_orphans()
    journal.begin("4", {}, pid=os.getpid())
    with pytest.raises(UserError, match=rf"trial 4 still runs, as process {os.getpid()}; stop it"):
        Journal(tmp_path).await_orphans()


def test_trials_of_another_job_or_of_other_data_or_code_are_refused_by_what_differs(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    facts: dict[str, Any] = {
        "job": {"train": {"epochs": 4}}, "over": {f"--over {LR}": "0.1,0.2"},
        "variant few": {"few": {"a": 1}}, "data": {"fingerprint of the data": "12-34"}, "code": {"net.py": "a"},
    }  # fmt: skip
    journal.hold_to(facts)
    journal.hold_to(facts | {"variant more": {"more": {"b": 2}}})
    for kind, other, says in (
        ("over", {f"--over {LR}": "0.1"}, f"--over {LR}='0.1,0.2', now it is '0.1'"),
        ("variant more", {"more": {"b": 3}}, "more.b=2, now it is 3"),
        ("data", {"fingerprint of the data": "12-35"}, "fingerprint of the data='12-34', now it is '12-35'"),
    ):
        with pytest.raises(UserError) as caught:
            Journal(tmp_path).hold_to(facts | {kind: other})
        assert str(caught.value) == f"--out {tmp_path}: has trials with {says}; give --out a new folder"


def test_no_two_trials_have_the_same_settings_while_there_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = ["model.dropout=0,0.1", "tables.default.dim=4..6"]
    lacks = partial(space_of, defaults=["model.layers=1..3"])  # the model
    monkeypatch.setattr("shardkeep.experiments.tune.space_of", lacks)
    for trials in (4, 2):  # the second start goes on
        runs = Runs(tmp_path, over)
        assert runs.search.total == 6
        for _ in range(trials):
            runs.end(runs.begin(), 0.5)
    assert runs.search.ask() is None
    tried = [tuple(each.settings.values()) for each in runs.journal.ended.values()]
    assert len(tried) == len(set(tried)) == 6


@every(("metric", "values", "best"), [("auc", (0.5, 0.8, 0.8), "2"), ("logloss", (0.5, 0.4, 0.6), "2")])
def test_the_best_trial_completed_and_a_failed_one_is_worse_than_all(
    tmp_path: Path, metric: str, values: tuple[float, ...], best: str
) -> None:
    runs = Runs(tmp_path, DROPOUT, f"train.early_stopping.metric={metric}", grid=True)
    assert runs.search.best is None
    assert runs.end(runs.begin(), state="failed", cause="it diverged") == "failed: it diverged; best none yet"
    said = [runs.end(runs.begin(), value) for value in values]
    assert runs.search.best is not None and runs.search.best.trial == best
    assert said[0] == "0.50000; best 0.50000 (trial 1)"
    worst = runs.search.study.optuna.trials[0].value
    assert worst == (-float("inf") if metric == "auc" else float("inf"))


@every("first", [1, 5])
def test_a_trial_that_others_beat_at_the_same_evaluation_is_to_stop(tmp_path: Path, first: int) -> None:
    runs = Runs(tmp_path, DROPOUT, first_look=first)
    for value, stops in ((0.7, False), (0.8, False), (0.6, True), (0.75, True)):
        trial, values = runs.begin(), list[float]()
        for evaluation in range(1, first + 1):
            values.append(value)
            assert runs.search.loses(trial.name, values) == (stops and evaluation == first)
        runs.end(trial, None if stops else value, "stopped" if stops else "completed", values=values)
    late = Runs(tmp_path, DROPOUT, first_look=first)  # the others are those of the journal
    trial = late.begin()
    assert [late.search.loses(trial.name, [0.5] * n) for n in range(1, first + 1)][-1]


def test_a_grid_tries_every_combination_once_and_stops_none(tmp_path: Path) -> None:
    over = ["model.dropout=0,0.1", "model.hidden=[4],[8],[8, 8]"]
    assert Runs(tmp_path, over, grid=True).begin().settings == {"model.dropout": "0", "model.hidden": "[4]"}
    again, tried = Runs(tmp_path, over, grid=True), []  # the first was killed
    for number in range(6):
        trial = again.begin()
        assert not again.search.loses(trial.name, [0.1 * number])
        again.end(trial, 0.5)
        tried.append((trial.name, trial.settings["model.dropout"], trial.settings["model.hidden"]))
    assert len({each[1:] for each in tried}) == 6 == again.search.total and again.search.ask() is None
    assert [name for name, *_ in tried] == list("012345")


def test_settings_that_do_not_go_together_are_the_trial_s_error(tmp_path: Path) -> None:
    keys = ["tables.default.evict.policy=lfu,lru", "tables.default.evict.decay=1.0,0.5"]
    runs = Runs(tmp_path, keys, grid=True, tables={"default": {"evict": {"max_rows": 262144}}})
    found = []
    while (trial := runs.search.ask()) is not None:
        found.append(trial)
        ended = trial if isinstance(trial, Ended) else Ended(trial.name, "completed", dict(trial.settings), value=0.5)
        runs.journal.end(ended)
        runs.search.end(ended)
    (refused,) = (each for each in found if isinstance(each, Ended))
    assert refused.settings == {"tables.default.evict.policy": "lru", "tables.default.evict.decay": "0.5"}
    assert re.search(r"decay: 0\.5 changes nothing", refused.cause)


def test_the_report_and_the_table_have_every_trial_with_its_outcome_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkeep.experiments.pictures.missing", lambda *_: "needs matplotlib")
    runs = Runs(tmp_path, DROPOUT)
    runs.end(runs.begin(), state="failed", cause="<diverged>")
    report, table = tmp_path / "out/report.html", tmp_path / "out/trials.csv"
    runs.search.write("")
    assert "failed: &lt;diverged&gt;" in report.read_text()
    runs.end(runs.begin(), None, "stopped", values=[0.55])
    for number in range(6):
        trial = runs.begin()
        runs.end(trial, 0.7 + 0.01 * number, values=[0.6, 0.7 + 0.01 * number])
    runs.search.write("trial 7 is the best & only one")
    text = report.read_text()
    assert "trial 7 is the best &amp; only one" in text and "stopped early at 0.55000" in text
    shares = re.findall(r"<tr><td>([a-z_.]+)</td><td>(\d+)%</td>", text)
    assert {key for key, _ in shares} == runs.search.searched.space.keys()
    assert 95 <= sum(int(share) for _, share in shares) <= 105
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["trial"] for row in rows] == list("01234567")
    assert [row["outcome"] for row in rows[:3]] == ["failed: <diverged>", "stopped early at 0.55000", "0.70000"]
    assert {*runs.search.searched.space} < rows[0].keys() and json.loads(rows[2]["model.dropout"]) in (0, 0.1, 0.2, 0.4)

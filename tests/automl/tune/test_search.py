"""The journal of a search: what a killed process leaves there, what counts as best; and the report."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shardkeep.base.errors import UserError
from tests.support.cases import every
from tests.support.tuning import numbers, open_search, plan, space

if TYPE_CHECKING:
    from shardkeep.automl.tune.plan import Plan
    from shardkeep.automl.tune.search import Search

LR = "tower.optimizer.lr"


def test_what_ended_stays_and_what_ran_runs_again_with_its_settings(found: Plan, out: Path) -> None:
    search = open_search(found, out)
    first, second, third = search.ask(), search.ask(), search.ask()
    assert first.params.items() >= found.first()[0].items(), "the first is the job as it stands"
    search.end(first, 0.7)
    again = open_search(found, out)
    assert numbers(again.ended) == [0]
    assert [again.ask().params for _ in range(2)] == [second.params, third.params]
    assert again.ask().params not in (first.params, second.params, third.params)


def test_a_process_killed_while_it_wrote_loses_half_a_line_and_no_trial(found: Plan, out: Path) -> None:
    search = open_search(found, out)
    search.end(search.ask(), 0.7)
    with (out / "journal.log").open("ab") as file:
        file.write(b'{"op_code":4,"half a li')
    (out / "journal.log.lock").symlink_to("journal.log")  # Optuna's own lock, which it held
    again = open_search(found, out)
    again.end(again.ask(), 0.8)
    assert numbers(open_search(found, out).ended) == [0, 1]


@every("damage", [b"\n", b"", b"[1]\n", b"\xff\n"], ids=["blank", "half a line", "another writer's", "no text"])
def test_a_journal_that_is_damaged_before_its_end_is_refused_in_a_line(
    found: Plan, tmp_path: Path, damage: bytes
) -> None:
    journal = tmp_path / "journal.log"
    open_search(found, tmp_path).ask()
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:3], damage or lines[3][:9] + b"\n", *lines[3:]]))
    with pytest.raises(UserError) as caught:
        open_search(found, tmp_path)
    assert str(caught.value).startswith(f"{journal}: damaged (") and "\n" not in str(caught.value)
    assert str(caught.value).endswith("); give --out a new folder")


def test_no_two_trials_have_the_same_settings_while_there_are_others(found: Plan, out: Path) -> None:
    over = ["model.dropout=0,0.1", "tables.default.dim=4..6", f"{LR}=0.01,0.010"]
    few = replace(found, space=space(found, *over))
    assert len(list(few.combinations())) == 6 and not list(found.combinations())
    for trials in (4, 3):  # the second start goes on
        search = open_search(few, out)
        for _ in range(trials):
            search.end(search.ask(), 0.5, "diverged" if trials == 3 else "")
    tried = [tuple(trial.params.values()) for trial in search.ended]
    assert len(set(tried[:6])) == 6 and tried[6] in tried[:6]


def test_trials_of_another_job_or_of_other_data_or_code_are_refused_by_what_differs(
    found: Plan, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = {"shardkeep": "0123456789", "net.py": "a"}
    monkeypatch.setattr("shardkeep.automl.tune.plan.code_of", lambda *_: code)
    first = replace(found, data="12-34")
    assert open_search(first, out).remark == open_search(first, out).remark == ""
    with pytest.raises(UserError) as caught:
        open_search(first.over("train.epochs=9"), out)
    wanted = f"--out {out}: has trials with train.epochs=4, now it is 9; give --out a new folder"
    assert str(caught.value) == wanted
    with pytest.raises(UserError, match=f"has trials with --over {LR}="):
        open_search(replace(first, space=found.space | space(found, f"{LR}=0.1,0.2")), out)
    with pytest.raises(UserError, match="has trials with fingerprint of the data='12-34', now it is '12-35'"):
        open_search(replace(found, data="12-35"), out)
    code["shardkeep"] = "abcdefabcd"
    remark = open_search(first, out).remark  # that of the library goes on
    assert "(sources 01234567), now it is " in remark and "(sources abcdefab); its trials stay" in remark
    code["net.py"] = "b"
    with pytest.raises(UserError, match=r"has trials with code of net\.py='a', now it is 'b'"):
        open_search(first, out)


def test_a_setting_that_the_library_has_gained_meanwhile_refuses_no_trial(found: Plan, out: Path) -> None:
    search = open_search(found, out)
    stored = search.study.user_attrs["job"]
    assert stored["train"].pop("report_every_s") > 0
    search.study.set_user_attr("job", stored)
    open_search(found, out)


def test_the_best_trial_completed_and_a_failed_one_is_worse_than_all(found: Plan, out: Path) -> None:
    search = open_search(found, out)
    assert search.best is None
    search.end(search.ask(), cause="it diverged")
    assert search.best is None and search.ended[0].value == -math.inf
    early, good, equal = (search.ask() for _ in range(3))
    early.report(0.9, 1)
    search.end(early)
    search.end(good, 0.8)
    search.end(equal, 0.8)
    assert search.best is not None and search.best.number == good.number
    assert search.ended[0].user_attrs == {"cause": "it diverged"}


def test_less_is_better_where_the_metric_says_so(found: Plan, out: Path) -> None:
    search = open_search(found.over("train.early_stopping.metric=logloss"), out)
    search.end(search.ask(), cause="it diverged")
    for value in (0.5, 0.4, 0.6):
        search.end(search.ask(), value)
    assert search.best is not None and search.best.value == 0.4
    assert search.ended[0].value == math.inf


@every("first", [1, 5])
def test_a_trial_that_others_beat_at_the_same_evaluation_is_to_stop(found: Plan, tmp_path: Path, first: int) -> None:
    search = open_search(found, tmp_path)
    search.halve(first)
    for value, stops in ((0.7, False), (0.8, False), (0.6, True), (0.75, True)):
        trial = search.ask()
        for evaluation in range(1, first + 1):
            trial.report(value, evaluation)
            assert trial.should_prune() == (stops and evaluation == first)
        search.end(trial)


def test_a_grid_tries_every_combination_once_and_stops_none(tmp_path: Path, out: Path) -> None:
    found = plan(tmp_path, ["model.dropout=0,0.1", "model.hidden=[4],[8],[8, 8]"], grid=True)
    search = open_search(found, out)
    assert search.ask().params == {"model.dropout": "0", "model.hidden": "[4]"}
    again, tried = open_search(found, out), []  # the first was killed
    again.halve(1)
    for _ in range(6):
        trial = again.ask()
        trial.report(0.1 * trial.number, 1)
        assert not trial.should_prune()
        again.end(trial, 0.5)
        tried.append((trial.params["model.dropout"], trial.params["model.hidden"]))
    assert len(set(tried)) == len(found.first()) == 6


def made(found: Plan, out: Path, count: int = 6) -> Search:
    """A search with a failed trial, a stopped one, and then `count` that completed."""
    search = open_search(found, out)
    search.end(search.ask(), cause="<diverged>")
    stopped = search.ask()
    stopped.report(0.55, 1)
    search.end(stopped)
    for number in range(count):
        trial = search.ask()
        trial.report(0.6 + 0.01 * number, 1)
        search.end(trial, 0.7 + 0.01 * number)
    return search


def test_a_report_has_every_trial_with_its_outcome_and_settings(
    found: Plan, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardkeep.automl.tune.report import outcome_text, write_report

    monkeypatch.setattr("shardkeep.automl.tune.report.missing", lambda *_: "needs matplotlib: pip install X")
    search, path = made(found, out), out / "report.html"
    write_report(search, path, "trial 7 is the best & only one")
    text = path.read_text()
    assert "trial 7 is the best &amp; only one" in text and "failed: &lt;diverged&gt;" in text
    assert "stopped early at 0.55000" in text
    rows = re.findall(r"<tr><td>(\d+)</td><td>([^<]*)</td>", text)
    assert [int(number) for number, _ in rows] == list(range(8))
    shares = re.findall(r"<tr><td>([a-z_.]+)</td><td>(\d+)%</td>", text)
    assert {key for key, _ in shares} == search.plan.space.keys() and 95 <= sum(int(n) for _, n in shares) <= 105
    assert "The report has no plots: it needs matplotlib: pip install X" in text
    outcomes = ["failed: <diverged>", "stopped early at 0.55000", "0.70000"]
    assert [outcome_text(trial) for trial in search.ended[:3]] == outcomes


def test_a_search_whose_trials_all_failed_has_a_report(found: Plan, out: Path) -> None:
    from shardkeep.automl.tune.report import write_report

    search = open_search(found, out)
    search.end(search.ask(), cause="it diverged")
    write_report(search, out / "report.html", "")
    assert "failed: it diverged" in (out / "report.html").read_text()

"""The journal of a search: what a killed process leaves there, and what counts as best."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from shardkeep.automl.tune.search import Search
from shardkeep.automl.tune.space import space_of
from shardkeep.base.errors import UserError
from tests.support.cases import every
from tests.support.tuning import numbers, plan

LR = "tower.optimizer.lr"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_the_first_trial_is_the_job_as_it_stands(tmp_path: Path, out: Path) -> None:
    search = Search(plan(tmp_path), out)
    assert search.ask().params.items() >= search.plan.first()[0].items()


def test_what_ended_stays_and_what_ran_runs_again_with_its_settings(tmp_path: Path, out: Path) -> None:
    found = plan(tmp_path)
    search = Search(found, out)
    first, second, third = search.ask(), search.ask(), search.ask()
    search.end(first, 0.7)
    again = Search(found, out)
    assert numbers(again.ended) == [0]
    assert [again.ask().params for _ in range(2)] == [second.params, third.params]
    assert again.ask().params not in (first.params, second.params, third.params)


def test_a_process_killed_while_it_wrote_loses_half_a_line_and_no_trial(tmp_path: Path, out: Path) -> None:
    found = plan(tmp_path)
    search = Search(found, out)
    search.end(search.ask(), 0.7)
    with (out / "journal.log").open("ab") as file:
        file.write(b'{"op_code":4,"half a li')
    (out / "journal.log.lock").symlink_to("journal.log")  # Optuna's own lock, which it held
    again = Search(found, out)
    again.end(again.ask(), 0.8)
    assert numbers(Search(found, out).ended) == [0, 1]


@every("damage", ["blank", "half a line", "another writer's", "no text"])
def test_a_journal_that_is_damaged_before_its_end_is_refused_in_a_line(tmp_path: Path, damage: str) -> None:
    found, journal = plan(tmp_path), tmp_path / "journal.log"
    Search(found, tmp_path).ask()
    lines = journal.read_bytes().splitlines(keepends=True)
    bad = {"blank": b"\n", "half a line": lines[3][:9] + b"\n", "another writer's": b"[1]\n", "no text": b"\xff\n"}
    journal.write_bytes(b"".join([*lines[:3], bad[damage], *lines[3:]]))
    with pytest.raises(UserError) as caught:
        Search(found, tmp_path)
    assert str(caught.value).startswith(f"{journal}: damaged (") and "\n" not in str(caught.value)
    assert str(caught.value).endswith("); give --out a new folder")


def test_no_two_trials_have_the_same_settings_while_there_are_others(tmp_path: Path, out: Path) -> None:
    whole = plan(tmp_path)
    over = ["model.dropout=0,0.1", "tables.default.dim=4..6", f"{LR}=0.01,0.010"]
    found = replace(whole, space=space_of(whole.load, over, defaults=["model.layers=1..3"]))  # which dlrm lacks
    assert len(list(found.combinations())) == 6 and not list(whole.combinations())
    for trials in (4, 3):  # the second start goes on
        search = Search(found, out)
        for _ in range(trials):
            search.end(search.ask(), 0.5, "diverged" if trials == 3 else "")
    tried = [tuple(trial.params.values()) for trial in search.ended]
    assert len(set(tried[:6])) == 6 and tried[6] in tried[:6]


def test_trials_of_another_job_are_refused_by_the_key_that_differs(tmp_path: Path, out: Path) -> None:
    Search(plan(tmp_path), out)
    with pytest.raises(UserError) as caught:
        Search(plan(tmp_path, [], "train.epochs=9"), out)
    wanted = f"--out {out}: has trials with train.epochs=4, now it is 9; give --out a new folder"
    assert str(caught.value) == wanted
    with pytest.raises(UserError, match=f"has trials with --over {LR}="):
        Search(plan(tmp_path, [f"{LR}=0.1,0.2"]), out)


def test_trials_of_other_data_are_refused(tmp_path: Path, out: Path) -> None:
    found = plan(tmp_path)
    Search(replace(found, data="12-34"), out)
    with pytest.raises(UserError, match="has trials with fingerprint of the data='12-34', now it is '12-35'"):
        Search(replace(found, data="12-35"), out)


def test_another_code_of_shardkeep_goes_on_and_is_told_and_another_one_of_the_user_is_refused(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, code = plan(tmp_path), {"shardkeep": "0123456789", "net.py": "a"}
    monkeypatch.setattr("shardkeep.automl.tune.plan.code_of", lambda *_: code)
    assert Search(found, out).remark == Search(found, out).remark == ""
    code["shardkeep"] = "abcdefabcd"
    remark = Search(found, out).remark
    assert "(sources 01234567), now it is " in remark and "(sources abcdefab); its trials stay" in remark
    code["net.py"] = "b"
    with pytest.raises(UserError, match=r"has trials with code of net\.py='a', now it is 'b'"):
        Search(found, out)


def test_a_setting_that_the_library_has_gained_meanwhile_refuses_no_trial(tmp_path: Path, out: Path) -> None:
    search = Search(plan(tmp_path), out)
    stored = search.study.user_attrs["job"]
    assert stored["train"].pop("report_every_s") > 0
    search.study.set_user_attr("job", stored)
    Search(plan(tmp_path), out)


def test_the_best_trial_completed_and_a_failed_one_is_worse_than_all(tmp_path: Path, out: Path) -> None:
    search = Search(plan(tmp_path), out)
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


def test_less_is_better_where_the_metric_says_so(tmp_path: Path, out: Path) -> None:
    search = Search(plan(tmp_path, train={"early_stopping": {"metric": "logloss"}}), out)
    search.end(search.ask(), cause="it diverged")
    for value in (0.5, 0.4, 0.6):
        search.end(search.ask(), value)
    assert search.best is not None and search.best.value == 0.4
    assert search.ended[0].value == math.inf


@pytest.mark.parametrize("first", [1, 5])
def test_a_trial_that_others_beat_at_the_same_evaluation_is_to_stop(first: int, tmp_path: Path, out: Path) -> None:
    search = Search(plan(tmp_path), out)
    search.halve(first)
    for value, stops in ((0.7, False), (0.8, False), (0.6, True), (0.75, True)):
        trial = search.ask()
        for evaluation in range(1, first + 1):
            trial.report(value, evaluation)
            assert trial.should_prune() == (stops and evaluation == first)
        search.end(trial)


def test_a_grid_tries_every_combination_once_and_stops_none(tmp_path: Path, out: Path) -> None:
    found = plan(tmp_path, ["model.dropout=0,0.1", "model.hidden=[4],[8],[8, 8]"], grid=True)
    search = Search(found, out)
    assert search.ask().params == {"model.dropout": "0", "model.hidden": "[4]"}
    again, tried = Search(found, out), []  # the first was killed
    again.halve(1)
    for _ in range(6):
        trial = again.ask()
        trial.report(0.1 * trial.number, 1)
        assert not trial.should_prune()
        again.end(trial, 0.5)
        tried.append((trial.params["model.dropout"], trial.params["model.hidden"]))
    assert len(set(tried)) == len(found.first()) == 6

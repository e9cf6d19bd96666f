"""The report of a search."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardkeep.automl.tune.report import outcome_text, write_report
from shardkeep.automl.tune.search import Search
from tests.support.tuning import plan


def made(tmp_path: Path, count: int = 6) -> Search:
    """A search with a failed trial, a stopped one, and then `count` that completed."""
    (tmp_path / "out").mkdir()
    search = Search(plan(tmp_path), tmp_path / "out")
    search.end(search.ask(), cause="<diverged>")
    stopped = search.ask()
    stopped.report(0.55, 1)
    search.end(stopped)
    for number in range(count):
        trial = search.ask()
        trial.report(0.6 + 0.01 * number, 1)
        search.end(trial, 0.7 + 0.01 * number)
    return search


def test_it_has_every_trial_with_its_outcome_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardkeep.automl.tune.report.missing", lambda *_: "needs matplotlib: pip install X")
    search, path = made(tmp_path), tmp_path / "report.html"
    write_report(search, path, "trial 7 is the best & only one")
    text = path.read_text()
    assert "trial 7 is the best &amp; only one" in text and "failed: &lt;diverged&gt;" in text
    assert "stopped early at 0.55000" in text
    rows = re.findall(r"<tr><td>(\d+)</td><td>([^<]*)</td>", text)
    assert [int(number) for number, _ in rows] == list(range(8))
    shares = re.findall(r"<tr><td>([a-z_.]+)</td><td>(\d+)%</td>", text)
    assert {key for key, _ in shares} == search.plan.space.keys() and 95 <= sum(int(n) for _, n in shares) <= 105
    assert "The report has no plots: it needs matplotlib: pip install X" in text


def test_a_search_whose_trials_all_failed_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    search = Search(plan(tmp_path), tmp_path / "out")
    search.end(search.ask(), cause="it diverged")
    write_report(search, tmp_path / "report.html", "")
    assert "failed: it diverged" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_curves_and_all_settings_side_by_side_are_drawn(tmp_path: Path) -> None:
    write_report(made(tmp_path), tmp_path / "report.html", "")
    assert (tmp_path / "report.html").read_text().count('src="data:image/png;base64,iVBOR') == 2


def test_an_outcome_is_a_value_or_what_became_of_the_trial(tmp_path: Path) -> None:
    ended = made(tmp_path, 1).ended
    assert [outcome_text(trial) for trial in ended] == ["failed: <diverged>", "stopped early at 0.55000", "0.70000"]

"""benchmarks/opponents.py: what a benchmark sees of an opponent that is missing, fails, hangs or does not train."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import harness
import opponents

from tests.support.cases import every

GOOD = {"samples_per_s": 5.0, "loss_first": 0.7, "loss_last": 0.6, "rows_changed": 1.0}


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The opponent `peer`, run by this Python; the test writes it."""
    python = tmp_path / opponents.VENV / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.setattr(opponents, "ROOT", tmp_path)
    monkeypatch.setattr(opponents, "PEERS", tmp_path)
    return tmp_path / "peer.py"


def test_an_opponent_gets_its_options_and_its_figures_come_without_those_of_the_check(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_text(f"print('noise')\nprint('''{json.dumps(GOOD)}''')")
    assert opponents.contestant("peer", dim=16)(1.0) == {"samples_per_s": 5.0}
    script.write_text("import sys, json\nprint(json.dumps({part: 1.0 for part in sys.argv[1:]}))")
    run = opponents.contestant("peer", warm_up=2.0, cores=[0, 1])
    assert list(run(3.0)) == ["--warm-up", "2.0", "--cores", "0,1", "--seconds", "3.0", "--seed", "1"]
    assert list(run(3.0))[-1] == "2", "each run has another seed"
    monkeypatch.setattr(opponents, "ROOT", script.parent / "elsewhere")
    with pytest.raises(harness.CannotRun, match="benchmarks/peers/install makes it"):
        opponents.contestant("peer")(1.0)


@every(
    ("code", "text"),
    [
        ("raise SystemExit('error: worker1: it is lost\\nmore noise')", "exit status 1: worker1: it is lost"),
        ("raise SystemExit(3)", "exit status 3: no word of why"),
        ("pass", "exit status 0: no word of why"),
        ("import threading\nthreading.Event().wait()", "not done after 2 s"),
        (f"print('''{json.dumps(GOOD | {'loss_last': 0.7})}''')", r"its loss went from 0\.7000 to 0\.7000"),
        (f"print('''{json.dumps(GOOD | {'loss_last': float('nan')})}''')", "its loss went from 0.7000 to nan"),
        (f"print('''{json.dumps(GOOD | {'rows_changed': 0.5})}''')", "only 50% of the rows changed"),
    ],
)
def test_an_opponent_that_fails_or_hangs_is_one_clear_line(
    script: Path, monkeypatch: pytest.MonkeyPatch, code: str, text: str
) -> None:
    monkeypatch.setattr(opponents, "LIMIT_S", 1.0)
    script.write_text(code)
    with pytest.raises(harness.CannotRun, match=text):
        opponents.contestant("peer")(1.0)


def test_a_benchmark_goes_on_without_a_contestant_that_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    def missing(seconds: float) -> harness.Figures:
        raise harness.CannotRun("it is not here")

    found = harness.alternate({"other": missing, "ours": lambda s: {"rate": s}}, rounds=2, seconds=1.0)
    assert found == {"ours": [{"rate": 1.0}, {"rate": 1.0}]}
    harness.show_ratio("ours / other", harness.ratios(found, "ours", "other", "rate"), 1.1)
    assert harness.differences(found, "ours", "other", "rate") == {}
    said = capsys.readouterr().out
    assert said.count("without other: it is not here") == 1
    assert "not measured   target 1.10" in said

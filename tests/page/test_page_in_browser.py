"""The page in Chromium, from simulated folders: every state, few and many members, phone, dark, keyboard, one file."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from shardkeep.page.files import whole_page
from shardkeep.page.state import RunState
from tests.support.browser import NARROW, Chromium, Visit
from tests.support.pages import DRAWN, LIVE, PageAddress, number, rows_of, tile, viewed
from tests.support.seen_runs import append
from tests.support.simulated_runs import STATES, Scene, State, led, write_simulated_run

pytestmark = pytest.mark.slow

BADGES: dict[State, str] = {
    "begun": "starting",
    "forming": "starting",
    "running": "training",
    "recovering": "recovering",
    "finished": "completed",
    "failed": "failed",
    "stopped": "stopped",
    "killed": "no process left",
}
ALIVE = ("begun", "forming", "running", "recovering")
FEW: dict[str, Any] = {"servers": 2, "workers": 4}
LARGE: dict[str, Any] = {"servers": 8, "workers": 64}
ALONE: dict[str, Any] = {"servers": 0, "workers": 1}
FOCUSED = "document.activeElement.getAttribute('aria-label')"
DASH = "\N{EN DASH}"


@contextlib.contextmanager
def served(tmp_path: Path, scene: Scene) -> Iterator[tuple[Path, PageAddress]]:
    """The folder of a scene and its page, which sees it as it is at the scene's time."""
    run = write_simulated_run(tmp_path / "run", scene)
    now = scene.now + timedelta(hours=1) if scene.state == "killed" else scene.now
    with led(run) if scene.state in ALIVE else contextlib.nullcontext(), viewed(run, now=now) as address:
        yield run, address


def read(visit: Visit, address: PageAddress) -> None:
    visit.open(address.url)
    visit.wait(LIVE)
    visit.wait(DRAWN)


def read_file(visit: Visit, path: Path, runs: list[RunState], *more: Any) -> None:
    """Writes runs as one file, opens it and waits until it is drawn."""
    path.write_text(whole_page(runs, *more))
    visit.open(path.as_uri())
    visit.wait(DRAWN)


def check_state(visit: Visit, scene: Scene, address: PageAddress) -> None:
    assert visit.text("#state") == BADGES[scene.state]
    assert "token" not in visit.page.url
    assert {address.netloc} == visit.hosts()
    assert visit.problems == []
    assert "undefined" not in visit.text() and "NaN" not in visit.text() and "[object" not in visit.text()


def add_progress(run: Path, step: int) -> None:
    """Adds a record of progress, as the last one but with this step."""
    last = [line for line in (run / "metrics.jsonl").read_text().splitlines() if '"progress"' in line][-1]
    append(run / "metrics.jsonl", {**json.loads(last), "step": step})


def test_the_page_of_every_state_says_which_it_is_and_what_is_well(browser: Chromium, tmp_path: Path) -> None:
    body = "#warnings .body"
    for number_, state in enumerate(STATES):
        members = (FEW, LARGE, ALONE)[number_ % 3] if state != "recovering" else LARGE
        scene = Scene(state=state, **members)
        with browser.visit() as visit, served(tmp_path / state, scene) as (_, address):
            read(visit, address)
            check_state(visit, scene, address)
            assert state != "begun" or visit.text(body).startswith("The job is starting.")
            assert state != "running" or visit.text(body) == "Nothing looks wrong."


def test_a_job_in_trouble_says_what_is_wrong_and_is_used_by_keyboard(browser: Chromium, tmp_path: Path) -> None:
    scene = Scene(state="running", **FEW, slow_worker=1, restarted_server=1, rate_too_high=True, now=datetime.now())
    with browser.visit() as visit, served(tmp_path, scene) as (run, address):
        first, *rest = (run / "metrics.jsonl").read_text().split('"loss":', 1)
        exploded = re.sub(r"^\s*[\d.e-]+", " 4202.3", rest[0])
        (run / "metrics.jsonl").write_text(f'{first}"loss":{exploded}')
        read(visit, address)
        warnings = visit.text("#warnings")
        assert "worker 1 is slower than the others" in warnings
        assert "server 1 died (killed by SIGKILL) and was restarted" in warnings
        assert "learning rate" in warnings
        assert rows_of(visit, "steps")[0][0] == "worker 1"
        tiles = visit.page.locator("#overview .tile .about").all_inner_texts()
        assert len(tiles) > 6 and all(len(text) > 8 for text in tiles)
        axes = visit.page.locator("#convergence .axis").all_inner_texts()
        assert [text for text in axes if "logarithmic" in text] == [axes[0]], "the loss exploded"
        for section, column in (("steps", "own work"), ("tables", "rows/min"), ("members", "parked pulls")):
            assert f"{column}: " in visit.text(f"#{section} .notes"), "explained without a pointer"
        check_state(visit, scene, address)
        visit.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert visit.too_wide() == 0 and visit.axe() == []

        visit.page.get_by_role("button", name="Log of server 1").first.focus()
        visit.page.keyboard.press("Enter")
        visit.wait(
            "document.querySelector('#log').open && /generation=2/.test(document.querySelector('#log pre').innerText)"
        )
        assert "serving generation=2" in visit.text("#log pre")
        visit.page.keyboard.press("Escape")
        visit.wait("!document.querySelector('#log').open")
        assert visit.page.evaluate(FOCUSED) == "Log of server 1"

        add_progress(run, 2222)
        visit.wait("document.querySelector('#overview').innerText.includes('2,222')")
        assert visit.page.evaluate(FOCUSED) == "Log of server 1", "a change takes no focus"

        visit.page.evaluate("Object.defineProperty(document, 'hidden', {get: () => window.away, configurable: true})")
        visit.page.evaluate("window.away = true")
        add_progress(run, 2250)
        visit.wait("document.title.startsWith('75 %')")
        assert "2,250" not in visit.text("#overview")
        visit.page.evaluate("window.away = false; document.dispatchEvent(new Event('visibilitychange'))")
        assert "2,250" in visit.text("#overview")

        visit.page.select_option("#theme", "dark")
        visit.page.emulate_media(media="print")
        visit.page.set_viewport_size({"width": 700, "height": 900})
        assert visit.page.evaluate("getComputedStyle(document.body).color") == "rgb(27, 36, 48)", "paper is light"
        assert not visit.page.locator("nav").is_visible()
        rights = "[...document.querySelectorAll('canvas')].map(c => c.getBoundingClientRect().right)"
        assert max(visit.page.evaluate(rights)) <= 700
        assert visit.problems == []


def test_a_phone_in_the_dark_shows_the_figures_of_64_workers_that_name_the_trouble(
    browser: Chromium, tmp_path: Path
) -> None:
    scene = Scene(state="running", slow_worker=1, restarted_server=1, **LARGE)
    with browser.visit(size=NARROW, look="dark") as visit, served(tmp_path, scene) as (_, address):
        read(visit, address)
        for size in ((360, 740), (720, 450)):  # and 200 % zoom
            visit.page.set_viewport_size({"width": size[0], "height": size[1]})
            visit.wait(f"document.documentElement.clientWidth === {size[0]}")
            assert visit.too_wide() == 0
            for section, columns in (
                ("steps", ("worker", "own work", "vs others")),
                ("members", ("process", "log", "deaths")),
            ):
                for column in columns:
                    head = visit.page.locator(f"#{section} thead").first.get_by_text(column, exact=True)
                    box = head.bounding_box()
                    assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= size[0]
            ends = visit.page.evaluate(
                "[...document.querySelectorAll('nav a')].map(a => a.getBoundingClientRect().right)"
            )
            assert max(ends) <= size[0]
        visit.page.set_viewport_size({"width": NARROW[0], "height": NARROW[1]})
        check_state(visit, scene, address)
        visit.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert visit.too_wide() == 0 and visit.axe() == []


def test_a_finished_run_has_the_figures_of_its_summary_and_every_control_by_keyboard(
    browser: Chromium, tmp_path: Path
) -> None:
    scene = Scene(workers=16, servers=4, restarted_server=0, compression=True)
    with browser.visit() as visit, served(tmp_path, scene) as (run, address):
        read(visit, address)
        summary = json.loads((run / "summary.json").read_text())
        assert number(tile(visit, "Step")) == summary["steps"]
        assert number(tile(visit, "Speed")) == pytest.approx(summary["samples_per_s"], rel=1e-3)
        assert number(tile(visit, "AUC")) == pytest.approx(summary["eval"]["auc"], abs=5e-5)
        assert number(tile(visit, "Recoveries")) == len(summary["recoveries"])
        sums = {kind: sum(summary["bytes"][kind].values()) for kind in ("push", "pull", "tower")}
        assert number(tile(visit, "Sent for training")) == pytest.approx(sum(sums.values()), rel=0.02)
        shown = {row[0].split("\n")[0]: number(row[1]) for row in rows_of(visit, "bytes")}
        assert {kind: shown[kind] for kind in sums} == {k: pytest.approx(v, rel=0.02) for k, v in sums.items()}
        tables = {table["name"]: table["rows"] for table in summary["tables"]}
        assert {row[0]: number(row[1]) for row in rows_of(visit, "tables")}.items() <= tables.items()
        staleness = {row[0].split()[0]: number(row[-1]) for row in rows_of(visit, "staleness")}
        assert staleness == summary["staleness"]

        stops = visit.tab_stops()
        assert [stop for stop in stops if not (stop["ring"] and stop["shown"])] == []
        names = [stop["name"] for stop in stops]
        assert names[0] == "Skip to the content"
        assert {"Overview", "Config", "Log of server 0", "Show 8 more workers"} <= {*names}
        inside = [stop["top"] for stop in stops if stop["tag"] in ("summary", "button")]
        assert len(inside) > 10 and inside == sorted(inside)


def test_runs_are_compared_with_the_settings_that_differ(browser: Chromium, tmp_path: Path) -> None:
    scenes = {
        "one": Scene(workers=1, step_ms=20.0),
        "two": Scene(workers=2, step_ms=25.0),
        "other": Scene(compression=True, steps=900),
    }
    runs = [write_simulated_run(tmp_path / name, scene) for name, scene in scenes.items()]
    with browser.visit() as visit, viewed(*runs) as address:
        read(visit, address)
        assert "compression.push.values" in visit.text("#compare")
        for name in ("Results of the runs", "Settings that differ"):
            table = visit.page.get_by_role("region", name=name)
            assert table.locator("thead").inner_text().split()[1:] == list(scenes)
        top = "s => document.querySelector(s).getBoundingClientRect().top"
        assert visit.page.evaluate(top, "#compare") < visit.page.evaluate(top, "#convergence")
        assert "41 GFLOP/s in matrix products" in visit.text("#steps")
        rows = {row[0]: row[1:] for row in rows_of(visit, "compare")}
        assert rows["a worker's speed, beside one alone"] == ["100 %", "80 %", DASH]
        values = visit.page.locator("#compare figure .u-series .u-value").all_inner_texts()
        assert len(values) == 8 and DASH not in values, "a line that ends early keeps its last value"
        assert visit.axe() == [] and visit.problems == []


def test_a_report_is_one_file_that_requests_nothing(browser: Chromium, tmp_path: Path) -> None:
    runs = [write_simulated_run(tmp_path / name, Scene(**LARGE, seed=seed)) for seed, name in enumerate("ab")]
    quality = {"calibration": [[0.1, 0.12], [0.4, 0.35]], "scores": {"0": [[0.1, 0.8], [0.4, 0.2]], "1": [[0.4, 1.0]]}}
    rows = [["metric", "run", "difference"], ["AUC", "b - a", "+0.00300"]]
    alone = [
        RunState(write_simulated_run(tmp_path / f"alone {name}", Scene(**ALONE, evaluations=1, steps=300)))
        for name in "ab"
    ]
    now = datetime.now()
    running = write_simulated_run(tmp_path / "running", Scene(state="running", now=now))
    with browser.visit(size=NARROW, look="dark") as visit:
        read_file(visit, tmp_path / "report.html", [RunState(run) for run in runs])
        assert [url for url in visit.requests if not url.startswith("data:")] == [(tmp_path / "report.html").as_uri()]
        assert visit.too_wide() == 0 and visit.axe() == []
        assert visit.text("#state") == "completed"
        visit.page.get_by_role("button", name="Log of server 0").first.click()
        assert "serving generation=1" in visit.text("#log pre")

        read_file(visit, tmp_path / "scores.html", alone, [{"quality": quality}] * 2, {"differences": rows})
        text = visit.text("#convergence")
        assert "Calibration" in text and "Probabilities by label" in text and "predicted probability" in text
        table = visit.page.get_by_role("region", name="Differences on the same evaluation rows")
        assert table.locator("tr").all_inner_texts() == ["\t".join(row) for row in rows]
        assert "sent" not in visit.text("#compare fieldset"), "one process sends nothing"

        read_file(visit, tmp_path / "one.html", alone[:1])
        figure = visit.page.locator("#convergence figure").nth(1)
        assert re.search(r"One point. AUC: 0\.\d{4} at [\d,]+ samples", figure.inner_text()), "no plot of one point"
        assert figure.locator("canvas").count() == 0 and "so far" not in visit.text("main")

        visit.page.clock.install(time=now + timedelta(days=3))
        read_file(visit, tmp_path / "later.html", [RunState(running, serving=True, clock=now.timestamp)])
        visit.page.clock.run_for(5000)
        seconds_ago = visit.page.locator("#members time[data-at]").all_inner_texts()
        assert seconds_ago and all(re.fullmatch(r"just now|\d+ s ago", text) for text in seconds_ago)
        end = re.search(r"done at about (.+)", visit.text("#overview"))
        assert end is not None and re.fullmatch(r"[\d:]+", end[1]), "a time of another day has a date"
        assert visit.problems == []

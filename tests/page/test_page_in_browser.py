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
from tests.support.browser import NARROW, WIDE, Chromium, Look, Visit
from tests.support.cluster import Cluster
from tests.support.pages import DRAWN, LIVE, View, number, rows_of, tile, viewed
from tests.support.simulated_runs import Scene, State, led, write_simulated_run

pytestmark = [pytest.mark.slow, pytest.mark.waits_for_processes]

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
LARGE: dict[str, Any] = {"servers": 8, "workers": 64}
ALONE: dict[str, Any] = {"servers": 0, "workers": 1}


def current(**changes: Any) -> Scene:
    """A scene whose last record is a moment old, or of another day if its processes were killed."""
    return Scene(now=Scene().now if changes.get("state") == "killed" else datetime.now(), **changes)


@contextlib.contextmanager
def seen(browser: Chromium, cluster: Cluster, *runs: Path, **window: Any) -> Iterator[tuple[View, Visit]]:
    """The page of some runs, drawn, in a window."""
    with viewed(cluster, *runs) as view, browser.visit(**window) as visit:
        visit.open(view.address.url)
        visit.wait(LIVE)
        visit.wait(DRAWN)
        yield view, visit


@pytest.mark.parametrize(
    ("state", "members"),
    [
        *(pytest.param(state, {}, id=f"{state}, 2 workers") for state in BADGES),
        *(pytest.param(state, LARGE, id=f"{state}, 64 workers") for state in BADGES),
        *(pytest.param(state, ALONE, id=f"{state}, one process") for state in BADGES if state != "recovering"),
    ],
)
def test_the_page_of_every_state_says_which_it_is_without_an_error_or_a_request_to_another_host(
    browser: Chromium, cluster: Cluster, tmp_path: Path, state: State, members: dict[str, int]
) -> None:
    run = write_simulated_run(tmp_path / "run", current(state=state, **members))
    alive = state in ("begun", "forming", "running", "recovering")
    with led(run) if alive else contextlib.nullcontext(), seen(browser, cluster, run) as (view, visit):
        assert visit.text("#state") == BADGES[state]
        assert "token" not in visit.page.url
        assert visit.hosts() == {view.address.netloc}
        assert visit.problems == []
        assert "undefined" not in visit.text() and "NaN" not in visit.text() and "[object" not in visit.text()


@pytest.mark.parametrize(("size", "look"), [(WIDE, "light"), (NARROW, "dark")], ids=["wide, light", "phone, dark"])
@pytest.mark.parametrize("state", ["begun", "recovering", "finished"])
def test_axe_finds_nothing_serious_and_nothing_is_wider_than_the_window(
    browser: Chromium, cluster: Cluster, tmp_path: Path, state: State, size: tuple[int, int], look: Look
) -> None:
    scene = current(state=state, slow_worker=1, restarted_server=1, rate_too_high=True, **LARGE)
    run = write_simulated_run(tmp_path / "run", scene)
    with led(run), seen(browser, cluster, run, size=size, look=look) as (_, visit):
        visit.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert visit.too_wide() == 0
        assert visit.axe() == []


def test_the_figures_are_those_of_summary_json(browser: Chromium, cluster: Cluster, tmp_path: Path) -> None:
    run = write_simulated_run(tmp_path / "run", Scene(restarted_server=0, compression=True))
    summary = json.loads((run / "summary.json").read_text())
    with seen(browser, cluster, run) as (_, visit):
        assert number(tile(visit, "Step")) == summary["steps"]
        assert number(tile(visit, "Speed")) == pytest.approx(summary["samples_per_s"], abs=0.5)
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


def test_every_figure_of_the_overview_has_a_word_of_explanation(
    browser: Chromium, cluster: Cluster, tmp_path: Path
) -> None:
    run = write_simulated_run(tmp_path / "run", Scene(compression=True))
    with seen(browser, cluster, run) as (_, visit):
        tiles = visit.page.locator("#overview .tile").all()
        assert len(tiles) > 6
        assert all(len(tile.locator(".about").inner_text()) > 8 for tile in tiles)


def test_the_page_alone_says_what_is_wrong_with_a_job_in_trouble(
    browser: Chromium, cluster: Cluster, tmp_path: Path
) -> None:
    scene = current(state="running", workers=4, slow_worker=1, restarted_server=1, rate_too_high=True)
    run = write_simulated_run(tmp_path / "run", scene)
    with seen(browser, cluster, run) as (_, visit):
        warnings = visit.text("#warnings")
        assert "worker 1 is slower than the others" in warnings
        assert "server 1 died (killed by SIGKILL) and was restarted" in warnings
        assert "the loss rises" in warnings and "learning rate" in warnings
        assert rows_of(visit, "steps")[0][0] == "worker 1"


def test_a_healthy_job_has_no_warning(browser: Chromium, cluster: Cluster, tmp_path: Path) -> None:
    run = write_simulated_run(tmp_path / "run", current(state="running", workers=4))
    with seen(browser, cluster, run) as (_, visit):
        assert visit.text("#warnings .body") == "Nothing looks wrong."


def test_a_job_that_starts_says_so_instead_of_that_all_is_well(
    browser: Chromium, cluster: Cluster, tmp_path: Path
) -> None:
    run = write_simulated_run(tmp_path / "run", current(state="begun"))
    with led(run), seen(browser, cluster, run) as (_, visit):
        assert visit.text("#warnings .body").startswith("The job is starting.")


def test_a_loss_that_exploded_has_a_logarithmic_axis(browser: Chromium, cluster: Cluster, tmp_path: Path) -> None:
    run = write_simulated_run(tmp_path / "run", current(state="running"))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    first = next(at for at, line in enumerate(lines) if '"progress"' in line)
    lines[first] = json.dumps({**json.loads(lines[first]), "loss": 4202.3})
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with seen(browser, cluster, run) as (_, visit):
        axes = [axis.inner_text() for axis in visit.page.locator("#convergence .axis").all()]
        assert [text for text in axes if "logarithmic" in text] == [axes[0]]
        assert visit.problems == []


def test_a_single_evaluation_is_a_sentence_not_a_plot(browser: Chromium, cluster: Cluster, tmp_path: Path) -> None:
    run = write_simulated_run(tmp_path / "run", Scene(evaluations=1, steps=300))
    with seen(browser, cluster, run) as (_, visit):
        figure = visit.page.locator("#convergence figure").nth(1)
        assert re.search(r"One point. AUC: 0\.\d{4} at [\d,]+ samples", figure.inner_text())
        assert figure.locator("canvas").count() == 0


def test_every_column_with_an_explanation_shows_it_without_a_pointer(
    browser: Chromium, cluster: Cluster, tmp_path: Path
) -> None:
    run = write_simulated_run(tmp_path / "run", current(state="running", restarted_server=1))
    with seen(browser, cluster, run) as (_, visit):
        for section, column in (("steps", "own work"), ("tables", "rows/min"), ("members", "parked pulls")):
            assert f"{column}: " in visit.text(f"#{section} .notes")


@pytest.mark.parametrize("size", [(360, 740), (720, 450)], ids=["360 pixels", "200 % zoom"])
def test_a_narrow_window_shows_the_figures_that_name_the_trouble(
    browser: Chromium, cluster: Cluster, tmp_path: Path, size: tuple[int, int]
) -> None:
    run = write_simulated_run(tmp_path / "run", current(state="running", slow_worker=1, restarted_server=1, **LARGE))
    with seen(browser, cluster, run, size=size) as (_, visit):
        assert visit.too_wide() == 0
        for section, columns in (
            ("steps", ("worker", "own work", "vs others")),
            ("members", ("process", "log", "deaths")),
        ):
            for column in columns:
                head = visit.page.locator(f"#{section} thead").first.get_by_text(column, exact=True)
                box = head.bounding_box()
                assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= size[0]
        ends = visit.page.evaluate("[...document.querySelectorAll('nav a')].map(a => a.getBoundingClientRect().right)")
        assert max(ends) <= size[0]


def test_paper_is_light_and_holds_whole_plots(browser: Chromium, cluster: Cluster, tmp_path: Path) -> None:
    run = write_simulated_run(tmp_path / "run", current(state="running"))
    with seen(browser, cluster, run, look="dark") as (_, visit):
        visit.page.select_option("#theme", "dark")
        visit.page.emulate_media(media="print")
        visit.page.set_viewport_size({"width": 700, "height": 900})
        assert visit.page.evaluate("getComputedStyle(document.body).color") == "rgb(27, 36, 48)"
        assert not visit.page.locator("nav").is_visible()
        right = visit.page.evaluate(
            "[...document.querySelectorAll('canvas')].map(c => c.getBoundingClientRect().right)"
        )
        assert max(right) <= 700


def test_the_keyboard_reaches_every_control_in_reading_order_with_a_visible_focus(
    browser: Chromium, cluster: Cluster, tmp_path: Path
) -> None:
    run = write_simulated_run(tmp_path / "run", Scene(workers=16, servers=4))
    with seen(browser, cluster, run) as (_, visit):
        stops = visit.tab_stops()
        unseen = [stop for stop in stops if not (stop["ring"] and stop["shown"])]
        assert unseen == []
        assert stops[0]["name"] == "Skip to the content"
        names = [stop["name"] for stop in stops]
        for name in ("Overview", "Config", "Log of server 0", "Show 8 more workers"):
            assert name in names
        inside = [s["top"] for s in stops if s["tag"] in ("summary", "button")]
        assert len(inside) > 10 and inside == sorted(inside)


def test_a_log_opens_and_closes_by_keyboard_and_gives_the_focus_back(
    browser: Chromium, cluster: Cluster, tmp_path: Path
) -> None:
    run = write_simulated_run(tmp_path / "run", Scene(restarted_server=1))
    with seen(browser, cluster, run) as (_, visit):
        visit.page.get_by_role("button", name="Log of server 1").first.focus()
        visit.page.keyboard.press("Enter")
        visit.wait(
            "document.querySelector('#log').open && !/^loading/.test(document.querySelector('#log pre').innerText)"
        )
        assert "serving generation=2" in visit.text("#log pre")
        visit.page.keyboard.press("Escape")
        visit.wait("!document.querySelector('#log').open")
        assert visit.page.evaluate("document.activeElement.getAttribute('aria-label')") == "Log of server 1"


def test_what_changes_in_the_folder_appears_without_a_click_and_takes_no_focus(
    browser: Chromium, cluster: Cluster, tmp_path: Path
) -> None:
    scene = current(state="running")
    run = write_simulated_run(tmp_path / "run", scene)
    with seen(browser, cluster, run) as (_, visit):
        visit.page.get_by_role("button", name="Log of worker 0").first.focus()
        last = [line for line in (run / "metrics.jsonl").read_text().splitlines() if '"progress"' in line][-1]
        record = {**json.loads(last), "step": 2_222, "time": datetime.now().isoformat(timespec="milliseconds")}
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        visit.wait("document.querySelector('#overview').innerText.includes('2,222')")
        assert visit.page.evaluate("document.activeElement.getAttribute('aria-label')") == "Log of worker 0"
        assert visit.problems == []


def test_a_hidden_tab_keeps_its_title_and_draws_the_rest_when_it_is_seen_again(
    browser: Chromium, cluster: Cluster, tmp_path: Path
) -> None:
    scene = current(state="running")
    run = write_simulated_run(tmp_path / "run", scene)
    with seen(browser, cluster, run) as (_, visit):
        visit.page.evaluate("Object.defineProperty(document, 'hidden', {get: () => window.away, configurable: true})")
        visit.page.evaluate("window.away = true")
        last = [line for line in (run / "metrics.jsonl").read_text().splitlines() if '"progress"' in line][-1]
        record = {**json.loads(last), "step": 2_250, "time": datetime.now().isoformat(timespec="milliseconds")}
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        visit.wait("document.title.startsWith('75 %')")
        assert "2,250" not in visit.text("#overview")
        visit.page.evaluate("window.away = false; document.dispatchEvent(new Event('visibilitychange'))")
        assert "2,250" in visit.text("#overview")


def test_two_runs_are_compared_with_the_settings_that_differ(
    browser: Chromium, cluster: Cluster, tmp_path: Path
) -> None:
    scenes = {"plain": Scene(), "small": Scene(compression=True)}
    runs = [write_simulated_run(tmp_path / name, scene) for name, scene in scenes.items()]
    with seen(browser, cluster, *runs) as (_, visit):
        assert "compression.push.values" in visit.text("#compare")
        for name in ("Results of the runs", "Settings that differ"):
            table = visit.page.get_by_role("region", name=name)
            assert table.locator("thead").inner_text().split()[1:] == ["plain", "small"]
        top = "s => document.querySelector(s).getBoundingClientRect().top"
        assert visit.page.evaluate(top, "#compare") < visit.page.evaluate(top, "#convergence")
        assert visit.axe() == []
        assert visit.problems == []


def test_the_dense_model_is_shown_beside_its_products_alone_and_workers_beside_one(
    browser: Chromium, cluster: Cluster, tmp_path: Path
) -> None:
    scenes = {
        "one": Scene(workers=1, step_ms=20.0),
        "two": Scene(workers=2, step_ms=25.0),
        "other": Scene(compression=True),
    }
    runs = [write_simulated_run(tmp_path / name, scene) for name, scene in scenes.items()]
    with seen(browser, cluster, *runs) as (_, visit):
        assert "41 GFLOP/s in matrix products, 50 % of the 82 GFLOP/s" in visit.text("#steps")
        rows = {row[0]: row[1:] for row in rows_of(visit, "compare")}
        assert rows["a worker's speed, beside one alone"] == ["100 %", "80 %", "\N{EN DASH}"]
        assert visit.problems == []


def test_a_line_that_ends_before_another_one_keeps_its_last_value_in_the_legend(
    browser: Chromium, cluster: Cluster, tmp_path: Path
) -> None:
    runs = [write_simulated_run(tmp_path / name, Scene(steps=steps)) for name, steps in (("a", 900), ("b", 3000))]
    with seen(browser, cluster, *runs) as (_, visit):
        values = visit.page.locator("#compare figure .u-series .u-value").all_inner_texts()
        assert len(values) == 6 and "\N{EN DASH}" not in values


def test_the_times_of_a_report_are_those_of_its_making(browser: Chromium, cluster: Cluster, tmp_path: Path) -> None:
    run = write_simulated_run(tmp_path / "run", current(state="running"))
    path = tmp_path / "report.html"
    with led(run):
        assert cluster.command("report", str(run), "--html", str(path)).end().code == 0
    with browser.visit() as visit:
        visit.page.clock.install(time=datetime.now() + timedelta(days=3))
        visit.open(path.as_uri())
        visit.wait(DRAWN)
        visit.page.clock.run_for(5000)
        seconds_ago = visit.page.locator("#members time[data-at]").all_inner_texts()
        assert seconds_ago and all(re.fullmatch(r"just now|\d+ s ago", text) for text in seconds_ago)
        end = re.search(r"done at about (.+)", visit.text("#overview"))
        assert end is not None and re.fullmatch(r"[\d:]+", end[1]), "a time of another day has a date"


@pytest.mark.parametrize("look", ["light", "dark"])
def test_a_report_is_one_file_that_requests_nothing(
    browser: Chromium, cluster: Cluster, tmp_path: Path, look: Look
) -> None:
    runs = [write_simulated_run(tmp_path / name, Scene(**LARGE, seed=seed)) for seed, name in enumerate(("a", "b"))]
    path = tmp_path / "report.html"
    ended = cluster.command("report", *map(str, runs), "--html", str(path)).end()
    assert ended.code == 0, ended.err
    with browser.visit(size=NARROW, look=look) as visit:
        visit.open(path.as_uri())
        visit.wait(DRAWN)
        assert [url for url in visit.requests if not url.startswith("data:")] == [path.as_uri()]
        assert visit.problems == []
        assert visit.too_wide() == 0
        assert visit.text("#state") == "completed"
        assert visit.axe() == []
        visit.page.get_by_role("button", name="Log of server 0").first.click()
        assert "serving generation=1" in visit.text("#log pre")


def test_a_report_shows_what_scores_say_of_each_run_and_of_their_difference(browser: Chromium, tmp_path: Path) -> None:
    runs = [RunState(write_simulated_run(tmp_path / name, Scene(servers=0, workers=1))) for name in "ab"]
    quality = {"calibration": [[0.1, 0.12], [0.4, 0.35]], "scores": {"0": [[0.1, 0.8], [0.4, 0.2]], "1": [[0.4, 1.0]]}}
    rows = [["metric", "run", "difference"], ["AUC", "b - a", "+0.00300"]]
    (tmp_path / "report.html").write_text(whole_page(runs, [{"quality": quality}] * 2, {"differences": rows}))
    with browser.visit() as visit:
        visit.open((tmp_path / "report.html").as_uri())
        visit.wait(DRAWN)
        text = visit.text("#convergence")
        assert "Calibration" in text and "Probabilities by label" in text and "predicted probability" in text
        table = visit.page.get_by_role("region", name="Differences on the same evaluation rows")
        assert table.locator("tr").all_inner_texts() == ["\t".join(row) for row in rows]
        assert "sent" not in visit.text("#compare fieldset"), "one process sends nothing"
        assert visit.problems == [] and visit.axe() == []


def test_one_point_of_a_run_that_has_ended_is_not_called_one_so_far(browser: Chromium, tmp_path: Path) -> None:
    run = RunState(write_simulated_run(tmp_path / "run", Scene(evaluations=1, steps=300)))
    (tmp_path / "report.html").write_text(whole_page([run]))
    with browser.visit() as visit:
        visit.open((tmp_path / "report.html").as_uri())
        visit.wait(DRAWN)
        assert re.search(r"One point. AUC: 0\.\d{4}", visit.text("#convergence")) and "so far" not in visit.text("main")

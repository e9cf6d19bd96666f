"""report.html of a sweep: one file, no network, what the comparison could have shown before what it shows."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import yaml

from shardkeep.base.errors import JobError
from shardkeep.base.files import atomic_write
from shardkeep.student import Estimate
from shardkeep.sweep_plan import Variant, flat
from shardkeep.sweep_plots import PLOTS, write_plots
from shardkeep.sweep_results import FP32, RecipeResult, Results
from shardkeep.sweep_times import MBIT_PER_S, MODEL, bandwidth_name, predict, why_no_time

NO_PLOTS = "no plots: matplotlib is not installed (pip install 'shardkeep[report]'); the same command adds them"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 66rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; font-size: 13px; margin: .6rem 0; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } td.text { text-align: left; white-space: normal; }
img { max-width: 100%; } p { max-width: 50rem; } code { font-size: 12px; } .lead { font-size: 16px; }
"""

Row = Sequence[str]


def write_report(results: Results, out: Path, *, say: Callable[[str], None]) -> list[Path]:
    """Writes report.html, and where matplotlib is there the PNGs; all paths of `out` that a user wants to open. `say`
    gets a line when there are no plots. Raises JobError when `out` cannot be written."""
    try:
        plots = write_plots(results, out) if results.completed else {}
        if plots is None:
            say(NO_PLOTS)
        path = out / "report.html"
        atomic_write(path, page(results, plots))
    except OSError as error:
        raise JobError(f"{out}: cannot be written ({error.strerror or error})") from error
    return [out / "results.csv", out / "summary.json", path, *(plots or {}).values()]


def page(results: Results, plots: Mapping[str, Path] | None) -> str:
    """The report as one text of HTML. `plots`: PNG files by name; None = there is nothing to draw with."""
    title = f"{results.plan.name}: bytes against AUC"
    parts = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="lead">{_text(power_text(results))}</p>',
        _failed(results),
        "<h2>Recipes</h2>",
        _table(RECIPE_HEAD, [_recipe_row(recipe) for recipe in results.recipes]),
        f"<p>{_text(RULES)}</p>",
        *(_figure(plot.title, plot.says, plots[plot.name]) for plot in PLOTS if plots and plot.name in plots),
        f"<p>{_text(NO_PLOTS)}</p>" if plots is None else "",
        _times(results),
        "<h2>Settings</h2>",
        _settings(results),
        "<h2>Runs</h2>",
        _table(RUN_HEAD, _run_rows(results)),
    ]
    head = f'<meta charset="utf-8"><title>{_text(title)}</title><style>{STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n'
        + "\n".join(filter(None, parts))
        + "\n</body></html>\n"
    )


RULES = (
    "Bytes are those of training, both directions and the dense traffic, warm-up and message headers included, "
    "evaluation's reads left out; the ratio is that to fp32's bytes per sample. AUC loss is the AUC of fp32 with the "
    "same seed less the recipe's own: above 0 something was lost. Intervals are 95 % of the mean, by Student's t."
)
RECIPE_HEAD = (
    "recipe", "seeds", "bytes per sample", "times fewer", "embeddings alone", "AUC", "AUC loss", "95 % interval",
    "could have shown",
)  # fmt: skip
RUN_HEAD = ("run", "status", "steps", "bytes per sample", "AUC", "logloss", "samples/s", "CPU us per sample", "seconds")


def power_text(results: Results) -> str:
    """What the comparison could have shown, in words."""
    noise, shows = results.seed_noise, results.shows
    if noise is None:
        return "No run of fp32 is done yet, so nothing can be compared."
    if noise.deviation is None:
        return "There is one seed, so nothing is known of the noise: no difference below can be told from chance."
    text = (
        f"fp32's AUC over {noise.count} seeds is {noise.mean:.4f} with a standard deviation of {noise.deviation:.5f}."
    )
    if shows is None:
        return f"{text} No other recipe has two seeds yet."
    spread = (
        f"{shows[0]:.5f}"
        if f"{shows[0]:.5f}" == f"{shows[1]:.5f}"
        else f"{shows[0]:.5f} to {shows[1]:.5f}, depending on the recipe"
    )
    return (
        f"{text} Paired by seed, the smallest AUC loss that this comparison shows four times out of five is {spread}; "
        "a smaller one may be there unseen."
    )


def _recipe_row(recipe: RecipeResult) -> Row:
    loss = recipe.auc_loss if recipe.name != FP32 else None
    return (
        recipe.name,
        str(len(recipe.runs)),
        _number(recipe.bytes_per_sample, ",.1f"),
        _number(recipe.times_fewer, ".2f"),
        _number(recipe.embedding_times_fewer, ".2f"),
        _number(recipe.auc.mean if recipe.auc else None, ".5f"),
        _number(loss.mean if loss else None, "+.5f"),
        _interval(loss),
        _number(loss.shows if loss else None, ".5f"),
    )


def _interval(loss: Estimate | None) -> str:
    return "" if loss is None or loss.low is None or loss.high is None else f"{loss.low:+.5f} .. {loss.high:+.5f}"


def _run_rows(results: Results) -> list[Row]:
    rows: list[Row] = []
    for run in results.runs:
        summary, cpu_s = run.summary, run.cpu_s_per_sample
        scores = summary.get("eval") or {}
        rows.append(
            (
                run.planned.name,
                run.status,
                _number(summary.get("steps"), ",d"),
                _number(run.bytes_per_sample if run.done else None, ",.1f"),
                _number(run.auc, ".5f"),
                _number(scores.get("logloss"), ".5f"),
                _number(summary.get("samples_per_s"), ",.0f"),
                _number(cpu_s and 1e6 * cpu_s, ",.1f"),
                _number(summary.get("wall_s"), ",.1f"),
            )
        )
    return rows


def _times(results: Results) -> str:
    rows: list[Row] = []
    for recipe in results.recipes:
        times = predict(results, recipe)
        cells = [f"{time.sum_s:,.1f} / {time.max_s:,.1f}" for time in times or ()]
        rows.append((recipe.name, *(cells or [why_no_time(results, recipe)] * len(MBIT_PER_S))))
    head = ("recipe", *(f"{bandwidth_name(mbit)}, s" for mbit in MBIT_PER_S))
    return f"<h2>Predicted seconds to {_text(results.target_text)}</h2>\n<p>{_text(MODEL)}</p>\n{_table(head, rows)}"


def _settings(results: Results) -> str:
    rows = [_settings_row(variant) for variant in results.plan.variants]
    return f"<table>{''.join(rows)}</table>"


def _settings_row(variant: Variant) -> str:
    settings = yaml.safe_dump(flat(variant.settings), default_flow_style=True, width=10**6).strip()
    cells = (f'<td class="text">{cell}</td>' for cell in (_text(variant.purpose), f"<code>{_text(settings)}</code>"))
    return f"<tr><td>{_text(variant.name)}</td>{''.join(cells)}</tr>"


def _failed(results: Results) -> str:
    missing = [run for run in results.runs if not run.done]
    if not missing:
        return ""
    lines = "".join(f"<li>{_text(run.planned.name)}: {_text(run.message or run.status)}</li>" for run in missing)
    return f"<h2>Not completed</h2>\n<ul>{lines}</ul>"


def _figure(title: str, says: str, path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    image = f'<img alt="{_text(title)}" src="data:image/png;base64,{data}">'
    return f"<h2>{_text(title)}</h2>\n<p>{_text(says)}</p>\n{image}"


def _table(head: Row, rows: Sequence[Row]) -> str:
    first = "".join(f"<th>{_text(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{first}</tr>{body}</table>"


def _text(text: str) -> str:
    return html.escape(text)


def _number(value: float | int | None, form: str) -> str:
    return "" if value is None else format(value, form)

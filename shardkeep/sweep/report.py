"""report.html of a sweep: one file, no network, what the comparison could have shown before what it shows."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import yaml

from shardkeep.base.errors import JobError
from shardkeep.base.files import atomic_write
from shardkeep.page.files import text_of
from shardkeep.sweep.compare import Comparison, against_fp32, all_pairs
from shardkeep.sweep.origin import origin
from shardkeep.sweep.plan import Variant, flat
from shardkeep.sweep.plots import caption, seconds, write_plots
from shardkeep.sweep.results import RecipeResult, Results
from shardkeep.sweep.student import Estimate
from shardkeep.sweep.times import MBIT_PER_S, MODEL, bandwidth_name, predict, why_no_time

NO_PLOTS = "no plots: matplotlib is not installed (pip install 'shardkeep[report]'); the same command adds them"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--ground); margin: 0; }
main { max-width: 72rem; margin: 1rem auto; padding: .4rem 1.4rem 2rem; background: var(--card);
border: 1px solid var(--edge); border-radius: 10px; font-variant-numeric: tabular-nums; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
table { border-collapse: collapse; font-size: 13px; margin: .6rem 0; } th { color: var(--muted); font-weight: 600; }
th, td { padding: .3rem .8rem .3rem 0; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } td.text { text-align: left; white-space: normal; }
img { max-width: 100%; background: #fff; border-radius: 6px; } p { max-width: 75ch; } code, pre { font-size: 12px; }
.lead { font-size: 16px; } figure { margin: 2rem 0; }
figcaption { max-width: 75ch; font-size: 13px; color: var(--muted); }
pre { background: var(--ground); border: 1px solid var(--edge); border-radius: 6px; padding: .6rem; overflow-x: auto; }
div.wide { overflow-x: auto; }
"""

Row = Sequence[str]


def write_report(results: Results, out: Path, *, say: Callable[[str], None]) -> list[Path]:
    """Writes report.html, and where matplotlib is there the plots; all paths of `out` that a user wants to open. `say`
    gets a line when there are no plots. Raises JobError when `out` cannot be written."""
    try:
        plots = write_plots(results, out) if results.completed else {}
        if plots is None:
            say(NO_PLOTS)
        path = out / "report.html"
        atomic_write(path, page(results, plots))
    except OSError as error:
        raise JobError(f"{out}: cannot be written ({error.strerror or error})") from error
    return [path, out / "results.csv", out / "summary.json", *([out / "plots"] if plots else [])]


def page(results: Results, plots: Mapping[str, Path] | None) -> str:
    """The report as one text of HTML. `plots`: PNG files by name; None = there is nothing to draw with."""
    title = f"{results.plan.name}: bytes against AUC"
    against, stated = against_fp32(results), origin(results)
    parts = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="lead">{_text(power_text(results))}</p>',
        _failed(results),
        "<h2>The job</h2>",
        _list(stated.job),
        "<h2>Recipes</h2>",
        _table(RECIPE_HEAD, [_recipe_row(recipe, against.get(recipe.name)) for recipe in results.recipes]),
        f"<p>{_text(RULES)}</p>",
        *(_figure(caption(results, name, at + 1), path) for at, (name, path) in enumerate((plots or {}).items())),
        f"<p>{_text(NO_PLOTS)}</p>" if plots is None else "",
        _pairs(results),
        _times(results),
        "<h2>Settings</h2>",
        _settings(results),
        "<h2>Runs</h2>",
        _table(RUN_HEAD, _run_rows(results)),
        "<h2>How it was made</h2>",
        _list(stated.made),
        f"<p>To make it again, with the sweep file below and, where the commit is known, at that commit:</p>"
        f"<pre>{_text(stated.command)}</pre><pre>{_text(stated.sweep_file)}</pre>",
    ]
    width = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    style = text_of("theme.css") + STYLE
    head = f'<meta charset="utf-8">{width}<title>{_text(title)}</title><style>{style}</style>'
    body = "\n".join(filter(None, parts))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body><main>\n{body}\n</main></body></html>\n'


RULES = (
    "Bytes are those of training, both directions and the dense traffic, warm-up and message headers included, "
    "evaluation's reads left out; the ratio is that of fp32's bytes per sample to the recipe's. AUC and logloss: mean "
    "and standard deviation (n - 1) over the seeds. AUC less fp32's is paired by seed: below 0 something was lost. Its "
    "interval is 95 % of the mean by Student's t, for each recipe on its own. p is two-sided, of the same differences, "
    "with Holm's correction over all recipes of the table; a loss is significant where p is below 0.05."
)
RECIPE_HEAD = (
    "recipe", "seeds", "bytes per sample", "times fewer", "embeddings alone", "AUC", "logloss", "AUC less fp32's",
    "95 % interval", "p (Holm)", "result", "could have shown",
)  # fmt: skip
RUN_HEAD = ("run", "status", "steps", "bytes per sample", "AUC", "logloss", "samples/s", "CPU us per sample", "seconds")


def power_text(results: Results) -> str:
    """What the comparison could have shown, in words."""
    noise, shows = results.seed_noise, results.shows
    if noise is None:
        return "No run of fp32 is done yet, so nothing can be compared."
    if noise.deviation is None:
        return "There is one seed, so the noise is unknown: no difference below can be distinguished from chance."
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
        "a smaller one may be there unseen. That is of one recipe on its own: the correction for several shows less."
    )


def _recipe_row(recipe: RecipeResult, against: Comparison | None) -> Row:
    found = None if against is None else against.difference
    return (
        recipe.name,
        str(len(recipe.runs)),
        _number(recipe.bytes_per_sample, ",.1f"),
        _number(recipe.times_fewer, ".2f"),
        _number(recipe.embedding_times_fewer, ".2f"),
        _spread(recipe.auc),
        _spread(recipe.logloss),
        _number(found.mean if found else None, "+.5f"),
        _interval(found),
        _number(against.p_holm if against else None, ".3f"),
        "" if against is None else against.verdict,
        _number(found.shows if found else None, ".5f"),
    )


def _spread(score: Estimate | None) -> str:
    """Mean and standard deviation."""
    if score is None:
        return ""
    spread = "" if score.deviation is None else f" \N{PLUS-MINUS SIGN} {score.deviation:.5f}"
    return f"{score.mean:.5f}{spread}"


def _interval(found: Estimate | None) -> str:
    return "" if found is None or found.low is None or found.high is None else f"{found.low:+.5f} .. {found.high:+.5f}"


def _pairs(results: Results) -> str:
    """Every recipe against every other, as a matrix: row less column."""
    known = {(pair.first, pair.second): pair for pair in all_pairs(results)}
    names = [recipe.name for recipe in results.recipes if recipe.runs]
    if not known:
        return ""
    rows = [(row, *(_pair_cell(known, row, column) for column in names)) for row in names]
    words = (
        "AUC of the row's recipe less that of the column's, with the same seed: mean, and half of its 95 % interval. "
        f"A star: p below 0.05 with Holm's correction over all {len(known)} pairs; any other difference cannot be "
        "distinguished from none. summary.json has all of it under pairs."
    )
    head = ("AUC, row less column", *names)
    return f"<h2>Any two recipes</h2>\n<p>{_text(words)}</p>\n{_table(head, rows)}"


def _pair_cell(known: Mapping[tuple[str, str], Comparison], row: str, column: str) -> str:
    pair = known.get((row, column)) or known.get((column, row))
    if pair is None:
        return ""
    found = pair.difference
    mean = found.mean if pair.first == row else -found.mean
    half = "" if found.high is None else f" \N{PLUS-MINUS SIGN} {found.high - found.mean:.5f}"
    return f"{mean:+.5f}{half}{'*' if pair.told else ''}"


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
        cells = [f"{seconds(time.sum_s)} / {seconds(time.max_s)}" for time in times or ()]
        rows.append((recipe.name, *(cells or [why_no_time(results, recipe)] * len(MBIT_PER_S))))
    head = ("recipe", *map(bandwidth_name, MBIT_PER_S))
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


def _figure(words: str, path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    image = f'<img alt="{_text(words)}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{_text(words)}</figcaption></figure>"


def _list(pairs: Mapping[str, str]) -> str:
    cells = (f'<tr><td>{_text(key)}</td><td class="text">{_text(value)}</td></tr>' for key, value in pairs.items())
    return f"<table>{''.join(cells)}</table>"


def _table(head: Row, rows: Sequence[Row]) -> str:
    first = "".join(f"<th>{_text(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{first}</tr>{body}</table></div>'


def _text(text: str) -> str:
    return html.escape(text)


def _number(value: float | int | None, form: str) -> str:
    return "" if value is None else format(value, form)

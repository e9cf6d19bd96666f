"""report.html of a sweep: one file, no network, what the comparison could have shown before what it shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path

from shardkeep.base.files import atomic_write
from shardkeep.base.plugging.packages import missing
from shardkeep.page.document import document, figure, section, table, wide_table
from shardkeep.sweep.compare import Comparison, against_fp32, all_pairs
from shardkeep.sweep.origin import origin
from shardkeep.sweep.plots import caption, write_plots
from shardkeep.sweep.results import RecipeResult, Results, RunResult
from shardkeep.sweep.student import Estimate


def write_report(results: Results, out: Path, *, say: Callable[[str], None]) -> list[Path]:
    """Writes report.html, and where matplotlib is there the plots; all paths of `out` that a user wants to open. `say`
    gets a line when a package is missing. Raises OSError when `out` cannot be written."""
    plots = write_plots(results, out) if results.completed else {}
    if words := lacking():
        say(words)
    path = out / "report.html"
    atomic_write(path, page(results, plots))
    return [path, out / "results.csv", out / "summary.json", *([out / "plots"] if plots else [])]


def lacking() -> str:
    """What the report has not got, and the package to install; "" = nothing."""
    parts = {"matplotlib": "plots", "scipy": "intervals and p values"}
    names = ", no ".join(name for module, name in parts.items() if missing(module))
    return f"the report has no {names}: it {missing(*parts)}; the same command adds them" if names else ""


def page(results: Results, plots: Mapping[str, Path]) -> str:
    """The report as one text of HTML. `plots`: PNG files by name."""
    title = f"{results.plan.name}: bytes against AUC"
    against, stated = against_fp32(results), origin(results)
    settings = [(v.name, v.purpose, v.text) for v in results.plan.variants]
    known = [(recipe, against.get(recipe.name)) for recipe in results.recipes]
    recipes = [[text(*pair) for text in RECIPE_COLUMNS.values()] for pair in known]
    runs = [[text(run) for text in RUN_COLUMNS.values()] for run in results.runs]
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(power_text(results))}</p>',
        _failed(results),
        section("The job", table((), list(stated.job.items()))),
        section(
            "Recipes",
            wide_table(list(RECIPE_COLUMNS), recipes),
            f"<p>{escape(RULES)}</p>",
            *(
                figure(caption(results, name, at), path.read_bytes())
                for at, (name, path) in enumerate(plots.items(), 1)
            ),
            f"<p>{escape(lacking())}</p>",
        ),
        _pairs(results),
        section("Settings", table((), settings)),
        section("Runs", wide_table(list(RUN_COLUMNS), runs)),
        section(
            "How it was made",
            table((), list(stated.made.items())),
            "<p>To make it again, with the sweep file below and, where the commit is known, at that commit:</p>",
            f"<pre>{escape(stated.command)}</pre><pre>{escape(stated.sweep_file)}</pre>",
        ),
    ]
    return document(title, parts)


RULES = (
    "Bytes are those of training, both directions and the dense traffic, warm-up and message headers included, "
    "evaluation's reads left out; the ratio is that of fp32's bytes per sample to the recipe's. AUC and logloss: mean "
    "and standard deviation (n - 1) over the seeds. AUC less fp32's is paired by seed: below 0 something was lost. Its "
    "interval is 95 % of the mean by Student's t, for each recipe on its own. p is two-sided, of the same differences, "
    "with Holm's correction over all recipes of the table; a loss is significant where p is below 0.05."
)
RECIPE_COLUMNS: Mapping[str, Callable[[RecipeResult, Comparison | None], str]] = {
    "recipe": lambda recipe, _: recipe.name,
    "seeds": lambda recipe, _: str(len(recipe.runs)),
    "bytes per sample": lambda recipe, _: _number(recipe.bytes_per_sample, ",.1f"),
    "times fewer": lambda recipe, _: _number(recipe.times_fewer, ".2f"),
    "embeddings alone": lambda recipe, _: _number(recipe.embedding_times_fewer, ".2f"),
    "AUC": lambda recipe, _: _spread(recipe.auc),
    "logloss": lambda recipe, _: _spread(recipe.logloss),
    "AUC less fp32's": lambda _, against: _number(against.difference.mean if against else None, "+.5f"),
    "95 % interval": lambda _, against: _interval(against.difference if against else None),
    "p (Holm)": lambda _, against: _number(against.p_holm if against else None, ".3f"),
    "result": lambda _, against: "" if against is None else against.verdict,
    "could have shown": lambda _, against: _number(against.difference.shows if against else None, ".5f"),
}
RUN_COLUMNS: Mapping[str, Callable[[RunResult], str]] = {
    "run": lambda run: run.planned.name,
    "status": lambda run: run.status,
    "steps": lambda run: _number(run.summary.get("steps"), ",d"),
    "bytes per sample": lambda run: _number(run.bytes_per_sample if run.done else None, ",.1f"),
    "AUC": lambda run: _number(run.auc, ".5f"),
    "logloss": lambda run: _number(run.logloss, ".5f"),
    "samples/s": lambda run: _number(run.summary.get("samples_per_s"), ",.0f"),
    "CPU us per sample": lambda run: _number(run.cpu_s_per_sample and 1e6 * run.cpu_s_per_sample, ",.1f"),
    "seconds": lambda run: _number(run.summary.get("wall_s"), ",.1f"),
}


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
        return f"{text} {'Tests need scipy.' if missing('scipy') else 'No other recipe has two seeds yet.'}"
    spread = (
        f"{shows[0]:.5f}"
        if f"{shows[0]:.5f}" == f"{shows[1]:.5f}"
        else f"{shows[0]:.5f} to {shows[1]:.5f}, depending on the recipe"
    )
    return (
        f"{text} Paired by seed, the smallest AUC loss that this comparison shows four times out of five is {spread}; "
        "a smaller one may be there unseen. That is of one recipe on its own: the correction for several shows less."
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
    return section("Any two recipes", f"<p>{escape(words)}</p>", wide_table(head, rows))


def _pair_cell(known: Mapping[tuple[str, str], Comparison], row: str, column: str) -> str:
    pair = known.get((row, column)) or known.get((column, row))
    if pair is None:
        return ""
    found = pair.difference
    mean = found.mean if pair.first == row else -found.mean
    half = "" if found.high is None else f" \N{PLUS-MINUS SIGN} {found.high - found.mean:.5f}"
    return f"{mean:+.5f}{half}{'*' if pair.told else ''}"


def _failed(results: Results) -> str:
    missing = [run for run in results.runs if not run.done]
    lines = "".join(f"<li>{escape(run.planned.name)}: {escape(run.message or run.status)}</li>" for run in missing)
    return section("Not completed", f"<ul>{lines}</ul>") if missing else ""


def _number(value: float | int | None, form: str) -> str:
    return "" if value is None else format(value, form)

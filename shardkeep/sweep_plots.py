"""The five plots of a sweep, as PNG files. Needs matplotlib (the extra `report`); computes nothing but positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkeep.student import Estimate
from shardkeep.sweep_results import DIRECTIONS, FP32, CurvePoint, RecipeResult, Results
from shardkeep.sweep_times import MBIT_PER_S, bandwidth_name, predict, why_no_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#000000", "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#999999")
"""Okabe and Ito's, which people with any colour vision can tell apart; yellow is too pale on white, so grey."""
MARKERS = "osD^vP*X"
_DPI = 130


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture."""

    name: str
    title: str
    says: str
    """What a reader takes from it."""
    draw: Callable[[Results], Figure | None]
    """None where the runs give nothing to draw."""


def write_plots(results: Results, out: Path) -> dict[str, Path] | None:
    """Draws what can be drawn into `out`/NAME.png; paths by name. None: matplotlib is not installed. Raises OSError."""
    try:
        import matplotlib
    except ImportError:
        return None
    from matplotlib import pyplot

    written = {}
    with matplotlib.rc_context({"backend": "Agg", "axes.spines.top": False, "axes.spines.right": False}):
        for plot in PLOTS:
            path = out / f"{plot.name}.png"
            figure = plot.draw(results)
            if figure is None:
                path.unlink(missing_ok=True)
                continue
            figure.savefig(path, dpi=_DPI)
            pyplot.close(figure)
            written[plot.name] = path
    return written


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in both coordinates, less being better; by the first coordinate."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def _axes(width: float = 8.0, height: float = 4.6, columns: int = 1) -> tuple[Figure, Any]:
    from matplotlib import pyplot

    return pyplot.subplots(1, columns, figsize=(width, height), layout="constrained")


def _log_x(axes: Axes) -> None:
    """A logarithmic x axis with plain numbers, at 1, 2 and 5 where the span is short."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _style(results: Results, recipe: RecipeResult) -> dict[str, Any]:
    at = [r.name for r in results.recipes].index(recipe.name)
    return {"color": COLOURS[at % len(COLOURS)], "marker": MARKERS[(at // len(COLOURS) + at) % len(MARKERS)]}


def _pareto(results: Results) -> Figure | None:
    """P1."""
    known = [r for r in results.recipes if r.bytes_per_sample and r.auc_loss is not None]
    if not known:
        return None
    figure, axes = _axes()
    points = [(r.bytes_per_sample or 0.0, r.auc_loss.mean) for r in known if r.auc_loss is not None]
    front = pareto_front(points)
    axes.step(*zip(*front, strict=True), where="post", color="#bbbbbb", linewidth=1.2, zorder=1)
    for recipe, (x, _) in zip(known, points, strict=True):
        if recipe.auc_loss is not None:
            _point(axes, results, recipe, x, recipe.auc_loss)
    axes.axhline(0.0, color="#888888", linewidth=0.8, linestyle=":")
    _log_x(axes)
    axes.margins(x=0.12)
    axes.grid(alpha=0.25)
    axes.set(xlabel="bytes per sample, all directions (log)", ylabel="AUC loss against fp32, paired (below 0: a gain)")
    return figure


def _point(axes: Axes, results: Results, recipe: RecipeResult, x: float, loss: Estimate) -> None:
    """A recipe's mean loss with its interval, and its name beside it."""
    bar = None if loss.low is None or loss.high is None else [[loss.mean - loss.low], [loss.high - loss.mean]]
    axes.errorbar(x, loss.mean, yerr=bar, capsize=3, markersize=6, linewidth=1.2, **_style(results, recipe))
    axes.annotate(recipe.name, (x, loss.mean), xytext=(7, 5), textcoords="offset points", fontsize=9)


def _curves(results: Results) -> Figure | None:
    """P2."""
    known = [(recipe, [run.curve for run in recipe.runs if run.curve]) for recipe in results.recipes]
    known = [(recipe, curves) for recipe, curves in known if curves]
    if not known:
        return None
    figure, axes = _axes()
    for recipe, curves in known:
        style = _style(results, recipe)
        for curve in curves:
            x, y = [p.train_bytes / 1e6 for p in curve], [p.auc for p in curve]
            axes.plot(x, y, color=style["color"], alpha=0.25, linewidth=0.8)
        means = mean_curve(curves)
        axes.plot([x / 1e6 for x, _ in means], [y for _, y in means], label=recipe.name, markersize=4, **style)
    _log_x(axes)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)
    axes.set(xlabel="MB of pull, push and tower so far, all workers (log)", ylabel="AUC on the evaluation data")
    return figure


def mean_curve(curves: Sequence[Sequence[CurvePoint]]) -> list[tuple[float, float]]:
    """(bytes, AUC) averaged over runs, at the steps that all of them evaluated."""
    by_step: dict[int, list[CurvePoint]] = {}
    for point in (point for curve in curves for point in curve):
        by_step.setdefault(point.step, []).append(point)
    whole = [points for _, points in sorted(by_step.items()) if len(points) == len(curves)]
    return [(sum(p.train_bytes for p in ps) / len(ps), sum(p.auc for p in ps) / len(ps)) for ps in whole]


def _times(results: Results) -> Figure | None:
    """P3."""
    predicted = [(recipe, predict(results, recipe)) for recipe in results.recipes]
    if not any(times for _, times in predicted):
        return None
    figure, panels = _axes(width=11.0, height=1.6 + 0.36 * len(predicted), columns=len(MBIT_PER_S))
    for panel, (axes, mbit) in enumerate(zip(panels, MBIT_PER_S, strict=True)):
        for at, (recipe, times) in enumerate(predicted):
            if not times:
                why = why_no_time(results, recipe)
                axes.annotate(why, (0.0, at), xytext=(4, -3), textcoords="offset points", fontsize=8)
                continue
            time, style = times[panel], _style(results, recipe)
            axes.plot([time.max_s, time.sum_s], [at, at], color=style["color"], linewidth=3.0, alpha=0.4)
            axes.plot([time.sum_s], [at], linestyle="", markersize=6, **style)
            place = {"xytext": (7, -3), "textcoords": "offset points", "fontsize": 8}
            axes.annotate(_seconds(time.sum_s), (time.sum_s, at), **place)
        axes.set_title(bandwidth_name(mbit), fontsize=10)
        axes.set_yticks(range(len(predicted)), [recipe.name for recipe, _ in predicted] if not panel else [])
        axes.set_ylim(len(predicted) - 0.5, -0.5)
        axes.margins(x=0.25)
        axes.set_xlim(left=0.0)
        axes.grid(alpha=0.25, axis="x")
        axes.set_xlabel("seconds")
    return figure


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _ledger(results: Results) -> Figure | None:
    """P4."""
    known = [recipe for recipe in results.recipes if recipe.bytes_per_sample]
    if not known:
        return None
    parts = {recipe.name: _parts_per_sample(recipe) for recipe in known}
    keys = sorted({k for own in parts.values() for k in own}, key=lambda k: (DIRECTIONS.index(k[0]), k[1]))
    figure, (left, right) = _axes(width=11.0, height=1.8 + 0.36 * len(known), columns=2)
    names = [recipe.name for recipe in known]
    for axes, scale in ((left, False), (right, True)):
        base = [0.0] * len(known)
        for key in keys:
            sizes = [parts[n].get(key, 0.0) * (100.0 / sum(parts[n].values()) if scale else 1.0) for n in names]
            axes.barh(names, sizes, left=base, label=" ".join(filter(None, key)), **_fill(key, keys))
            base = [b + s for b, s in zip(base, sizes, strict=True)]
        axes.invert_yaxis()
    for at, recipe in enumerate(known):
        fewer = "" if recipe.name == FP32 or not recipe.times_fewer else f", {recipe.times_fewer:.1f}x fewer"
        left.annotate(
            f" {recipe.bytes_per_sample:,.0f} B{fewer}", (recipe.bytes_per_sample or 0.0, at), va="center", fontsize=8
        )
    left.margins(x=0.3)
    left.set(xlabel="bytes per sample")
    right.set(xlabel="share of the recipe's own bytes, %", xlim=(0, 100))
    right.set_yticks([])
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


def _parts_per_sample(recipe: RecipeResult) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for run in recipe.runs:
        for key, size in run.parts().items():
            if size:
                found[key] = found.get(key, 0.0) + size / run.samples / len(recipe.runs)
    return found


def _ages(results: Results) -> Figure | None:
    """P5."""
    known = [recipe for recipe in results.recipes if recipe.name != FP32 and recipe.auc_loss is not None]
    panels: list[tuple[str, Sequence[float | None]]] = [
        (
            "steps that a delivered row's oldest gradient had waited",
            [_delivered_age(recipe) for recipe in known],
        ),
        ("steps that a row may lag behind when it is read", [recipe.runs[0].oldest_read for recipe in known]),
    ]
    if all(len(set(ages) - {None}) < 2 for _, ages in panels):
        return None
    figure, both = _axes(width=11.0, height=4.2, columns=len(panels))
    for axes, (label, ages) in zip(both, panels, strict=True):
        for recipe, age in zip(known, ages, strict=True):
            if age is not None and recipe.auc_loss is not None:
                _point(axes, results, recipe, age, recipe.auc_loss)
        axes.axhline(0.0, color="#888888", linewidth=0.8, linestyle=":")
        axes.margins(x=0.12)
        axes.grid(alpha=0.25)
        axes.set(xlabel=label)
    both[0].set(ylabel="AUC loss against fp32, paired")
    return figure


def _delivered_age(recipe: RecipeResult) -> float | None:
    ages = [age for run in recipe.runs if (age := run.delivered_age) is not None]
    return sum(ages) / len(ages) if ages else None


_HUES = {
    "pull": ("#003a5d", "#0072b2", "#56b4e9", "#9fd3f2", "#cfe9f8"),
    "push": ("#7a3500", "#d55e00", "#e69f00", "#f2c46d", "#f9e4bd"),
    "tower": ("#00513b", "#009e73", "#7fcfb8", "#bfe7db"),
    "control": ("#777777",),
}


def _fill(key: tuple[str, str], keys: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """A direction has a hue; its parts are shades of it."""
    own, shades = [k for k in keys if k[0] == key[0]], _HUES[key[0]]
    at = own.index(key)
    return {
        "color": shades[at % len(shades)],
        "hatch": "//" if at >= len(shades) else None,
        "edgecolor": "white",
        "linewidth": 0.4,
    }


PLOTS = (
    Plot(
        "pareto",
        "Bytes against AUC",
        "Left is cheaper, down is better. A bar is the 95 % interval of the mean over paired seeds; a recipe whose bar "
        "crosses 0 has shown no loss. Nothing lies below and to the left of the grey line.",
        _pareto,
    ),
    Plot(
        "ledger",
        "Where the bytes go",
        "Each part of a direction by itself: left in bytes, right as a share of the recipe's own total.",
        _ledger,
    ),
    Plot(
        "curves",
        "AUC against the bytes sent so far",
        "One thin line per seed, their mean thick. Warm-up steps are in.",
        _curves,
    ),
    Plot(
        "times",
        "Predicted time to an AUC",
        "The dot is the time when computing and sending do not overlap; the line reaches down to that when they do.",
        _times,
    ),
    Plot(
        "ages",
        "AUC loss against age",
        "What waits, and what is read again only later, is old when it counts. Left how old a row's oldest gradient "
        "was when servers got it (not known where single values wait), right how old rows may be when a worker uses "
        "them: staleness and lease.",
        _ages,
    ),
)

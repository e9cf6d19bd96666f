"""The three plots of a sweep, each as PNG, SVG and PDF with a caption. Needs matplotlib (the extra `report`); computes
nothing but positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkeep.base.files import atomic_write
from shardkeep.base.plugging.packages import missing
from shardkeep.base.sizes import counted
from shardkeep.sweep.compare import against_fp32
from shardkeep.sweep.parts import COLOURS as PART_COLOURS, by_kind
from shardkeep.sweep.results import FP32, CurvePoint, RecipeResult, Results
from shardkeep.sweep.student import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#000000", "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#999999")
"""Okabe and Ito's, which people with any colour vision can tell apart; yellow is too pale on white, so grey."""
MARKERS = "osD^vP*X"
FORMATS = ("png", "svg", "pdf")
DIFFERENCE = "AUC \N{MINUS SIGN} AUC of fp32, same seed"
OFF_SCALE = 5.0
_DPI = 150
_STYLE: Any = {
    "backend": "Agg",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "pdf.fonttype": 42,  # letters as such, which publishers want, not as pictures of them
    "svg.hashsalt": "shardkeep",
}


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture."""

    name: str
    title: str
    says: str
    """How to read it; its caption."""
    draw: Callable[[Results], Figure | None]
    """None where the runs give nothing to draw."""


def write_plots(results: Results, out: Path) -> dict[str, Path]:
    """Draws what can be drawn into `out`/plots/NAME.png, .svg and .pdf, with their captions in captions.txt; paths of
    the PNGs by name. Without matplotlib there are none. Raises OSError."""
    folder, written = out / "plots", dict[str, Path]()
    if missing("matplotlib"):
        return written
    import matplotlib
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_STYLE):
        for plot in PLOTS:
            figure = plot.draw(results)
            for form in FORMATS:
                path = folder / f"{plot.name}.{form}"
                if figure is None:
                    path.unlink(missing_ok=True)
                    continue
                known = {"Title": plot.title} if form != "svg" else {"Title": plot.title, "Date": None}
                figure.savefig(path, dpi=_DPI, metadata=known)
                figure.set_layout_engine(None)  # the first form's places hold for all; to compute them takes long
            if figure is not None:
                pyplot.close(figure)
                written[plot.name] = folder / f"{plot.name}.png"
    texts = [f"{name}: {caption(results, name, at + 1)}\n" for at, name in enumerate(written)]
    atomic_write(folder / "captions.txt", "\n".join(texts))
    return written


def caption(results: Results, name: str, number: int) -> str:
    """The caption of a plot, the `number`-th that is shown."""
    plot = next(plot for plot in PLOTS if plot.name == name)
    config, seeds = results.plan.runs[0].config, len(results.plan.seeds)
    members = f"{counted(config.workers, 'worker')}, {counted(config.servers, 'server')}"
    job = f"{config.name}, {members}, {config.consistency.mode}, {counted(seeds, 'seed')}"
    return f"Figure {number}. {plot.title} ({job}). {plot.says}"


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


def _legend(figure: Figure, axes: Axes) -> None:
    """The recipes beside the plot, where no name covers another or a point."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", frameon=False, fontsize=9)


def _pareto(results: Results) -> Figure | None:
    """P1."""
    known = [(r, r.bytes_per_sample, r.auc_loss) for r in results.recipes]
    points = [(recipe, x, loss) for recipe, x, loss in known if x and loss is not None]
    if not points:
        return None
    figure, axes = _axes(width=8.6)
    front = pareto_front((x, loss.mean) for _, x, loss in points)
    axes.step([x for x, _ in front], [-y for _, y in front], where="post", color="#bbbbbb", linewidth=1.2, zorder=1)
    _points(axes, results, points)
    axes.set(xlabel="bytes per sample, all directions (log)", ylabel=DIFFERENCE)
    _legend(figure, axes)
    return figure


def off_scale(losses: Mapping[str, float]) -> set[str]:
    """Recipes that would squeeze all others into a line: those that lose more than five times as much as the next."""
    order, found = sorted(losses, key=lambda name: losses[name]), set()
    while len(order) > 2 and losses[order[-1]] > OFF_SCALE * max(losses[order[-2]], 1e-6):
        found.add(order.pop())
    return found


def _off_scale(results: Results) -> set[str]:
    return off_scale({recipe.name: recipe.auc_loss.mean for recipe in results.recipes if recipe.auc_loss is not None})


def _points(axes: Axes, results: Results, points: Sequence[tuple[RecipeResult, float, Estimate]]) -> None:
    """A recipe's mean difference from fp32's AUC, up being better, with its interval; filled where it is significant.
    A recipe that is off the scale is at the lower edge, with its value."""
    against, off = against_fp32(results), _off_scale(results)
    ends = [
        -end for recipe, _, loss in points if recipe.name not in off for end in (loss.low, loss.mean, loss.high) if end
    ]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    room = max(0.08 * (high - low), 1e-5)
    axes.set_ylim(low - (2.0 if off else 1.0) * room, high + room)
    places = side_by_side([x for _, x, _ in points])
    for recipe, x, loss in points:
        told = recipe.name == FP32 or (recipe.name in against and against[recipe.name].told)
        style = _style(results, recipe) | ({} if told else {"markerfacecolor": "white"})
        style |= {"markersize": 6.5, "linewidth": 1.2, "label": recipe.name}
        moved = 9.0 * places[x].pop(0)
        style["transform"] = _moved(axes, moved)
        if recipe.name in off:
            axes.errorbar([x], [low - room], linestyle="", **style)
            words = f"\N{DOWNWARDS ARROW} \N{MINUS SIGN}{loss.mean:.4f}"
            axes.annotate(words, (x, low - room), xytext=(7 + moved, -4), textcoords="offset points", fontsize=8)
            continue
        bar = None if loss.low is None or loss.high is None else [[loss.high - loss.mean], [loss.mean - loss.low]]
        axes.errorbar(x, -loss.mean, yerr=bar, capsize=3, **style)
    axes.axhline(0.0, color="#888888", linewidth=0.8, linestyle=":")
    axes.grid(alpha=0.25)
    _log_x(axes)
    axes.update_datalim([(x, low) for _, x, _ in points], updatey=False)
    axes.margins(x=0.12)
    axes.autoscale_view(scaley=False)


def side_by_side(places: Sequence[float]) -> dict[float, list[float]]:
    """How far to move points that would cover each other, in steps to the right; for each place, in order. Those
    within 2 % of the span of the logarithmic axis keep their order around where they are."""
    scaled = sorted((math.log(place), place) for place in places)
    near = 0.02 * (scaled[-1][0] - scaled[0][0]) if scaled else 0.0
    found: dict[float, list[float]] = {}
    group: list[float] = []
    for at, (value, place) in enumerate(scaled):
        group.append(place)
        if at + 1 == len(scaled) or scaled[at + 1][0] - value > near:
            for step, one in enumerate(group):
                found.setdefault(one, []).append(step - (len(group) - 1) / 2)
            group = []
    return found


def _moved(axes: Axes, points: float) -> Any:
    """The plot's coordinates, so many points to the right: what is at the same place is drawn side by side."""
    from matplotlib.transforms import ScaledTranslation

    return axes.transData + ScaledTranslation(points / 72.0, 0.0, axes.figure.dpi_scale_trans)


def _curves(results: Results) -> Figure | None:
    """P2."""
    known = [(recipe, [run.curve for run in recipe.runs if run.curve]) for recipe in results.recipes]
    known = [(recipe, curves) for recipe, curves in known if curves]
    if not known:
        return None
    figure, axes = _axes(width=8.6)
    shown, off = [], _off_scale(results)
    for recipe, curves in known:
        style = _style(results, recipe)
        for curve in curves:
            x, y = [p.train_bytes / 1e6 for p in curve], [p.auc for p in curve]
            axes.plot(x, y, color=style["color"], alpha=0.25, linewidth=0.8)
        means = mean_curve(curves)
        axes.plot([x / 1e6 for x, _ in means], [y for _, y in means], label=recipe.name, markersize=4, **style)
        shown += [point.auc for curve in curves for point in curve if recipe.name not in off]
    _log_x(axes)
    axes.grid(alpha=0.25)
    if off and shown:
        room = 0.05 * (max(shown) - min(shown))
        axes.set_ylim(min(shown) - room, max(shown) + room)
    _legend(figure, axes)
    axes.set(xlabel="MB of pull, push and tower so far, all workers (log)", ylabel="AUC on the evaluation data")
    return figure


def mean_curve(curves: Sequence[Sequence[CurvePoint]]) -> list[tuple[float, float]]:
    """(bytes, AUC) averaged over runs, at the steps that all of them evaluated and at each one's last, whose step
    differs where the number of training samples does."""
    by_step: dict[int | float, list[CurvePoint]] = {}
    for curve in curves:
        for point in curve:
            by_step.setdefault(math.inf if point is curve[-1] else point.step, []).append(point)
    whole = [points for _, points in sorted(by_step.items()) if len(points) == len(curves)]
    return [(sum(p.train_bytes for p in ps) / len(ps), sum(p.auc for p in ps) / len(ps)) for ps in whole]


def _ledger(results: Results) -> Figure | None:
    """P4."""
    known = [(recipe, _kinds_per_sample(recipe)) for recipe in results.recipes if recipe.bytes_per_sample]
    if not known:
        return None
    names = [recipe.name for recipe, _ in known]
    present = [kind for kind in PART_COLOURS if any(kind in own for _, own in known)]
    figure, (left, right) = _axes(width=11.0, height=1.9 + 0.36 * len(known), columns=2)
    for axes, scale in ((left, False), (right, True)):
        base = [0.0] * len(known)
        for kind in present:
            sizes = [own.get(kind, 0.0) * (100.0 / sum(own.values()) if scale else 1.0) for _, own in known]
            axes.barh(names, sizes, left=base, label=kind, color=PART_COLOURS[kind], edgecolor="white", linewidth=0.4)
            base = [b + s for b, s in zip(base, sizes, strict=True)]
        axes.invert_yaxis()
    for at, (recipe, own) in enumerate(known):
        fewer = "" if recipe.name == FP32 or not recipe.times_fewer else f", {recipe.times_fewer:.1f}x fewer"
        total = sum(own.values())
        left.annotate(f" {total:,.0f} B{fewer}", (total, at), va="center", fontsize=8)
    left.set_xlim(0.0, 1.35 * max(sum(own.values()) for _, own in known))
    left.set(xlabel="bytes per sample")
    right.set(xlabel="share of the recipe's own bytes, %", xlim=(0, 100))
    right.set_yticks([])
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


def _kinds_per_sample(recipe: RecipeResult) -> dict[str, float]:
    found: dict[tuple[str, str], float] = {}
    for run in recipe.runs:
        for key, size in run.parts().items():
            found[key] = found.get(key, 0.0) + size / run.samples / len(recipe.runs)
    return by_kind(found)


PLOTS = (
    Plot(
        "pareto",
        "Bytes against AUC",
        "Left is cheaper, up is better. A bar is the 95 % interval of the mean over paired seeds, for each "
        "recipe alone. Hollow: no significant loss, with Holm's correction over the recipes. An arrow: below the "
        "plot. Points that would cover each other are moved apart. No recipe lies above and to the left of the grey "
        "line.",
        _pareto,
    ),
    Plot(
        "ledger",
        "Where the bytes go",
        "Left in bytes, right as a share of the recipe's own total. Values include scales and second moments, ids "
        "include masks and the places of single values; headers are those of messages, torch RPC and gloo.",
        _ledger,
    ),
    Plot(
        "curves",
        "AUC against the bytes sent so far",
        "One thin line per seed, their mean thick. Warm-up steps are in. Where one recipe loses far more than all "
        "others, its curve begins below the plot.",
        _curves,
    ),
)

"""The pictures of experiments, as PNG, SVG and PDF. Needs matplotlib (the extra `report`); computes only positions."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkeep.analysis.significance import CONFIDENCE
from shardkeep.base.files import atomic_write
from shardkeep.base.plugging.packages import missing
from shardkeep.experiments.plan import FP32
from shardkeep.experiments.results import DIRECTIONS, Figures, Results, curve_of, done
from shardkeep.page.document import figure as html_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#000000", "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#999999")
"""Okabe and Ito's, which people with any colour vision can tell apart; yellow is too pale on white, so grey."""
HUES = dict(zip(DIRECTIONS, ("#0072b2", "#d55e00", "#009e73", "#777777"), strict=True))
MARKERS = "osD^vP*X"
STYLE: Any = {
    "backend": "Agg",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "pdf.fonttype": 42,  # letters as such, which publishers want, not as pictures of them
    "text.parse_math": False,
}


def sweep_pictures(results: Results, out: Path) -> list[str]:
    """Bytes against AUC, where the bytes go, and the curves, as HTML."""
    known = [each for each in results.figures if each.bytes_per_sample]
    curves = {each.recipe: [curve_of(out / row["run"], results.plan.metric) for row in done(results.rows, each.recipe)]
              for each in known}  # fmt: skip
    makers: dict[str, tuple[str, Callable[[], Figure]]] = {
        "pareto": (
            "Bytes against AUC. Left is cheaper, up is better. A bar is the 95 % interval of the mean over paired "
            "seeds, for each recipe alone. Hollow: no significant difference, with Holm's correction over the recipes.",
            lambda: _pareto(known),
        ),
        "ledger": ("Where the bytes go, by direction and part of the ledger.", lambda: _ledger(known, results)),
        "curves": (
            "AUC against the bytes sent so far, warm-up steps included. One line per seed.",
            lambda: curves_of(curves, xlabel="MB so far, all workers (log)", ylabel=results.plan.metric, xscale="log"),
        ),
    }
    return write_pictures(makers if known else {}, out)


def write_pictures(makers: Mapping[str, tuple[str, Callable[[], Figure]]], out: Path) -> list[str]:
    """Draws into `out`/plots/NAME.png, .svg and .pdf. Returns each as HTML with its caption; without matplotlib there
    are none. Raises OSError."""
    folder, found = out / "plots", list[str]()
    if not makers or missing("matplotlib"):
        return found
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    with pyplot.rc_context(STYLE):
        for name, (words, make) in makers.items():
            figure, pictures = make(), {form: io.BytesIO() for form in ("png", "svg", "pdf")}
            for form, file in pictures.items():
                figure.savefig(file, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
                figure.set_layout_engine(None)  # the first form's places hold for all; to compute them takes long
                atomic_write(folder / f"{name}.{form}", file.getvalue())
            pyplot.close(figure)
            found.append(html_figure(words, pictures["png"].getvalue()))
    return found


def curves_of(curves: Mapping[str, Sequence[Sequence[tuple[float, float]]]], **labels: str) -> Figure:
    """Lines of points (x, y); those of one name look alike."""
    figure, axes = _axes()
    for at, (name, own) in enumerate(curves.items()):
        for number, points in enumerate(own):
            axes.plot(*zip(*points, strict=True), linewidth=0.8, label="" if number else name, **_style(at))
    return _finished(figure, axes, **labels)


def _style(at: int) -> dict[str, Any]:
    marker = MARKERS[(at // len(COLOURS) + at) % len(MARKERS)]
    return {"color": COLOURS[at % len(COLOURS)], "marker": marker, "markersize": 5}


def _axes(height: float = 4.6) -> tuple[Figure, Any]:
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(9.0, height), layout="constrained")


def _finished(figure: Figure, axes: Any, **settings: Any) -> Figure:
    from matplotlib.ticker import LogLocator

    axes.set(**settings)
    if axes.get_xscale() == "log":  # whose own texts are formulas
        axes.xaxis.set(major_locator=LogLocator(subs=(1.0, 2.0, 5.0)), major_formatter="{x:,g}", minor_formatter="")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _pareto(known: Sequence[Figures]) -> Figure:
    figure, axes = _axes()
    for at, each in enumerate(known):
        if (loss := each.auc_loss) is not None:
            solid = each.recipe == FP32 or (each.p_holm is not None and each.p_holm < 1.0 - CONFIDENCE)
            face = {} if solid else {"markerfacecolor": "white"}
            bar = None if loss.low is None or loss.high is None else [[loss.high - loss.mean], [loss.mean - loss.low]]
            axes.errorbar(
                [each.bytes_per_sample], [-loss.mean], bar, capsize=3, label=each.recipe, **_style(at), **face
            )
    axes.axhline(0.0, color="#888888", linewidth=0.8, linestyle=":")
    axes.set_yscale("symlog", linthresh=2e-3)  # one that loses far more than all others leaves them apart
    axes.yaxis.set_major_formatter("{x:g}")
    return _finished(figure, axes, xlabel="bytes per sample (log)", ylabel="AUC less fp32's, same seed", xscale="log")


def _ledger(known: Sequence[Figures], results: Results) -> Figure:
    figure, axes = _axes(2.4 + 0.36 * len(known))
    names, left = [each.recipe for each in known], [0.0] * len(known)
    known_rows = [done(results.rows, name) for name in names]
    for way, colour in HUES.items():
        parts = [key for key in results.rows[0] if key.startswith(f"{way}_") and key.count("_") > 1] or [f"{way}_bytes"]
        for at, key in enumerate(parts):
            sizes = [sum((row[key] or 0) / row["samples"] for row in rows) / len(rows) for rows in known_rows]
            label, alpha = key.removesuffix("_bytes").replace("_", ": "), 1.0 - 0.85 * at / len(parts)
            axes.barh(names, sizes, left=left, label=label, color=colour, alpha=alpha, edgecolor="white")
            left = [sum(pair) for pair in zip(left, sizes, strict=True)]
    for at, (each, total) in enumerate(zip(known, left, strict=True)):
        axes.annotate(f" {total:,.0f}, {each.times_fewer_bytes or 1.0:.1f}x fewer", (total, at), va="center")
    axes.invert_yaxis()
    return _finished(figure, axes, xlabel="bytes per sample", xlim=(0.0, 1.25 * max(left)))

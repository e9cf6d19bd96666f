"""What a person sees of a job: one line a phase, a progress bar, a closing table. Reads records, decides nothing."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress as Bars, Task, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from shardkeep.base.printable import printable
from shardkeep.base.sizes import size_text
from shardkeep.records.events import Event, ProgressiveEvent
from shardkeep.records.record import Record
from shardkeep.records.training import Evaluation, Progress
from shardkeep.view.run_view import METRICS, RunView, clock_text
from shardkeep.view.text_tables import two_columns
from shardkeep.view.unseen_lines import unseen_lines
from shardkeep.workers.config import BASELINE, is_of_ranks

PIPED_WIDTH = 1_000_000
"""Columns where there is no terminal: nothing is cut or folded for want of room."""
NARROW = 100
"""A terminal of fewer columns has a short bar, one clock behind it, and no speed once a model was evaluated."""
BAR_COLUMNS, NARROW_BAR_COLUMNS = 40, 6
_DETAILS = ("tower",)
"""Phases for those who tune: metrics.jsonl has them, the screen does not."""
PLAIN_EVERY_S = 5.0
"""Seconds between two lines of progress where there is no terminal to draw a bar on."""


class _Console(Console):
    """Shows texts: neither brackets nor colons nor controls in them mean anything."""

    def render_str(self, text: str, **style: Any) -> Text:
        return super().render_str(printable(text, keep="\n"), **style)


def console(*, quiet: bool = False) -> Console:
    """Standard output, as wide as its terminal; in a notebook plain text, too."""
    make = functools.partial(_Console, highlight=False, markup=False, emoji=False, quiet=quiet)
    made = make()
    return made if made.is_terminal else make(force_terminal=False, force_jupyter=False, width=PIPED_WIDTH)


class Screen:
    """Shows one job on a console. All methods belong to one thread.

    Args:
        listener: Called with each record after it is shown; None = nobody.
    """

    def __init__(self, console: Console, *, listener: Callable[[Record], None] | None = None) -> None:
        self._console = console
        self._listener = listener
        self._bar: Bars | None = None
        self._task: TaskID | None = None
        self._next_line = 0.0
        self._redraws = not console.quiet and Console().is_jupyter
        self._drawn = 0  # characters of the line that a notebook shows of the progress
        self._unseen: list[str] = []  # what the evaluation before told of ids without a row
        self._view = RunView()

    def phase(self, name: str, text: str) -> None:
        """One line: a phase has begun or is done."""
        line = Text(f"{name:<9} ", style="bold cyan")
        line.append(printable(text), style="default not bold")
        if self._drawn:
            self._console.print()
            self._drawn = 0
        self._console.print(line, soft_wrap=True)

    def working(self, name: str, text: str, fraction: float, left_s: float | None = None) -> None:
        """A phase that takes a while: drawn over itself on a terminal, not at all elsewhere. `left_s`: the time left,
        where it does not follow from the pace of `fraction`."""
        if self._console.is_terminal:
            self._show_bar(name, text, done=int(1000 * fraction), total=1000, numbers="", left_s=left_s)

    def notice(self, text: str) -> str:
        """The text itself."""
        return text

    def record(self, record: Record) -> None:
        """Shows one record of metrics.jsonl, and passes it on."""
        self._show(record)
        if self._listener is not None:
            self._listener(record)

    def _show(self, record: Record) -> None:
        """Worker 0 speaks for the others, which report the same."""
        if record.index != 0:
            return
        self._view.hear(record)
        if isinstance(record, Progress):
            self._progress(record)
        elif isinstance(record, Evaluation):
            self.phase("evaluate", f"step {record.step or 0:,}  {quality(record.others)}")
            lines = unseen_lines(record.unseen)
            for line in lines if lines != self._unseen else ():
                self.phase("", line)
            self._unseen = lines
        elif isinstance(record, ProgressiveEvent):
            samples = f"on {record.samples or 0:,} samples before training on them"
            self.phase("progressive", f"to step {record.step or 0:,}  {quality(record.others)}  {samples}")
        elif isinstance(record, Event) and record.kind == "phase" and record.text and record.phase not in _DETAILS:
            self.phase(record.phase or "", record.text)

    def end_bar(self) -> None:
        """Takes the bar away; what is printed next stays alone."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None

    def closing(self, summary: Mapping[str, Any], run: Path, warnings: Sequence[Mapping[str, str]] = ()) -> None:
        """The table at the end of a completed job, with the page's warnings."""
        self.end_bar()
        self._console.print()
        self._console.print(two_columns(closing_rows(summary, run, warnings)))

    def _progress(self, record: Progress) -> None:
        step, total, left_s = record.step or 0, record.total_steps or 0, self._view.left_s
        loss, speed = f"loss {_number(record.loss, '.4f')}", _number(record.samples_per_s, ",.0f")
        numbers = [loss, f"{speed} samples/s", *filter(None, [self._view.trend])]
        if self._console.is_terminal:
            text, shown = f"step {step:,}/{total:,}", "  ".join(numbers)
            if self._narrow:
                text, shown = f"{step:,}/{total:,}", f"{numbers[0]} {numbers[-1]}"
            self._show_bar("train", text, done=step, total=total or None, numbers=shown, left_s=left_s)
        elif self._redraws:
            line = f"train     step {step:,}/{total:,}  {'  '.join(numbers)}  {clock_text(left_s or 0)} left"
            self._console.file.write(f"\r{line:<{self._drawn}}")
            self._console.file.flush()
            self._drawn = len(line)
        elif time.monotonic() >= self._next_line or step == total:
            self._next_line = time.monotonic() + PLAIN_EVERY_S
            numbers += [] if left_s is None or step == total else [f"{clock_text(left_s)} left"]
            self.phase("train", f"step {step:,}/{total:,}  {'  '.join(numbers)}")

    @property
    def _narrow(self) -> bool:
        return self._console.width < NARROW

    def _show_bar(
        self, name: str, text: str, *, done: int, total: int | None, numbers: str, left_s: float | None = None
    ) -> None:
        if self._bar is None or self._task is None:
            columns = (
                TextColumn("[bold cyan]{task.description:<9}"),
                BarColumn(bar_width=NARROW_BAR_COLUMNS if self._narrow else BAR_COLUMNS),
                TextColumn("{task.fields[text]}", markup=False),
            )
            elapsed = () if self._narrow else (_Elapsed(),)
            times = (TextColumn("{task.fields[numbers]}"), *elapsed, _Remaining())
            self._bar = Bars(*columns, *times, console=self._console, transient=True)
            self._task = self._bar.add_task(name, total=total, text="", numbers=numbers, left_s=left_s)
            self._bar.start()
        fields: dict[str, Any] = {"text": printable(text), "numbers": numbers, "left_s": left_s}
        self._bar.update(self._task, description=name, completed=done, total=total, **fields)


class _Elapsed(TimeElapsedColumn):
    def render(self, task: Task) -> Text:
        return super().render(task).append(" elapsed")


class _Remaining(TimeRemainingColumn):
    """The time left of training; of other work as its speed says."""

    def render(self, task: Task) -> Text:
        left_s = task.fields["left_s"]
        told = super().render(task) if left_s is None else Text(clock_text(left_s), style="progress.remaining")
        return told.append(" left")


_ON_ONE_LINE = 2  # metrics of a label in a line


def metric_name(key: str) -> str:
    """How the screen calls a key of the metrics: `normalized entropy`, or `AUC/LABEL` for one of several labels."""
    if key == "best_auc":
        return "best possible AUC"
    if key.startswith(BASELINE):
        return f"{metric_name(key.removeprefix(BASELINE))} of the constant mean"
    metric, slash, label = key.partition("/")
    return f"{METRICS.get(metric, metric)}{slash}{label}"


def quality(scores: Mapping[str, Any]) -> str:
    """The first metrics, AUC with the best possible one where that is known; of several labels, each by its name."""
    if names := list(dict.fromkeys(key.partition("/")[2] for key in scores if "/" in key)):
        parts = ({key.partition("/")[0]: scores[key] for key in scores if key.endswith(f"/{name}")} for name in names)
        return "  ".join(f"{name}: {quality(part)}" for name, part in zip(names, parts, strict=True))
    undefined = any(value is None for name, value in scores.items() if name in METRICS or is_of_ranks(name))
    why = f"  ({scores['note']})" if undefined and scores.get("note") else ""
    return "  ".join(f"{name} {value}" for name, value in _metrics(scores)[:_ON_ONE_LINE]) + why


def _metrics(scores: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The metrics of one label, as a person reads them."""
    shown = {**METRICS, **{name: name for name in scores if is_of_ranks(name)}}
    found = [
        (text, _number(scores[name], ".4f") + _best(scores, name)) for name, text in shown.items() if name in scores
    ]
    beside = {METRICS[name]: scores[BASELINE + name] for name in METRICS if BASELINE + name in scores}
    return [(n, f"{v} (constant mean {beside[n]:.4f})" if n in beside else v) for n, v in found]


def _best(scores: Mapping[str, Any], name: str) -> str:
    """What stands behind a metric whose best possible value is known."""
    best = scores.get(f"best_{name}")
    return "" if best is None else f" (best possible {_number(best, '.4f')})"


def _quality_rows(scores: Mapping[str, Any]) -> list[tuple[str, str]]:
    note = [("note", str(scores["note"]))] if scores.get("note") else []
    return [("quality", quality(scores))] if any("/" in key for key in scores) else [*_metrics(scores), *note]


_LEVELS = {"bad": "problem", "warn": "warning", "note": "note"}


def closing_rows(
    summary: Mapping[str, Any], run: Path, warnings: Sequence[Mapping[str, str]] = ()
) -> list[tuple[str, str]]:
    """The closing table's names and values. `warnings`: as the page has them."""
    samples = int(summary.get("samples") or 0) - int((summary.get("resumed_at") or {}).get("samples", 0))
    job = summary.get("job") or {}
    of_last = ", last start" if job.get("starts", 1) > 1 else ""
    rows = _step_rows(summary, job, samples)
    if summary.get("samples_per_s"):
        mean = f" ({_number(job['samples_per_s'], ',.0f')} over all starts)" if of_last else ""
        rows += [(f"speed{of_last}", f"{_number(summary['samples_per_s'], ',.0f')} samples/s{mean}")]
    if (summary.get("step_ms") or {}).get("total"):
        rows += [(f"mean step{of_last}", step_parts(summary["step_ms"]))]
    scores = summary.get("eval")
    if scores:
        rows += _quality_rows(scores)
    if found := summary.get("progressive"):
        rows += [("progressive", quality(found))]
    for name in ("best", "test"):
        if found := summary.get(name):
            rows += [(name, f"step {found['step']:,}  {quality(found)}")]
    rows += [("", line) for line in unseen_lines((summary.get("test") or {}).get("unseen"))]
    alone = _alone(summary)
    counted = {} if alone else summary.get("bytes") or {}
    if any(_total(counted.get(key)) for _, key in BYTE_ROWS):
        number, unit = (samples, "sample") if samples else (int(summary.get("steps") or 0), "step")
        each = [f"{name} {_bytes(_total(counted.get(key)), number)}" for name, key in BYTE_ROWS]
        rows += [(f"bytes per {unit}{of_last}", "  ".join(each))]
    if summary.get("staleness") and not (alone and set(summary["staleness"]) == {"0"}):
        rows += [(f"staleness{of_last}", _histogram(summary["staleness"]))]
    if tables := summary.get("tables"):
        held = sum(int(t.get("bytes", 0)) for t in tables)
        total_rows = sum(int(t.get("rows", 0)) for t in tables)
        where = "" if alone else " on the servers"
        rows += [("tables", f"{len(tables)} with {total_rows:,} rows, {size_text(held)}{where}")]
    if recoveries := summary.get("recoveries"):
        lost = sum(int(one.get("lost_steps") or 0) for one in recoveries)
        rows += [("recoveries", f"{len(recoveries)}, {lost:,} steps lost: summary.json reports each")]
    if peaks := peak_memory(summary.get("processes") or ()):
        rows += [("peak memory", peaks)]
    if (run / "profile").is_dir():
        rows += [("profile", str(run / "profile"))]
    rows += [(_LEVELS[one["level"]], f"{one['text']}. {one['advice']}".strip()) for one in warnings]
    return [*rows, ("run folder", str(run))]


def _step_rows(summary: Mapping[str, Any], job: Mapping[str, Any], samples: int) -> list[tuple[str, str]]:
    """Returns the rows of steps: of the job over all starts, and of the last one."""
    steps = int(summary.get("steps") or 0)
    if job.get("starts", 1) == 1:
        return [("steps", f"{steps:,} ({_work(summary, samples)}, start-up and evaluations included)")]
    all_starts = f"{_work(job)} over {job['starts']} starts, start-up and evaluations included"
    first = summary["starts"][-1]["from_step"]
    return [
        ("steps", f"{job['steps']:,} ({all_starts})"),
        ("last start", f"steps {first:,} to {steps:,} ({_work(summary, samples)})"),
    ]


def _alone(summary: Mapping[str, Any]) -> bool:
    """Whether one process did all (`servers: 0`): nothing was pulled or pushed."""
    roles = {process["role"] for process in summary.get("processes") or ()}
    return bool(roles) and "server" not in roles


def _work(figures: Mapping[str, Any], samples: int | None = None) -> str:
    """`700 samples in 3.1 s`, of a start or of a job; without the samples where nobody knows them."""
    count = int(figures.get("samples") or 0) if samples is None else samples
    return (f"{count:,} samples in " if count else "") + f"{figures.get('wall_s') or 0.0:.1f} s"


PART_WORDS = {"dense_reduce": "tower reduce"}
"""Parts of a step that the config has another word for."""
SHOWN_SHARE = 0.04
"""Parts of a step that take less of it are shown together."""


def step_parts(step_ms: Mapping[str, float]) -> str:
    """`9.2 ms: tower reduce 4.2, backward 2.0, forward 1.8, the rest 1.2`, the longest first."""
    total = step_ms["total"]
    parts = sorted(((ms, name) for name, ms in step_ms.items() if name not in ("total", "other")), reverse=True)
    words = [(ms, PART_WORDS.get(name, name.replace("_", " "))) for ms, name in parts]
    shown = [(ms, name) for ms, name in words if ms >= SHOWN_SHARE * total]
    rest = total - sum(ms for ms, _ in shown)
    return f"{total:.1f} ms: " + ", ".join([*(f"{name} {ms:.1f}" for ms, name in shown), f"the rest {rest:.1f}"])


def peak_memory(processes: Sequence[Mapping[str, Any]]) -> str:
    """`coordinator 259 MB, server 503 MB, 2 workers up to 520 MB`: the largest process of each role."""
    found: dict[str, list[int]] = {}
    for process in processes:
        found.setdefault(str(process["role"]), []).append(int(process["peak_rss_bytes"]))
    return ", ".join(_each(role, peaks) for role, peaks in found.items())


def _each(role: str, peaks: Sequence[int]) -> str:
    size = f"{max(peaks) / 1e6:,.0f} MB"
    return f"{role} {size}" if len(peaks) == 1 else f"{len(peaks)} {role}s up to {size}"


BYTE_ROWS = (("pulled", "pull"), ("pushed", "push"), ("tower", "tower"))


def _total(counted: Any) -> float:
    """The bytes of a class, or the sum of its parts."""
    if isinstance(counted, Mapping):
        return float(counted["total"]) if "total" in counted else sum(_total(part) for part in counted.values())
    return float(counted or 0)


def _bytes(total: float, samples: int) -> str:
    return f"{total / samples:,.{0 if total >= 100 * samples else 1}f}" if samples else "-"


def _histogram(staleness: Mapping[str, Any]) -> str:
    """Share of pulls per measured staleness: `0 steps 75 %, 1 step 25 %`."""
    counts = {int(k): int(v) for k, v in staleness.items()}
    total = sum(counts.values())
    if not total:
        return "-"
    shares = [f"{k} step{'' if k == 1 else 's'} {100 * counts[k] / total:.0f} %" for k in sorted(counts)]
    return ", ".join(shares)


def _number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, (int, float)) else "-"

"""What a person sees of a sweep: which run it is at and how that goes; a line for each run that has ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text


class SweepScreen:
    """Shows one sweep: bars on a terminal, plain lines elsewhere. All methods belong to one thread."""

    def __init__(self, console: Console, *, total: int) -> None:
        self._console, self._total = console, total
        self._bars: Progress | None = None
        self._all: TaskID | None = None
        self._one: TaskID | None = None

    def begin(self, number: int, name: str) -> None:
        """Run `number` of the sweep, counted from 1, starts."""
        if not self._console.is_terminal:
            self._console.print(f"run {number}/{self._total} {name}: started", soft_wrap=True, markup=False)
            return
        if self._bars is None:
            columns = (TextColumn("[bold cyan]{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
            self._bars = Progress(
                *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console, transient=True
            )
            self._all = self._bars.add_task("sweep", total=self._total, text="")
            self._one = self._bars.add_task(name, total=None, text="starting")
            self._bars.start()
        assert self._all is not None and self._one is not None
        self._bars.update(self._all, completed=number - 1, text=f"run {number}/{self._total}")
        self._bars.reset(self._one, total=None, description=name, text="starting")

    def record(self, record: Mapping[str, Any]) -> None:
        """A record of the run's metrics.jsonl."""
        if self._bars is None or self._one is None:
            return
        if record.get("kind") == "progress":
            step, total = int(record.get("step", 0)), int(record.get("total_steps") or 0)
            text = f"step {step:,}/{total:,}  {float(record.get('samples_per_s') or 0):,.0f} samples/s"
            self._bars.update(self._one, completed=step, total=total or None, text=text)
        elif record.get("kind") == "eval":
            self._bars.update(self._one, text=f"AUC {float(record.get('auc') or 0):.4f}")

    def ended(self, number: int, name: str, text: str, *, ok: bool) -> None:
        """A line that stays: how a run ended."""
        line = Text(f"run {number}/{self._total} {name}: ", style="bold cyan")
        line.append(text, style="default not bold" if ok else "red not bold")
        self._console.print(line, soft_wrap=True)

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, soft_wrap=True, markup=False)

    def close(self) -> None:
        """Takes the bars away."""
        if self._bars is not None:
            self._bars.stop()
        self._bars = self._all = self._one = None

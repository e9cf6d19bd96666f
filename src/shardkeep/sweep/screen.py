"""What a person sees of a sweep: which run it is at and how that goes; a line for each run that has ended."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from shardkeep.records.record import Record
from shardkeep.records.training import Progress
from shardkeep.view.screen import Screen


class SweepScreen:
    """Shows one sweep: a bar over all runs on a terminal, plain lines elsewhere. All methods belong to one thread."""

    def __init__(self, console: Console, *, total: int) -> None:
        self._console, self._total, self._bar = console, total, Screen(console)

    def begin(self, number: int, name: str) -> None:
        """Run `number` of the sweep, counted from 1, starts."""
        self._number, self._name = number, name
        if self._console.is_terminal:
            self._show("starting", 0.0)
        else:
            self.say(f"run {number}/{self._total} {name}: started")

    def record(self, record: Record) -> None:
        """A record of the run's metrics.jsonl."""
        if isinstance(record, Progress):
            step, total = record.step or 0, record.total_steps or 0
            speed = f"{record.samples_per_s or 0:,.0f} samples/s"
            self._show(f"step {step:,}/{total:,}  {speed}", step / total if total else 0.0)

    def _show(self, text: str, fraction: float) -> None:
        done = (self._number - 1 + fraction) / self._total
        self._bar.working("sweep", f"run {self._number}/{self._total} {self._name}: {text}", done)

    def ended(self, number: int, name: str, text: str, *, ok: bool) -> None:
        """A line that stays: how a run ended."""
        line = Text(f"run {number}/{self._total} {name}: ", style="bold cyan")
        line.append(text, style="default not bold" if ok else "red not bold")
        self._console.print(line, soft_wrap=True)

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, soft_wrap=True, markup=False)

    def close(self) -> None:
        """Takes the bar away."""
        self._bar.end_bar()

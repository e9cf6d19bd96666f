"""What the Python calls return of a run that is over: its summary, and its page inside a notebook."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path

from shardkeep.run.summary import Summary


class TrainedRun(Summary):
    """The typed content of summary.json, and what a notebook shows of the run."""

    run_dir: Path = Path()
    """The run folder."""

    def report(self) -> Report:
        """The page of the run as one document, as `shardkeep report RUN --html FILE` writes it."""
        from shardkeep.page.files import whole_page
        from shardkeep.page.state import RunState

        return Report(whole_page([RunState(self.run_dir)]))


@dataclass(frozen=True)
class Report:
    """An HTML document. A notebook shows it in a frame where it is the value of a cell."""

    text: str
    """The document, which needs no network."""

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        style = "width: 100%; height: 900px; border: 0"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{html.escape(self.text)}"></iframe>'

"""JobView: what shows a job. `screen.py` draws it for a person, `screen_log.py` logs it for programs."""

from __future__ import annotations

from shardkeep.view.screen import Screen
from shardkeep.view.screen_log import ScreenLog

JobView = Screen | ScreenLog
"""Shows one job. All methods belong to one thread."""

"""The one log line."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator

import pytest

from shardkeep.base.log import ROOT, EventLog, configure


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    logger = logging.getLogger(ROOT)
    before = (logger.handlers[:], logger.level, logger.propagate)
    stream = io.StringIO()
    configure("worker", 1, stream=stream)
    yield stream
    logger.handlers[:], logger.level, logger.propagate = before


def test_a_line_is_member_step_event_and_fields(lines: io.StringIO) -> None:
    EventLog("tower").info("chosen", step=3, compile="off", why="too short", seconds=1.23456789)
    pattern = r'worker/1 3 chosen compile=off why="too short" seconds=1\.23457 at=\d{4}-\d\d-\d\dT[\d:.]+\n'
    assert re.fullmatch(pattern, lines.getvalue())


def test_an_event_without_a_step_has_a_dash_and_a_warning_says_so(lines: io.StringIO) -> None:
    EventLog().warning("odd", text="a\nb")
    assert lines.getvalue().startswith('worker/1 - odd level=warning text="a b" at=')


def test_the_same_warning_is_written_once_per_cause(lines: io.StringIO) -> None:
    log = EventLog()
    for cause in ("a", "a", "b"):
        log.warning("dropped", once=cause, cause=cause)
    assert [line.split()[4] for line in lines.getvalue().splitlines()] == ["cause=a", "cause=b"]


def test_debug_is_off_unless_asked_for(lines: io.StringIO) -> None:
    logging.getLogger(ROOT).debug("detail")
    assert lines.getvalue() == ""

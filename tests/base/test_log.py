"""The one log line."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import threading
import time
import traceback
from datetime import datetime
from typing import Any, TextIO

import pytest

from shardkeep.base.logs.json_log import PrintedLines, json_line, printed_line, printed_text
from shardkeep.base.logs.log import ROOT, EventLog, LogFormat, configure, print_json


@pytest.fixture
def lines() -> io.StringIO:
    stream = io.StringIO()
    configure("worker", 1, stream=stream)
    return stream


KEYS = ["time", "level", "role", "index", "step", "event", "fields", "exception"]


@pytest.fixture
def objects(lines: io.StringIO) -> io.StringIO:
    configure("worker", 1, stream=lines, form=LogFormat.JSON)
    return lines


def parsed(stream: io.StringIO) -> list[dict[str, Any]]:
    found = [json.loads(line, parse_constant=pytest.fail) for line in stream.getvalue().splitlines()]
    assert all(list(each) == KEYS and each["role"] == "worker" and each["index"] == 1 for each in found)
    assert all(datetime.fromisoformat(each["time"]).tzinfo is not None for each in found)
    return found


def test_a_line_is_member_step_event_and_fields(lines: io.StringIO) -> None:
    logging.getLogger(ROOT).debug("off unless asked for")
    EventLog("tower").info("chosen", step=3, compile="off", why="too short", seconds=1.23456789)
    EventLog().warning("odd", text="a\nb")
    first, second = lines.getvalue().splitlines()
    assert re.fullmatch(
        r'worker/1 3 chosen compile=off why="too short" seconds=1\.23457 at=\d{4}-\d\d-\d\dT[\d:.]+', first
    )
    assert second.startswith('worker/1 - odd level=warning text="a b" at=')


def test_the_same_warning_is_written_once_per_cause(lines: io.StringIO) -> None:
    log = EventLog()
    for cause in ("a", "a", "b"):
        log.warning("dropped", once=cause, cause=cause)
    assert [line.split()[4] for line in lines.getvalue().splitlines()] == ["cause=a", "cause=b"]


def test_an_event_is_one_object_with_every_key(objects: io.StringIO) -> None:
    EventLog("tower").info("chosen", step=3, why="too\nshort", seconds=1.5, rate=float("nan"), path=ROOT, text=None)
    EventLog("tower").warning("odd")
    try:
        raise ValueError("no\nway")
    except ValueError:
        logging.getLogger(f"{ROOT}.control").exception("call failed")
    first, second, third = parsed(objects)
    assert (first["level"], first["step"], first["event"], first["exception"]) == ("info", 3, "chosen", None)
    assert first["fields"] == {"why": "too\nshort", "seconds": 1.5, "rate": "nan", "path": ROOT, "text": None}
    assert (second["level"], second["step"], second["fields"]) == ("warning", None, {})
    assert third["event"] == "call failed" and third["level"] == "error"
    assert third["exception"].startswith("Traceback") and third["exception"].endswith("ValueError: no\nway")


def test_whatever_is_printed_becomes_objects_and_a_traceback_one(
    objects: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", objects)
    monkeypatch.setattr(sys, "stdout", objects)
    print_json("worker", 1)
    print("error: data.path: no such file", file=sys.stderr)
    print("two", "words", end="")
    print("\n\n", flush=True)
    try:
        raise KeyError("lost")
    except KeyError:
        traceback.print_exc()
    sys.stderr.write("half a line")
    sys.stderr.flush()
    found = parsed(objects)
    assert [(each["level"], each["event"]) for each in found] == [
        ("error", "data.path: no such file"),
        ("info", "two words"),
        ("error", "KeyError: 'lost'"),
        ("info", "half a line"),
    ]
    assert found[2]["exception"].count("\n") >= 2


class Turns(io.TextIOBase):
    """Writes a letter at a time, and lets other threads run after each."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str, /) -> int:
        for letter in text:
            self._stream.write(letter)
            time.sleep(0)
        return len(text)


def test_lines_of_several_threads_do_not_mix(objects: io.StringIO) -> None:
    stream, names = PrintedLines(Turns(objects), "worker", 1), "abcd"
    threads = [threading.Thread(target=lambda n=n: [stream.write(f"{n}1\n{n}2\n") for _ in range(5)]) for n in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [each["event"] for each in parsed(objects)]
    assert sorted(found[::2]) == sorted(f"{n}1" for n in names * 5)
    assert [event[0] for event in found[::2]] == [event[0] for event in found[1::2]], (
        "two lines of one write stay together"
    )


def test_a_printed_line_is_read_back_and_an_event_with_fields_is_no_printed_error() -> None:
    for text in ("error: no such file", "warning: odd", "so it is", '{"a": 1}'):
        assert printed_text(printed_line("worker", 1, text)) == text
    assert printed_text(json_line("worker", 1, "ending", level="error", fields={"reason": "x"})) == "ending"
    assert printed_text('{"address": 1}') == '{"address": 1}'
    assert printed_text("[1]") == "[1]"

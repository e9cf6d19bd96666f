"""Where the address of the page goes, which has a token: to a terminal, and to no file, pipe or log."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardkeep.page.of_job import page_line
from shardkeep.run.folder import RunFolder
from tests.support import terminal
from tests.support.cases import every
from tests.support.cluster import Cluster, Command, within
from tests.support.configs import TINY

pytestmark = pytest.mark.waits_for_processes

WATCHED = {**TINY, "web": {"page": "127.0.0.1:0"}, "train": {"batch_size": 50, "epochs": 100_000}}


def train(cluster: Cluster, run: Path, **options: Any) -> Command:
    return cluster.command("train", str(cluster.write(WATCHED)), "--run-dir", str(run), **options)


def train_alone_with_a_log_of_json(cluster: Cluster, run: Path, **options: Any) -> Command:
    """A job in one process, whose token is kept in a file."""
    web = {"page": "127.0.0.1:0", "metrics": "127.0.0.1:0"}
    config = cluster.write({**WATCHED, "servers": 0, "workers": 1, "web": web})
    return cluster.command("train", str(config), "--run-dir", str(run), "--log-format", "json", **options)


def coordinator(cluster: Cluster, run: Path, **options: Any) -> Command:
    return cluster.command("coordinator", str(cluster.write(WATCHED)), "--run-dir", str(run), **options)


def around(cluster: Cluster, run: Path, **options: Any) -> Command:
    waits = (sys.executable, "-c", "import time; time.sleep(600)")
    return cluster.command("with", "--servers", "1", "--run-dir", str(run), "--", *waits, **options)


def wait_for(command: Command, text: str) -> None:
    within(120, lambda: text in command.printed(), f"no {text!r}", lambda: command.running)


@every("start", [train_alone_with_a_log_of_json, coordinator, around])
def test_without_a_terminal_no_secret_is_printed_or_logged(
    cluster: Cluster, tmp_path: Path, start: Callable[..., Command]
) -> None:
    run = tmp_path / "a run"
    command = start(cluster, run)
    wait_for(command, f"shardkeep view '{run}'")
    secrets = [(page_line(run) or "").split("?token=")[1], RunFolder(run).token_path.read_text().strip()]
    texts = {"printed": command.printed()}
    texts |= {
        path.name: path.read_text(errors="replace") for path in run.rglob("*") if path.suffix in (".log", ".jsonl")
    }
    assert [name for name, text in texts.items() if any(secret in text for secret in secrets)] == []
    command.kill()


@every("start", [train, around])
def test_a_terminal_shows_the_whole_address(cluster: Cluster, tmp_path: Path, start: Callable[..., Command]) -> None:
    run = tmp_path / "run"
    command = start(cluster, run, main=terminal.MAIN)
    wait_for(command, "?token=")
    assert page_line(run) in command.printed()
    command.kill()

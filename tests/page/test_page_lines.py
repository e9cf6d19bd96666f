"""Where the address of the page goes, which has a token: to a terminal, and to no file, pipe or log."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardkeep import EmbeddingClient
from shardkeep.page.of_job import page_line
from shardkeep.ps.config import TableSpec
from shardkeep.run.folder import RunFolder
from tests.support import terminal
from tests.support.cases import every
from tests.support.cluster import Cluster, Command, within
from tests.support.configs import TINY

pytestmark = pytest.mark.waits_for_processes

WATCHED = {**TINY, "web": {"page": "127.0.0.1:0"}, "train": {"batch_size": 50, "epochs": 100_000}}
ALONE = {"servers": 0, "workers": 1, "web": {"page": "127.0.0.1:0", "metrics": "127.0.0.1:0"}}
"""A job in one process, whose token is kept in a file."""

Start = Callable[..., Command]


def train(cluster: Cluster, run: Path, *arguments: str, alone: bool = False, **options: Any) -> Command:
    config = cluster.write({**WATCHED, **(ALONE if alone else {})})
    return cluster.command("train", str(config), "--run-dir", str(run), *arguments, **options)


def train_alone(cluster: Cluster, run: Path, *arguments: str, **options: Any) -> Command:
    return train(cluster, run, *arguments, alone=True, **options)


def train_with_a_log_of_json(cluster: Cluster, run: Path, **options: Any) -> Command:
    return train_alone(cluster, run, "--log-format", "json", **options)


def coordinator(cluster: Cluster, run: Path, **options: Any) -> Command:
    return cluster.command("coordinator", str(cluster.write(WATCHED)), "--run-dir", str(run), **options)


def around(cluster: Cluster, run: Path, **options: Any) -> Command:
    waits = (sys.executable, "-c", "import time; time.sleep(600)")
    return cluster.command("with", "--servers", "1", "--run-dir", str(run), "--", *waits, **options)


def watched(command: Command, run: Path, text: str) -> list[str]:
    """Waits until the command has printed a text; the secrets of its job."""
    within(120, lambda: text in command.printed(), f"no {text!r}", lambda: command.running)
    address = page_line(run) or ""
    assert "?token=" in address
    return [address.partition("?token=")[2], RunFolder(run).token_path.read_text().strip()]


@pytest.mark.parametrize("start", [train, train_alone, train_with_a_log_of_json, coordinator, around])
def test_without_a_terminal_no_secret_is_printed_or_logged(cluster: Cluster, tmp_path: Path, start: Start) -> None:
    run = tmp_path / "a run"
    command = start(cluster, run)
    secrets = watched(command, run, f"shardkeep view '{run}'")
    texts = {"printed": command.printed()}
    texts |= {
        path.name: path.read_text(errors="replace") for path in run.rglob("*") if path.suffix in (".log", ".jsonl")
    }
    assert [name for name, text in texts.items() if any(secret in text for secret in secrets)] == []


@every("start", [train, train_alone, coordinator, around])
def test_a_terminal_shows_the_whole_address(cluster: Cluster, tmp_path: Path, start: Start) -> None:
    run = tmp_path / "run"
    command = start(cluster, run, main=terminal.MAIN)
    watched(command, run, "?token=")
    assert page_line(run) in command.printed()
    command.kill()


def test_a_loop_s_own_servers_keep_the_token_out_of_a_pipe(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    with EmbeddingClient.serve([TableSpec(name="a", dim=4)], servers=1, run_dir=run) as client:
        printed = "".join(capfd.readouterr())
        assert f"page      shardkeep view {run}" in printed and client.page not in printed

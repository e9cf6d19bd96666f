"""`shardkeep view`, `shardkeep report` and the page of a job: their lines, their files, their errors."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from shardkeep.config.web import WebConfig
from shardkeep.page.of_job import kept_address, open_page, page_line
from shardkeep.run.folder import RunFolder
from shardkeep.trust.certificates import make_certs
from shardkeep.trust.view import view_token
from shardkeep.web.access import Access
from shardkeep.web.server import WebServer
from tests.support import terminal
from tests.support.cases import every
from tests.support.cluster import Cluster, Command, within
from tests.support.configs import TINY
from tests.support.http_attacks import request
from tests.support.pages import PageAddress, served_page
from tests.support.simulated_runs import Scene, write_simulated_run

HOSTILE = '<script>alert("</script>&amp;\u2028'


@pytest.mark.waits_for_processes
def test_view_prints_an_address_that_works(cluster: Cluster, tmp_path: Path) -> None:
    runs = [write_simulated_run(tmp_path / name, Scene(seed=seed, steps=300)) for seed, name in enumerate(("a", "b"))]
    page = PageAddress(cluster.command("view", *map(str, runs)).line("page").split()[-1])
    reply = request(page.place, "/state", headers=page.bearer)
    assert [run["name"] for run in json.loads(reply.body)["runs"]] == ["a", "b"]


@pytest.mark.waits_for_processes
def test_view_says_in_a_line_what_is_wrong(cluster: Cluster, tmp_path: Path) -> None:
    run = str(write_simulated_run(tmp_path / "run", Scene(state="begun")))
    wrong = {
        "there is no such folder": [str(tmp_path / "nothing")],
        "is not a run folder": [str(tmp_path)],
        "other machines may reach it": [run, "--listen", "0.0.0.0:0"],
        "is not HOST:PORT": [run, "--listen", "nowhere"],
    }
    commands = {message: cluster.command("view", *arguments) for message, arguments in wrong.items()}
    for message, command in commands.items():
        ended = command.end()
        assert ended.code == 2, message
        assert message in ended.err and ended.err.count("\n") == 1


def test_a_page_without_starlette_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(Exception, match=r"pip install 'shardkeep\[web\]'"):
        open_page(WebServer(), "127.0.0.1:0", Access("token"), list)
    with served_page(WebConfig(), tmp_path, "token") as url:
        assert url is None
    with (
        pytest.raises(Exception, match=r"web.page: .*shardkeep\[web\]"),
        served_page(WebConfig(page="127.0.0.1:0"), tmp_path, "token"),
    ):
        pass


def test_a_report_is_one_file_with_nothing_to_load(cluster: Cluster, tmp_path: Path) -> None:
    run = write_simulated_run(tmp_path / "run", Scene(steps=300))
    (run / "logs" / "server-0.log").write_text(HOSTILE)
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": "2026-11-25T12:00:00", "kind": "event", "text": f"warning: {HOSTILE}"}) + "\n")
    path = tmp_path / "new" / "report.html"
    ended = cluster.command("report", str(run), "--html", str(path)).end()
    assert (ended.code, ended.out) == (0, f"report  {path}\n"), ended.err
    text = path.read_text(encoding="utf-8")
    assert "Copyright (c) 2022 Leon Sorokin" in text
    assert not re.search(r"""(?:src|href)=["'](?!#|data:)""", text)
    assert "<script>alert" not in text and text.count("</script>") == 3
    stored = json.loads(text.split('id="stored">')[1].split("</script>")[0])
    assert stored["runs"][0]["overview"]["state"] == "completed"
    assert stored["logs"][0]["server-0"].startswith("<script>alert")


def test_a_page_that_is_restarted_has_the_same_address_and_another_job_s_port_is_not_taken(tmp_path: Path) -> None:
    run = write_simulated_run(tmp_path / "run", Scene(steps=300))
    token = view_token("a token")
    with served_page(WebConfig(), run, "a token") as first:
        assert first is not None and first.endswith(token)
        assert page_line(run, "a token") == first
    with served_page(WebConfig(), run, "a token") as second:
        assert second == first
        assert request(PageAddress(second).place, "/state", headers=PageAddress(second).bearer).status == 200
    assert not [path for path in run.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
    assert kept_address(run) is not None
    with socket.create_server(PageAddress(first).place), served_page(WebConfig(), run, "a token") as third:
        assert third is not None and third != first
    with served_page(WebConfig(page="off"), run, "a token") as none:
        assert none is None and page_line(run, "a token") is None


def test_a_page_that_nobody_opens_loads_nothing(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from shardkeep.page.of_job import serve_page\n"
        "from shardkeep.config.web import WebConfig; from shardkeep.web.server import WebServer\n"
        "web = WebServer()\n"
        "assert serve_page(web, WebConfig(), Path(sys.argv[1]), 'token')\n"
        "print(sorted({'starlette', 'uvicorn', 'rich', 'yaml'} & set(sys.modules)))\n"
        "web.close()\n"
    )

    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "starlette" not in done.stdout and "uvicorn" not in done.stdout


def test_with_certificates_a_page_that_other_machines_reach_is_https(tmp_path: Path) -> None:
    run = write_simulated_run(tmp_path / "run", Scene(state="begun"))
    (certificates,) = make_certs(tmp_path / "certs", ["localhost,127.0.0.1"], days=1)
    with served_page(WebConfig(page="0.0.0.0:0"), run, "a token", tls=certificates) as url:
        assert url is not None and url.startswith("https://")
        address, port = PageAddress(url), urlsplit(url).port
        trusting = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
        for path, headers, status in (("/state", address.bearer, 200), (f"/?token={address.token}", {}, 303)):
            with contextlib.closing(http.client.HTTPSConnection("localhost", port, timeout=90, context=trusting)) as to:
                to.request("GET", path, headers=headers)
                reply = to.getresponse()
                assert reply.status == status
        assert "secure" in (reply.getheader("set-cookie") or "").lower()
    with served_page(WebConfig(page="127.0.0.1:0"), run, "a token", tls=certificates) as url:
        assert url is not None and url.startswith("http://")


# ---- what is printed of a page ----


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


@pytest.mark.waits_for_processes
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


@pytest.mark.waits_for_processes
@every("start", [train, around])
def test_a_terminal_shows_the_whole_address(cluster: Cluster, tmp_path: Path, start: Callable[..., Command]) -> None:
    run = tmp_path / "run"
    command = start(cluster, run, main=terminal.MAIN)
    wait_for(command, "?token=")
    assert page_line(run) in command.printed()
    command.kill()

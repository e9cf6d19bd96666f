"""Whole jobs against strangers: garbage on every port, no token, a wrong one, no certificate; and no secret leaks.

What a stranger can try without real roles: tests/ps/control/test_auth.py, test_tls.py; tests/ps/rpc/test_strangers.py,
test_transport.py (foreign functions); the test_fuzz.py of both planes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import sys
from pathlib import Path

import pytest

from shardkeep.base.files import atomic_write
from shardkeep.base.net.addresses import split_address
from shardkeep.base.net.interfaces import named_host
from shardkeep.trust.certificates import LOCAL, make_certs
from shardkeep.trust.endpoint import make_token, read_token
from tests.support.cases import every
from tests.support.cluster import Cluster, gone, listening_ports, records, within
from tests.support.configs import ENDLESS, TINY
from tests.support.strangers import GARBAGE

pytestmark = pytest.mark.waits_for_processes


@pytest.mark.chaos  # test_supervised_jobs.py has the coordinator's ports, tests/ps/rpc/test_strangers.py the members'
@pytest.mark.skipif(sys.platform != "linux", reason="without socket filters garbage kills torch RPC")
def test_a_job_outlives_garbage_on_every_port_and_shows_its_token_to_nobody(cluster: Cluster) -> None:
    job, folder = cluster.job(ENDLESS)
    members = cluster.training(folder)
    token = read_token(folder.token_path)
    assert stat.S_IMODE(folder.token_path.stat().st_mode) == 0o600
    for process in [*members.values(), job.process]:
        assert token not in " ".join(process.cmdline())
        assert token not in " ".join(process.environ().values())

    with contextlib.ExitStack() as held:
        ports = {(name, port) for name, process in members.items() for port in listening_ports(process)}
        assert len(ports) == 3 + 1 + 2 + 2  # gRPC, the store and the page; torch RPC; gloo beside it
        for name, port in ports:
            if not name.startswith("coordinator"):  # the data plane takes no newcomers, torch RPC's and gloo's alike
                with pytest.raises(TimeoutError):
                    socket.create_connection(("127.0.0.1", port), timeout=0.3)
        for garbage in GARBAGE.values():
            for _, port in ports:
                with contextlib.suppress(OSError):  # refused, or hung up on
                    connection = socket.create_connection(("127.0.0.1", port), timeout=0.3)
                    held.enter_context(connection)
                    connection.sendall(garbage)
        last_step = lambda: max(record["step"] for record in records(folder) if record["kind"] == "progress")  # noqa: E731
        reached = last_step()
        within(90, lambda: last_step() > reached + 20, "no step after the garbage", lambda: job.running)
        assert all(process.is_running() for process in members.values())

    job.signal(signal.SIGINT)
    ended = job.end(limit_s=90)
    assert ended.err.startswith("stopped at step ") and ended.err.count("\n") == 1
    assert not gone(members.values(), limit_s=0)
    assert token not in job.printed()
    assert not [path for path in folder.path.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
    assert not folder.token_path.exists()


def test_roles_by_hand_with_tls_and_a_token_file_train_and_turn_strangers_away(
    cluster: Cluster, tmp_path: Path
) -> None:
    """They log objects, and the coordinator prints its address as one."""
    (here,) = make_certs(tmp_path / "tls", [LOCAL], days=2)
    token = tmp_path / "secret"
    atomic_write(token, make_token(), private=True)
    trust, objects = ("--token-file", str(token), "--tls", str(here)), ("--log-format", "json")
    config = {**TINY, "servers": 1, "workers": 1, "train": {**TINY["train"], "epochs": 3}}
    coordinator, address, folder = cluster.coordinator(config, trust=(*trust, *objects))
    wrong, open_to_all = tmp_path / "wrong", tmp_path / "open"
    atomic_write(wrong, make_token(), private=True)
    atomic_write(open_to_all, token.read_text())

    where = ("--coordinator", address)
    refused = {
        "the job's token is needed; give --token-file FILE": (*where, "--tls", str(here)),
        "lets nobody in without the job's token: wrong token": (*where, "--token-file", str(wrong), "--tls", str(here)),
        "others can read or change it (mode 0644); chmod 600": (*where, "--token-file", str(open_to_all)),
        "it hangs up at once; does it want --tls?": (*where, "--token-file", str(token)),
    }
    asked = [(text, cluster.command("status", *arguments)) for text, arguments in refused.items()]
    stranger = cluster.command("server", "--index", "0", *where, "--token-file", str(wrong), "--tls", str(here))
    for text, command in asked:
        answer = command.end()
        assert text in answer.err and answer.err.count("\n") == 1 and not answer.out
        assert answer.code == (1 if "hangs up" in text else 2)
    turned_away = stranger.end()
    assert turned_away.code == 2 and turned_away.err.startswith("error: ") and "wrong token" in turned_away.err
    assert cluster.command("status", *where, *trust).end().code == 0
    assert cluster.command("status", str(folder.path), "--tls", str(here)).end().code == 0

    run = ("--coordinator", str(folder.path), "--tls", str(here))  # the same user's token for that folder
    run = (*run, "--run-dir", str(tmp_path), *objects)
    members = [cluster.command(role, "--index", "0", *run) for role in ("server", "worker")]
    ended = [command.end() for command in (*members, coordinator)]
    assert [each.code for each in ended] == [0, 0, 0]
    logged = [[json.loads(line) for line in each.err.splitlines()] for each in ended]
    assert all(lines and all({"time", "event", "role"} <= line.keys() for line in lines) for lines in logged)
    assert json.loads(ended[-1].out)["run_dir"] == str(folder.path)
    assert (folder.summary() or {})["status"] == "completed"
    secrets = (token.read_text(), (here / "key.pem").read_text().splitlines()[1])
    printed = "".join(command.printed() for command in [*members, coordinator, stranger])
    assert not [secret for secret in secrets if secret in printed]


PLACE = ("--coordinator", "10.9.0.1:7070", "--index", "0", "--advertise", "10.9.0.2")


@every(
    "arguments",
    [("coordinator", "CONFIG", "--listen", "0.0.0.0:0"), *((role, *PLACE) for role in ("server", "worker"))],
)
def test_an_address_that_others_reach_needs_a_flag_whatever_else_is_given(
    cluster: Cluster, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    words = [str(cluster.write(TINY)) if word == "CONFIG" else word for word in arguments]
    ended = cluster.command(*words, cwd=tmp_path).end()
    assert ended.code == 2 and not ended.out
    assert ended.err.count("\n") == 1
    assert "can run code as this user, token or not" in ended.err and "--insecure-data-plane" in ended.err
    assert not (tmp_path / "runs").exists()


def test_a_coordinator_listens_wider_with_the_flag_and_its_token_lies_ready(cluster: Cluster) -> None:
    wider = ("--listen", "0.0.0.0:0", "--insecure-data-plane")
    coordinator, address, folder = cluster.coordinator(TINY, trust=wider)
    assert split_address(address)[0] == named_host("0.0.0.0")
    assert folder.token_path.stat().st_uid == os.geteuid()
    assert len(read_token(folder.token_path)) == 64
    coordinator.signal(signal.SIGTERM)
    assert coordinator.end().code == 1
    assert not folder.token_path.exists()

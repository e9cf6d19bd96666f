"""Whole jobs against strangers: no token, a wrong one, no certificate; and no secret leaks.

What a stranger can try without real roles: tests/ps/control/test_auth.py, test_tls.py; tests/ps/rpc/test_strangers.py,
test_transport.py (foreign functions); the test_fuzz.py of both planes.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from shardkeep.base.files import atomic_write
from shardkeep.base.net.addresses import split_address
from shardkeep.base.net.interfaces import named_host
from shardkeep.trust.certificates import LOCAL, make_certs
from shardkeep.trust.endpoint import make_token, read_token
from tests.support.cases import every
from tests.support.cluster import Cluster
from tests.support.configs import TINY

pytestmark = pytest.mark.waits_for_processes


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

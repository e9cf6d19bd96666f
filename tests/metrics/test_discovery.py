"""The targets of a job for Prometheus, and the view token's file."""

from __future__ import annotations

import json
from pathlib import Path

from shardkeep.metrics.discovery import targets
from shardkeep.metrics.serving import member_listen
from shardkeep.run.folder import RunFolder
from shardkeep.trust.tokens import keep_token
from shardkeep.trust.view import put_view_token, shows_token, view_token
from tests.support.cases import every


def test_each_process_is_a_target_once_with_its_scheme() -> None:
    body, content = targets(
        ["http://127.0.0.1:1/metrics", "https://[::1]:2/metrics", "http://127.0.0.1:1/metrics"], job="demo", run="first"
    )
    groups = json.loads(body)
    assert [group["targets"] for group in groups] == [["127.0.0.1:1"], ["[::1]:2"]]
    assert [group["labels"]["__scheme__"] for group in groups] == ["http", "https"]
    assert {group["labels"]["run"] for group in groups} == {"first"}
    assert content == "application/json"


@every(
    ("coordinator", "own_host", "expected"),
    [
        ("127.0.0.1:9100", "10.9.0.2", "127.0.0.1:0"),
        ("localhost:9100", "127.0.0.1", "127.0.0.1:0"),
        ("10.9.0.1:9100", "10.9.0.2", "10.9.0.2:0"),
        ("10.9.0.1:9100", "127.0.0.1", "10.9.0.1:0"),
        ("0.0.0.0:9100", "10.9.0.2", "10.9.0.2:0"),
        ("[fd00::1]:9100", "fd00::2", "[fd00::2]:0"),
    ],
)
def test_a_member_listens_where_the_coordinator_s_scraper_reaches_it(
    coordinator: str, own_host: str, expected: str
) -> None:
    assert member_listen(coordinator, own_host) == expected


def test_the_view_token_is_another_one_in_a_private_file_and_goes_with_the_job_s(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    token = keep_token(folder.path)
    path, view = put_view_token(folder.path, token), view_token(token)
    assert path.read_text() == view != token and tmp_path not in path.parents
    assert path.stat().st_mode & 0o777 == 0o600
    folder.forget_token()
    assert not path.exists()
    assert shows_token(f"Bearer {view}".encode(), view)
    for header, wanted in ((f"Bearer {view}".encode(), token), (f"Bearer {token}".encode(), view), (None, view)):
        assert not shows_token(header, wanted)
    assert view_token("a" * 64) != view_token("a" * 63 + "b")

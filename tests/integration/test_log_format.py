"""`--log-format json`: every line of every log of a job is one object, also after deaths and errors of libraries.

Of roles by hand: test_trust.py.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from shardkeep.run.folder import RunFolder
from tests.support.cluster import Cluster, kinds, within
from tests.support.configs import ENDLESS, TINY

pytestmark = pytest.mark.waits_for_processes
FORMAT = ("--log-format", "json")
KEYS = {"time", "level", "role", "index", "step", "event", "fields", "exception"}


def parsed(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    assert all(each.keys() == KEYS for each in found), text
    return found


def logs(folder: RunFolder) -> dict[str, list[dict[str, Any]]]:
    """The objects of each log, by `ROLE-INDEX`; each names its role and index."""
    found = {path.stem: parsed(path.read_text()) for path in folder.logs.glob("*.log")}
    for name, objects in found.items():
        assert {f"{each['role']}-{each['index']}" for each in objects} == {name}
    return found


def test_a_job_in_one_process_prints_objects_until_ctrl_c_ends_it(cluster: Cluster) -> None:
    job, folder = cluster.job({**ENDLESS, "servers": 0, "workers": 1}, *FORMAT)
    within(100, lambda: "progress" in kinds(folder), "no step", lambda: job.running)
    job.signal(signal.SIGINT)
    ended = job.end()
    assert ended.code == 1
    out, err = parsed(ended.out), parsed(ended.err)
    assert {each["role"] for each in (*out, *err)} == {"launcher"}
    progress = [each for each in out if each["event"] == "progress"]
    assert progress and progress[-1]["step"] > 0 and progress[-1]["fields"]["loss"] > 0
    assert [each["event"].split(" at ")[0] for each in err][-1] == "stopped"


def test_the_error_of_a_role_by_hand_is_an_object(cluster: Cluster) -> None:
    role = cluster.command("server", "--coordinator", "nowhere", "--index", "3", *FORMAT).end()
    (found,) = parsed(role.err)
    assert (role.code, found["level"], found["role"], found["index"]) == (2, "error", "server", 3)
    assert found["event"].startswith("--coordinator nowhere: is neither HOST:PORT nor a folder")


def test_lines_that_libraries_write_past_python_are_objects_and_the_last_one_is_the_jobs_error(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(
        "import os\nfrom torch import nn\n\nclass Broken(nn.Module):\n"
        "    def __init__(self, *a, **k):\n        super().__init__()\n        print('from Python')\n"
        "        os.write(2, b'[E1125 socket.cpp:7] no route\\n{\"not\": ours}\\nerror: no device')\n"
        "        os._exit(3)\n"
    )
    config = {**TINY, "servers": 1, "workers": 1, "model": {"name": "broken:Broken"}, "recovery": {"restarts": 0}}
    job, folder = cluster.job(config, *FORMAT)
    ended = job.end()
    assert ended.code == 1
    assert "ended: exit code 3: no device, " in parsed(ended.err)[-1]["event"], ended.err
    written = {each["event"]: each["level"] for each in logs(folder)["worker-0"]}
    assert written.items() >= {
        ("from Python", "info"),
        ("[E1125 socket.cpp:7] no route", "info"),
        ('{"not": ours}', "info"),
        ("no device", "error"),
    }

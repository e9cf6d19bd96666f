"""What the variables of launchers say: each of the table, and the address that a machine has for the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkeep.base.errors import UserError
from shardkeep.base.net import interfaces
from shardkeep.launch import machine
from shardkeep.launch.machine import MACHINES, Machine, index_of, machine_of, restarts_left, world_size
from tests.support.cases import every

LAUNCHERS = {
    "kubeflow trainer": ({"PET_NODE_RANK": "1", "PET_NNODES": "3", "PET_MASTER_ADDR": "head"}, (1, 3, "head")),
    "torchrun": ({"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3", "MASTER_ADDR": "head"}, (1, 3, "head")),
    "slurm": (
        {"SLURM_NODEID": "2", "SLURM_NNODES": "4", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"},
        (2, 4, "10.0.0.1"),
    ),
    "skypilot": (
        {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"},
        (1, 2, "10.0.0.1"),
    ),
    "dstack": (
        {"DSTACK_NODE_RANK": "0", "DSTACK_NODES_NUM": "2", "DSTACK_MASTER_NODE_IP": "10.0.0.1"},
        (0, 2, "10.0.0.1"),
    ),
    "kubernetes": ({"JOB_COMPLETION_INDEX": "5"}, (5, 6, "")),
}


@every("name", LAUNCHERS)
def test_a_machine_is_what_its_launcher_says_unless_it_is_given(name: str) -> None:
    environment, (rank, nodes, head) = LAUNCHERS[name]
    given = None if len(environment) > 1 else nodes  # an indexed Job does not say how many there are
    assert machine_of(None, given, environment) == Machine(rank, nodes, head)
    assert machine_of(0, 9, environment) == Machine(0, 9, head)


def test_of_two_launchers_one_says_all_of_it() -> None:
    both = LAUNCHERS["kubernetes"][0] | LAUNCHERS["kubeflow trainer"][0]
    assert machine_of(None, None, both) == Machine(1, 3, "head")


def test_each_variable_of_the_table_is_in_a_test_and_no_other_file_names_one() -> None:
    tried = {variable for environment, _ in LAUNCHERS.values() for variable in environment}
    assert tried == {name for names in MACHINES for name in names if name}
    prefixes = ("PET_", "SLURM_", "SKYPILOT_", "DSTACK_", "TORCHELASTIC_", "GROUP_RANK", "JOB_COMPLETION")
    own = Path(machine.__file__)
    files = [path for path in own.parents[1].rglob("*.py") if path != own]
    assert len(files) > 200
    assert not [path for path in files if any(prefix in path.read_text(encoding="utf-8") for prefix in prefixes)]


@every(
    ("environment", "text"),
    [
        ({}, "no rank of this machine: give --rank N, or use a launcher that sets one of PET_NODE_RANK, "),
        ({"JOB_COMPLETION_INDEX": "0"}, "no number of machines: give --nodes N"),
        ({"SLURM_NODEID": "first", "SLURM_NNODES": "2"}, "SLURM_NODEID=first is not a whole number"),
        ({"PET_NODE_RANK": "0", "PET_NNODES": "1:4"}, "PET_NNODES=1:4 is not a whole number"),
        ({"SLURM_NODEID": "2", "SLURM_NNODES": "2"}, "machine 2 of 2 machines; allowed: ranks 0 to 1"),
    ],
)
def test_what_says_no_machine_is_refused_in_one_line(environment: dict[str, str], text: str) -> None:
    with pytest.raises(UserError) as caught:
        machine_of(None, None, environment)
    assert str(caught.value).startswith(text) and "\n" not in str(caught.value)


@every(
    ("environment", "index"),
    [
        ({"RANK": "3", "SLURM_PROCID": "1"}, 3),
        ({"SLURM_PROCID": "1", "JOB_COMPLETION_INDEX": "2"}, 1),
        ({"RANK": "", "JOB_COMPLETION_INDEX": "2"}, 2),
    ],
)
def test_the_index_of_a_process_comes_from_the_launcher(environment: dict[str, str], index: int) -> None:
    assert index_of(None, environment) == index
    assert index_of(7, environment) == 7


@every("value", ["-1", "one", "²"])
def test_a_launcher_s_index_that_is_no_number_is_refused_by_name(value: str) -> None:
    with pytest.raises(UserError, match=f"RANK={value} is not a whole number"):
        index_of(None, {"RANK": value})


def test_a_launcher_says_how_many_processes_there_are_and_whether_it_starts_them_again() -> None:
    assert (world_size({"WORLD_SIZE": "4"}), world_size({}), world_size({"WORLD_SIZE": "all"})) == (4, None, None)
    count, most = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"
    assert restarts_left({count: "1", most: "2"})
    assert not restarts_left({count: "2", most: "2"}) and not restarts_left({})


@every(
    ("nodes", "head", "route", "address"),
    [
        (2, "10.0.0.1", "10.0.0.2", "10.0.0.2"),
        (2, "10.0.0.1", None, "10.0.0.3"),  # no route: no default route, or a name that is not known yet
        (2, "head", "127.0.1.1", "10.0.0.3"),  # the head itself, whose name is loopback there
        (2, "", "10.0.0.2", "10.0.0.3"),
        (1, "10.0.0.1", "10.0.0.2", "127.0.0.1"),  # the only machine needs no network
    ],
)
def test_a_machine_s_address_is_that_of_the_route_to_the_head_or_else_of_its_name(
    monkeypatch: pytest.MonkeyPatch, nodes: int, head: str, route: str | None, address: str
) -> None:
    monkeypatch.setattr(interfaces, "route_to", lambda *_: route)
    monkeypatch.setattr(interfaces, "named_host", lambda _: "10.0.0.3")
    assert Machine(0, nodes, head).own_address()[0] == address

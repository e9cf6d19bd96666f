"""Names of the coordinator and of members: looked up before they are announced, and again when nobody answers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from shardkeep.base.errors import DeadlineExceeded, TransportError
from shardkeep.base.net import interfaces
from shardkeep.base.net.addresses import join_address, split_address
from shardkeep.base.net.interfaces import ROUTE
from shardkeep.ps.control.coordinator import Coordinator
from shardkeep.ps.control.grpc.client import ControlClient, fetch_status
from shardkeep.ps.control.grpc.server import ControlServer, StoreHost
from shardkeep.ps.control.job import JobDeadlines, JobSpec
from shardkeep.ps.rpc.group import connect_store
from shardkeep.trust.endpoint import Endpoint
from tests.support.cases import every
from tests.support.control_job import ListSink
from tests.support.names import know_names
from tests.support.ports import reserved_port

LIMIT_S = 20.0
SOON_S = 10.0  # a tenth of what gRPC may wait between two looks of its own, and of what members wait for one
TOKEN = "t" * 32
Serve = Callable[[str], ControlServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a coordinator of one job at an address."""
    spec = JobSpec("name: job\n", 0, 2, JobDeadlines(lease_s=LIMIT_S, form_s=60.0))
    coordinator = Coordinator(spec, open_store=lambda _: ("127.0.0.1", 4000), sink=ListSink())
    with ExitStack() as stack:
        yield lambda listen: stack.enter_context(ControlServer(coordinator, listen, token=TOKEN))


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


@every(("by", "index"), [("name", 0), ("run folder", 1)])
def test_a_coordinator_that_returns_at_another_address_of_its_name_or_run_folder_is_found_soon(
    by: str, index: int, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, places = {"coord": ["127.0.0.1"]}, {"now": ""}
    know_names(monkeypatch, names)
    first = serve("127.0.0.1:0")
    port = split_address(first.address)[1]
    endpoint = (
        Endpoint(f"coord:{port}", TOKEN) if by == "name" else Endpoint(first.address, TOKEN, look=lambda: places["now"])
    )
    with ControlClient(endpoint, role="worker", index=index, timeout_s=SOON_S) as client:
        client.register()
        client.start_heartbeats(patience_s=LIMIT_S)
        first.stop()
        names["coord"] = ["127.0.0.2"]
        places["now"] = serve(f"127.0.0.2:{port if by == 'name' else 0}").address
        client.report("event", {"text": "I am here"})
        client.flush()
        assert not client.failed.is_set()
        assert by == "name" or client.address == places["now"]


def test_a_name_that_comes_late_is_waited_for_and_said_once(
    serve: Serve, port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "shardkeep")
    names: dict[str, list[str]] = {"coord": []}
    know_names(monkeypatch, names)
    serve(f"127.0.0.1:{port}")
    with ControlClient(Endpoint(f"coord:{port}", TOKEN), role="worker", index=0) as client:
        with pytest.raises(
            DeadlineExceeded, match=rf"no coordinator answered at coord:{port} within .* s; the name coord"
        ):
            client.register(wait_s=1.5)
        assert [record.message for record in caplog.records] == ["waiting for the coordinator"]
        names["coord"] = ["127.0.0.1"]
        assert client.register(wait_s=SOON_S) == "name: job\n"


def test_a_name_of_nobody_is_told_at_once_and_who_answers_nobody_with_the_addresses_that_were_tried(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    know_names(monkeypatch, {"coord": []})
    why = (
        r"the coordinator at coord:7071 cannot be reached: the name coord has no address \(Name or service not known\)"
    )
    with pytest.raises(TransportError, match=f"^{why}$"):
        fetch_status(Endpoint("coord:7071", TOKEN))

    know_names(monkeypatch, {"debian": ["127.0.1.1", "::1"]})
    told = rf"answered at debian:{port} \(127\.0\.1\.1\) \(::1\) within"
    with (
        ControlClient(Endpoint(f"debian:{port}", TOKEN), role="worker", index=0) as client,
        pytest.raises(DeadlineExceeded, match=told),
    ):
        client.register(wait_s=0.3)


@every("listens", ["127.0.0.1", "::1", "127.0.0.2", "localhost"])
def test_every_address_of_a_name_is_tried_and_a_store_tells_the_address_at_which_it_listens(
    listens: str, serve: Serve, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    know_names(monkeypatch, {"coord": ["::1", "127.0.0.1", "127.0.0.2"]})
    server = serve(join_address(listens, port))
    assert fetch_status(Endpoint(f"coord:{port}", TOKEN)).state == "forming"
    server.stop()
    with closing(StoreHost(bind=listens)) as host:
        address, store_port = host.open(1)
        assert address == ("127.0.0.1" if listens == "localhost" else listens)
        store = connect_store(address, store_port, timeout_s=LIMIT_S)
        store.set("key", "value")
        assert store.get("key") == b"value"


@pytest.mark.parametrize(
    ("advertise", "announced"), [("debian", "127.0.1.1"), (ROUTE, "127.0.0.3"), ("localhost", "127.0.0.1")]
)
def test_a_member_announces_an_address_and_no_name(
    advertise: str, announced: str, serve: Serve, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    know_names(monkeypatch, {"coord": ["127.0.0.1"], "debian": ["127.0.1.1"]})
    monkeypatch.setattr(interfaces, "route_to", lambda *to: {"127.0.0.1": "127.0.0.3"}[to[0]])
    serve(f"127.0.0.1:{port}")
    endpoint = Endpoint(f"coord:{port}", TOKEN)
    with ControlClient(endpoint, role="worker", index=0, advertise=advertise) as client:
        client.register()
        assert client.member.host == announced
        assert [member.host for member in fetch_status(endpoint).members] == [announced]


def test_a_coordinator_that_listens_everywhere_announces_the_machine_s_name(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    know_names(monkeypatch, {"node1": ["10.77.0.1"]})
    assert split_address(serve("0.0.0.0:0").address)[0] == "node1"

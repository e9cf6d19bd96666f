"""Mutual TLS of the control plane: both sides show a certificate of one authority, or nothing is said."""

from __future__ import annotations

import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from shardkeep.base.errors import ConfigError, DeadlineExceeded, ShardkeepError, TransportError, UserError
from shardkeep.ps.control.grpc.client import ControlClient, fetch_status
from shardkeep.ps.control.grpc.server import ControlServer
from shardkeep.trust.certificates import LOCAL, make_certs
from shardkeep.trust.endpoint import Endpoint
from shardkeep.trust.tls import Tls, read_tls
from tests.support.cases import every
from tests.support.control_job import Job


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`ours` with hosts localhost and elsewhere, `theirs` with localhost."""
    folder = tmp_path_factory.mktemp("certs")
    make_certs(folder / "ours", [LOCAL, "elsewhere.example"], days=2)
    make_certs(folder / "theirs", [LOCAL], days=2)
    return folder


def tls(certs: Path, name: str) -> Tls | None:
    ours = read_tls(certs / "ours" / "localhost")
    theirs = read_tls(certs / "theirs" / "localhost")
    return {
        "ours": ours,
        "another host of ours": read_tls(certs / "ours" / "elsewhere.example"),
        "theirs": theirs,
        "theirs, who trust us": Tls(ours.ca, theirs.certificate, theirs.key),
        "none": None,
    }[name]


@every("member", ["ours", "another host of ours"])
def test_members_with_a_certificate_of_the_same_authority_are_let_in(certs: Path, member: str) -> None:
    with ControlServer(Job().coordinator, tls=tls(certs, "ours")) as server:
        here = Endpoint(server.address, server.endpoint.token, tls(certs, member))
        with ControlClient(here, role="worker", index=0, versions={"shardkeep": "1.0", "torch": "2.13.0"}) as client:
            assert client.register() == "name: job\n"
        assert fetch_status(here).members[0].index == 0
        with pytest.raises(UserError, match="wrong token"):  # a certificate does not replace it
            fetch_status(Endpoint(server.address, "t" * 64, here.tls))


@every(
    ("coordinator", "member", "kind", "text"),
    [
        ("ours", "theirs", UserError, r"is not trusted to be the coordinator \(CERTIFICATE_VERIFY_FAILED\)"),
        ("another host of ours", "ours", UserError, r"is not trusted to be the coordinator \(Hostname Verification\)"),
        ("none", "ours", UserError, r"is not trusted to be the coordinator \(WRONG_VERSION_NUMBER\): .* --tls"),
        ("ours", "none", TransportError, "hangs up at once; does it want --tls?"),
        ("ours", "theirs, who trust us", TransportError, "hangs up at once; does it want --tls?"),
    ],
    ids=["wrong authority", "wrong host", "coordinator without TLS", "member without TLS", "certificate of a stranger"],
)
def test_whoever_is_not_of_the_authority_gets_nowhere_though_it_has_the_token(
    certs: Path, coordinator: str, member: str, kind: type[ShardkeepError], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with ControlServer(Job().coordinator, tls=tls(certs, coordinator)) as server:
        stranger = Endpoint(server.address, server.endpoint.token, tls(certs, member))
        with pytest.raises(kind, match=text) as refused:
            fetch_status(stranger)
        assert "\n" not in str(refused.value)
        with ControlClient(stranger, role="worker", index=0, timeout_s=0.5) as client, pytest.raises(kind):
            client.register()
        assert server.coordinator.status().members == ()
    assert capfd.readouterr() == ("", "")  # gRPC keeps its own account to itself


@contextmanager
def answering_late(address: str, delay_s: float) -> Iterator[str]:
    """An address that leads to `address`, over a network that holds each packet for `delay_s` seconds."""
    host, port = address.rsplit(":", 1)
    ends: list[socket.socket] = []

    def carry(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(delay_s)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near = listener.accept()[0]
                far = socket.create_connection((host, int(port)))
                ends.extend((near, far))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=carry, args=pair, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for end in ends:
                end.close()


def test_a_slow_network_gets_its_time_and_a_member_that_is_hung_up_on_is_told_of_tls(certs: Path) -> None:
    with (
        ControlServer(Job().coordinator, tls=tls(certs, "ours")) as server,
        answering_late(server.address, delay_s=0.2) as address,
    ):
        assert fetch_status(Endpoint(address, server.endpoint.token, tls(certs, "ours"))).members == ()

    with ControlServer(Job().coordinator, tls=tls(certs, "ours")) as server:
        plain = Endpoint(server.address, server.endpoint.token)
        with (
            ControlClient(plain, role="worker", index=0, timeout_s=0.3) as client,
            pytest.raises(DeadlineExceeded, match="check the address and that it runs, and whether it wants --tls"),
        ):
            client.register()


# ---- the files ----


def test_keys_are_private_and_that_of_the_authority_lies_apart(certs: Path) -> None:
    modes = {str(p.relative_to(certs)): stat.S_IMODE(p.stat().st_mode) for p in certs.rglob("*.pem")}
    assert {name for name in modes if name.endswith("key.pem") and modes[name] != 0o600} == set()
    assert {p.name for p in (certs / "ours").iterdir()} == {"ca", "localhost", "elsewhere.example"}
    assert {p.name for p in (certs / "ours" / "localhost").iterdir()} == {"ca.pem", "cert.pem", "key.pem"}
    assert (certs / "ours/ca/key.pem").read_bytes() != (certs / "ours/localhost/key.pem").read_bytes()


def test_a_host_that_is_added_later_is_of_the_same_authority_and_no_folder_is_replaced(tmp_path: Path) -> None:
    make_certs(tmp_path, [LOCAL], days=2)
    (added,) = make_certs(tmp_path, ["late.example,127.0.0.1"], days=500)
    with ControlServer(Job().coordinator, tls=read_tls(added)) as server:
        here = Endpoint(server.address, server.endpoint.token, read_tls(tmp_path / "localhost"))
        assert fetch_status(here).state == "forming"
    with pytest.raises(UserError, match=r"late\.example: exists already"):
        make_certs(tmp_path, ["late.example"], days=2)


@every(
    ("hosts", "text"),
    [
        *(([host], "--host") for host in ("", "a/b", "../up", "ca", ".", "two words", "a,", "-x")),
        (["10.9.0.1", "10.9.0.1,alias.example"], r"10\.9\.0\.1 is given twice"),
    ],
)
def test_a_host_that_is_no_name_or_given_twice_is_refused(tmp_path: Path, hosts: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_certs(tmp_path / "new", hosts, days=2)
    assert not (tmp_path / "new").exists()


@every(
    ("name", "damage", "text"),
    [
        ("cert.pem", Path.unlink, r"cert\.pem: cannot be read \(No such file"),
        ("key.pem", lambda path: path.chmod(0o644), r"key\.pem: others can read or change it \(mode 0644\)"),
        (
            "key.pem",
            lambda path: path.write_text("no PEM"),
            "cert.pem and key.pem are no certificate and its plain key",
        ),
        ("cert.pem", lambda path: path.write_text("no PEM"), "cert.pem and key.pem are no"),
        ("ca.pem", lambda path: path.write_text("no PEM"), "holds no certificate"),
        ("another key", lambda path: None, "cert.pem and key.pem are no"),
    ],
)
def test_a_folder_whose_files_are_not_what_they_should_be_is_refused_when_it_is_read(
    tmp_path: Path, certs: Path, name: str, damage: Callable[[Path], object], text: str
) -> None:
    folder = shutil.copytree(certs / "theirs" / "localhost", tmp_path / "localhost")
    if name == "another key":
        shutil.copy(certs / "ours/localhost/key.pem", folder / "key.pem")
    damage(folder / name)
    with pytest.raises(ConfigError, match=text) as refused:
        read_tls(folder)
    assert str(folder) in str(refused.value)

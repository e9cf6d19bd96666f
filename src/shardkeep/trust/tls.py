"""Mutual TLS of the control plane: three files in a folder, checked when they are read. No gRPC, no sockets.

ca.pem     certificates of the authority that both sides trust
cert.pem   this side's certificate, signed by it, with the names and addresses under which others reach it
key.pem    its private key, readable by its owner alone
"""

from __future__ import annotations

import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from shardkeep.base.errors import ConfigError
from shardkeep.base.files import read_private


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM bytes."""

    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)

    def server_context(self, *, of_peers: bool = True) -> ssl.SSLContext:
        """For a listener of HTTPS. `of_peers`: it takes only peers whose certificate the same authority signed."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.TemporaryDirectory() as folder:  # for this user alone; the module ssl reads files only
            both = Path(folder) / "both.pem"
            both.write_bytes(self.certificate + b"\n" + self.key)
            context.load_cert_chain(both)
        if of_peers:
            context.load_verify_locations(cadata=self.ca.decode("ascii", errors="replace"))
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def read_tls(folder: Path) -> Tls:
    """The three files of a folder.

    Raises ConfigError: one is missing or is not what its name says, the key is not the certificate's, is encrypted, or
    others can read it."""
    ca, certificate, key = (folder / name for name in ("ca.pem", "cert.pem", "key.pem"))
    tls = Tls(_read(ca), _read(certificate), read_private(key))
    trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        trusted.load_verify_locations(cafile=ca)
    except ssl.SSLError as error:
        raise ConfigError(f"{ca}: holds no certificate") from error
    try:
        trusted.load_cert_chain(certificate, key, password=lambda: b"")  # without a password it would ask a terminal
    except ssl.SSLError as error:
        what = error.reason or "not PEM"
        raise ConfigError(f"{folder}: cert.pem and key.pem are no certificate and its plain key ({what})") from error
    return tls


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error

"""`shardkeep certs`: a certificate authority of one's own, and for each host a folder for `--tls`.

DIR/HOST/ca.pem, cert.pem, key.pem   what that host needs, and nothing else
DIR/ca/ca.pem, key.pem               the authority; its key signs more hosts and need not leave this machine
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardkeep.base.errors import ConfigError, MissingPackage, UserError
from shardkeep.base.files import atomic_write, read_private
from shardkeep.base.plugging.packages import missing

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

LOCAL = "localhost,127.0.0.1,::1"
_CLOCKS = datetime.timedelta(hours=1)
"""How far the clocks of two machines may be apart."""


def make_certs(folder: Path, hosts: Sequence[str], *, days: int) -> list[Path]:
    """Writes a folder for each host, and the authority where there is none yet; returns the folders.

    Args:
        folder: Of the authority and the hosts' folders.
        hosts: Each NAME or NAME,NAME...: the names and addresses of one host; the first one names its folder.
        days: How long what is made now is valid.

    Raises:
        UserError: A host's folder exists already, or a name is none.
        OSError: The folder cannot be written.
        MissingPackage: `cryptography` is not installed.
    """
    if (need := missing("cryptography")) is not None:
        raise MissingPackage(f"shardkeep certs {need}")
    names = [_names(host) for host in hosts]
    firsts = [found[0] for found in names]
    if twice := sorted({first for first in firsts if firsts.count(first) > 1}):
        raise ConfigError(f"--host {twice[0]} is given twice; give each host once: --host NAME,NAME")
    folders = [folder / first for first in firsts]
    if taken := [path for path in folders if path.exists()]:
        raise UserError(f"{taken[0]}: exists already; delete it or choose another folder")
    authority = _Authority(folder / "ca", days)
    for found, path in zip(names, folders, strict=True):
        authority.issue(path, found)
    return folders


class _Authority:
    """A CA in a folder: the one that is there, or a new one."""

    def __init__(self, folder: Path, days: int) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        self._days = days
        certificate, key = folder / "ca.pem", folder / "key.pem"
        if certificate.exists():
            try:
                self._certificate = x509.load_pem_x509_certificate(certificate.read_bytes())
                loaded = load_pem_private_key(read_private(key), password=None)
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{folder}: ca.pem and key.pem are no certificate and its plain key") from error
            if not isinstance(loaded, ec.EllipticCurvePrivateKey):
                raise ConfigError(f"{key}: allowed: a key that shardkeep certs has made")
            if self._certificate.not_valid_after_utc <= datetime.datetime.now(datetime.UTC):
                raise ConfigError(f"{certificate}: this authority's time is over; make a new one in another folder")
            self._key = loaded
        else:
            self._key = ec.generate_private_key(ec.SECP256R1())
            self._certificate = self._sign(self._key, "shardkeep", authority=True)
            _private_folder(folder)
            atomic_write(key, _pem_of(self._key), private=True)
            atomic_write(certificate, _pem(self._certificate))

    def issue(self, folder: Path, names: Sequence[str]) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(key, names[0], names=names)
        _private_folder(folder)
        atomic_write(folder / "key.pem", _pem_of(key), private=True)
        atomic_write(folder / "cert.pem", _pem(certificate))
        atomic_write(folder / "ca.pem", _pem(self._certificate))

    def _sign(
        self, key: EllipticCurvePrivateKey, subject: str, *, names: Sequence[str] = (), authority: bool = False
    ) -> x509.Certificate:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        now, public = datetime.datetime.now(datetime.UTC), key.public_key()
        end = now + datetime.timedelta(days=self._days)
        if not authority:
            end = min(end, self._certificate.not_valid_after_utc)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject[:64])])
        issuer = name if authority else self._certificate.subject
        signers = self._key.public_key()
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCKS)
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
            .add_extension(_key_usage(authority), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signers), critical=False)
        )
        if not authority:
            both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
            builder = builder.add_extension(x509.SubjectAlternativeName(map(_general, names)), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _key_usage(authority: bool) -> x509.KeyUsage:
    """Returns the usage of an authority's key (signs certificates) or of a host's key (signs handshakes)."""
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _names(host: str) -> list[str]:
    """The names of one host. Raises ConfigError where one is no name, or names a folder that is not a host's."""
    names = [name.strip() for name in host.split(",")]
    for name in names:
        plain = name.isascii() and not name.startswith(("-", ".")) and set(name).isdisjoint("/\\ \t\n\0")
        if not name or not plain:
            raise ConfigError(f"--host {host}: {name!r} is no name or address; allowed: NAME or NAME,NAME...")
    if names[0] == "ca":
        raise ConfigError(f"--host {host}: the folder ca is the authority's; put another name first")
    return names


def _general(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _private_folder(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o700)


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _pem_of(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

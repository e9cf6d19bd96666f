"""The versions that this process reports at registration. Reads package metadata; imports nothing heavy."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from shardkeep.base.errors import ProtocolError
from shardkeep.ps.control.records import PROTOCOL_VERSION, Hello

MUST_AGREE = ("shardkeep", "torch")
"""torch too: its RPC envelope and its collectives are not promised to be stable between releases."""


def own_versions() -> dict[str, str]:
    """Versions of shardkeep, torch and Python; a package without metadata is "unknown"."""
    return {
        "shardkeep": _version("shardkeep"),
        "torch": _version("torch"),
        "python": platform.python_version(),
    }


def check_versions(hello: Hello, own: Mapping[str, str]) -> None:
    """Raises ProtocolError that names both versions where they must agree and do not."""
    who = hello.member.name
    theirs, ours = (found.get("shardkeep", "unknown") for found in (hello.versions, own))
    if hello.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"{who} speaks control protocol {hello.protocol_version} (shardkeep {theirs}), the coordinator "
            f"speaks {PROTOCOL_VERSION} (shardkeep {ours}); install the same version everywhere"
        )
    for package in MUST_AGREE:
        theirs, ours = hello.versions.get(package, "unknown"), own.get(package, "unknown")
        if theirs != ours:
            raise ProtocolError(
                f"{who} runs {package} {theirs}, the coordinator {ours}; install the same version everywhere"
            )


def _version(package: str) -> str:
    try:
        return version(package).partition("+")[0]  # 2.13.0+cpu and 2.13.0+cu130 speak the same protocol
    except PackageNotFoundError:
        return "unknown"

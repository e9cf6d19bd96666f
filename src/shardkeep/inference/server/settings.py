"""The settings of `shardkeep serve`. Loads no kernels: a wrong one is an error before they are compiled."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardkeep.base.errors import MissingPackage
from shardkeep.base.net.addresses import split_address
from shardkeep.base.plugging.packages import METRICS, missing
from shardkeep.web.access import Access


@dataclass(frozen=True, slots=True)
class Limits:
    """`delay_s`: how long a request may wait for others. `rows`: of a batch; a larger request is one of its own.
    `requests`, `size`: that may wait, and their bytes."""

    delay_s: float = 0.002
    rows: int = 1024
    requests: int = 1024
    size: int = 256 << 20


@dataclass(frozen=True)
class ServerSettings:
    """`listen`: of gRPC; `http`: of HTTP, None = no HTTP. Port 0 = any free one. `most_bytes`: of a message."""

    listen: str = "127.0.0.1:8001"
    http: str | None = "127.0.0.1:8000"
    access: Access = field(default_factory=Access)
    limits: Limits = field(default_factory=Limits)
    most_bytes: int = 16 << 20

    def check(self) -> None:
        """Raises ConfigError for an address that is none, or that anybody could reach; MissingPackage."""
        if self.http is not None and (need := missing(*METRICS)) is not None:
            raise MissingPackage(f"--http {self.http} {need}; or say --http off")
        for option, address in (("--listen", self.listen), ("--http", self.http)):
            if address is not None:
                self.access.check_host(option, split_address(address, lowest_port=0)[0])

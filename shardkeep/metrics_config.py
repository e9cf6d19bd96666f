"""The settings of metrics for Prometheus (shardkeep/metrics)."""

from __future__ import annotations

from pydantic import Field, field_validator

from shardkeep.base.settings import Settings
from shardkeep.ps.control.grpc.addresses import listen_setting

OFF = "off"


class MetricsConfig(Settings):
    """Metrics of every process for Prometheus (docs/guide/monitoring.md). They need the extra `web`."""

    listen: str = Field(OFF, max_length=300)
    """HOST:PORT of the coordinator's endpoint, port 0 = any free one; off = no process has an endpoint. Servers and
    workers take a free port of their own address, or of 127.0.0.1 where HOST is this machine alone."""

    @field_validator("listen", mode="before")
    @classmethod
    def _an_address(cls, given: object) -> object:
        return listen_setting(given, OFF)

    @property
    def on(self) -> bool:
        """Whether processes serve metrics."""
        return self.listen != OFF

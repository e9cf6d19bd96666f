"""The settings of metrics for Prometheus (shardkeep/metrics)."""

from __future__ import annotations

from pydantic import Field, field_validator

from shardkeep.base.errors import ConfigError
from shardkeep.base.settings import Settings
from shardkeep.ps.control.grpc.addresses import split_address

OFF = "off"


class MetricsConfig(Settings):
    """Metrics of every process for Prometheus (docs/guide/monitoring.md). They need the extra `web`."""

    listen: str = Field(OFF, max_length=300)
    """HOST:PORT of the coordinator's endpoint, port 0 = any free one; off = no process has an endpoint. Servers and
    workers take a free port of their own address, or of 127.0.0.1 where HOST is this machine alone."""

    @field_validator("listen", mode="before")
    @classmethod
    def _an_address(cls, given: object) -> object:
        if given is False or given == OFF:  # YAML reads off as false
            return OFF
        if isinstance(given, str):
            try:
                split_address(given, lowest_port=0)
            except ConfigError:
                raise ValueError("allowed: off, or HOST:PORT with a port of 0 to 65535") from None
        return given

    @property
    def on(self) -> bool:
        """Whether processes serve metrics."""
        return self.listen != OFF

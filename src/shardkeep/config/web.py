"""The settings of what a job serves over HTTP: its live page (src/shardkeep/page), metrics (src/shardkeep/metrics)."""

from __future__ import annotations

from pydantic import Field, field_validator

from shardkeep.base.net.addresses import listen_setting
from shardkeep.base.settings import Settings

AUTO, OFF = "auto", "off"


class WebConfig(Settings):
    """Where a job serves its live page (docs/guide/watching.md) and metrics (docs/guide/monitoring.md). They need the
    extra `web`."""

    page: str = Field(AUTO, max_length=300)
    """HOST:PORT of the page, port 0 = any free one; auto = a free port of 127.0.0.1 where the extra `web` is installed;
    off = no page. Nobody sees it without its token."""
    metrics: str = Field(OFF, max_length=300)
    """HOST:PORT of the coordinator's metrics for Prometheus, port 0 = any free one; off = no process has an endpoint.
    Servers and workers take a free port of their own address, or of 127.0.0.1 where HOST is this machine alone."""

    @field_validator("page", mode="before")
    @classmethod
    def _an_address_of_the_page(cls, given: object) -> object:
        return listen_setting(given, AUTO, OFF)

    @field_validator("metrics", mode="before")
    @classmethod
    def _an_address_of_metrics(cls, given: object) -> object:
        return listen_setting(given, OFF)

    @property
    def has_page(self) -> bool:
        """Whether a job serves its page, if it can."""
        return self.page != OFF

    @property
    def needs_page(self) -> bool:
        """Whether a job that cannot serve its page must fail."""
        return self.page not in (AUTO, OFF)

    @property
    def has_metrics(self) -> bool:
        """Whether processes serve metrics."""
        return self.metrics != OFF

"""The settings of the live page (shardkeep/page)."""

from __future__ import annotations

from pydantic import Field, field_validator

from shardkeep.base.errors import ConfigError
from shardkeep.base.settings import Settings
from shardkeep.ps.control.grpc.addresses import split_address

AUTO, OFF = "auto", "off"


class PageConfig(Settings):
    """The live page of a job (docs/guide/watching.md). It needs the extra `web`."""

    listen: str = Field(AUTO, max_length=300)
    """HOST:PORT of the page, port 0 = any free one; auto = a free port of 127.0.0.1 where the extra `web` is installed;
    off = no page. Nobody sees it without its token."""

    @field_validator("listen", mode="before")
    @classmethod
    def _an_address(cls, given: object) -> object:
        if given is False or given == OFF:  # YAML reads off as false
            return OFF
        if isinstance(given, str) and given != AUTO:
            try:
                split_address(given, lowest_port=0)
            except ConfigError:
                raise ValueError("allowed: auto, off, or HOST:PORT with a port of 0 to 65535") from None
        return given

    @property
    def on(self) -> bool:
        """Whether a job serves its page, if it can."""
        return self.listen != OFF

    @property
    def required(self) -> bool:
        """Whether a job that cannot serve its page must fail."""
        return self.listen not in (AUTO, OFF)

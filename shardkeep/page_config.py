"""The settings of the live page (shardkeep/page)."""

from __future__ import annotations

from pydantic import Field, field_validator

from shardkeep.base.settings import Settings
from shardkeep.ps.control.grpc.addresses import listen_setting

AUTO, OFF = "auto", "off"


class PageConfig(Settings):
    """The live page of a job (docs/guide/watching.md). It needs the extra `web`."""

    listen: str = Field(AUTO, max_length=300)
    """HOST:PORT of the page, port 0 = any free one; auto = a free port of 127.0.0.1 where the extra `web` is installed;
    off = no page. Nobody sees it without its token."""

    @field_validator("listen", mode="before")
    @classmethod
    def _an_address(cls, given: object) -> object:
        return listen_setting(given, AUTO, OFF)

    @property
    def on(self) -> bool:
        """Whether a job serves its page, if it can."""
        return self.listen != OFF

    @property
    def required(self) -> bool:
        """Whether a job that cannot serve its page must fail."""
        return self.listen not in (AUTO, OFF)

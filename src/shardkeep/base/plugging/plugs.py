"""Plug: one entry of a registry. A registry is a dict of plugs by name; none loads its code before it is used."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

Config = TypeVar("Config")
Code = TypeVar("Code")


@dataclass(frozen=True, slots=True)
class Plug(Generic[Config, Code]):
    """One way to do what a registry is for."""

    name: str
    """Its word in a job's config."""
    config: Config
    """What reading a config needs to know of it: the settings that it takes, its numbers on the wire."""
    code: str
    """`module:name`."""
    kernels: tuple[str, ...] = ()
    """Modules of kernels that the code imports."""

    def load(self) -> Code:
        """What `code` names; imports its module."""
        module, _, name = self.code.partition(":")
        return cast(Code, getattr(importlib.import_module(module), name))


def by_name(*plugs: Plug[Config, Code]) -> dict[str, Plug[Config, Code]]:
    """A registry."""
    return {plug.name: plug for plug in plugs}

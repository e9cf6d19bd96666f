"""Checks of plugs, for their authors' tests: each raises AssertionError, one line that names what is wrong."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardkeep.testing.codecs import check_codec as check_codec
    from shardkeep.testing.forms import check_form as check_form
    from shardkeep.testing.selectors import check_selector as check_selector

__all__ = ["check_codec", "check_form", "check_selector"]


def __getattr__(name: str) -> Any:
    """Loads a check on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{name.removeprefix('check_')}s"), name)

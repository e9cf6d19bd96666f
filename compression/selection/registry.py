"""The registry of selectors: their names in the config, and where they are. Imports none before it is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shardkeep.base.plugging.own import OwnConfig, built_in_or_own, load_own
from shardkeep.base.plugging.plugs import Plug, by_name

if TYPE_CHECKING:
    from shardkeep.compression.selection.selector import Selector

SELECTORS: dict[str, Plug[None, Callable[[], Selector]]] = by_name(
    Plug("rows", None, "shardkeep.compression.selection.rows:Rows"),
    Plug("top_k", None, "shardkeep.compression.selection.top_k:TopK"),
)

if TYPE_CHECKING:
    Select = str | OwnConfig
else:
    Select = built_in_or_own(*SELECTORS)
"""A selector in the config."""


def selector_of(select: Select, import_from: Path | None = None) -> Selector:
    """The selector of a name, or of a class of the user's own.

    Args:
        import_from: Folder that is searched last for the class.

    Raises ConfigError for a class that cannot be loaded or is no selector."""
    if not isinstance(select, OwnConfig):
        return SELECTORS[select].load()()
    from shardkeep.compression.selection.checked import CheckedSelector
    from shardkeep.compression.selection.selector import Selector

    return CheckedSelector(load_own(select, Selector, setting="compression.push.select", import_from=import_from))

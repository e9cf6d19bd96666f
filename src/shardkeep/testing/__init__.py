"""Checks of plugs, for their authors' tests: each raises AssertionError, one line that names what is wrong."""

from shardkeep.testing.selectors import check_selector

__all__ = ["check_selector"]

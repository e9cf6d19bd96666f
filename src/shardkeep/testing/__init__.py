"""Checks of plugs, for their authors' tests: each raises AssertionError, one line that names what is wrong."""

from shardkeep.testing.codecs import check_codec
from shardkeep.testing.forms import check_form
from shardkeep.testing.selectors import check_selector

__all__ = ["check_codec", "check_form", "check_selector"]

"""Checks of plugs, for their authors' tests: each raises AssertionError, one line that names what is wrong."""

from shardkeep.testing.codecs import check_codec

__all__ = ["check_codec"]

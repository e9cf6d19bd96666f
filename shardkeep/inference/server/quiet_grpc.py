"""The one place of the server that imports grpc. Its C core reads these variables when loaded, so they are set
before."""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # we never fork; its fork handlers only cost and warn
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # refused connections and garbage are answered, not printed

import grpc

__all__ = ["grpc"]

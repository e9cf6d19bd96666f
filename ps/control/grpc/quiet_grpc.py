"""The one place that imports grpc: its C core reads these variables when loaded, so they are set before.

Everything in ps/control takes `grpc`, and the stubs that import it, from here.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # we never fork; its fork handlers only cost and warn
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # refused connections and garbage are answered, not printed

import grpc

from shardkeep.proto import control_pb2_grpc

__all__ = ["control_pb2_grpc", "grpc"]

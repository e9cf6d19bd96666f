"""Health and reflection of the gRPC front, by the services that grpcio's packages have: the extra `serve`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from shardkeep.inference.protocol import grpc_form
from shardkeep.ps.control.grpc.quiet_grpc import grpc

CHECK = "/grpc.health.v1.Health/Check"


def add_health(server: grpc.Server) -> Callable[[], None]:
    """Adds both services to a server, where the packages are installed. Returns what tells clients that it stops."""
    with contextlib.suppress(ImportError):
        from grpc_health.v1 import health, health_pb2, health_pb2_grpc
        from grpc_reflection.v1alpha import reflection

        servicer = health.HealthServicer()
        servicer.set(grpc_form.SERVICE, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        reflection.enable_server_reflection((grpc_form.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        return servicer.enter_graceful_shutdown
    return lambda: None

"""Status: how a request can fail, with gRPC's name and HTTP's number of each."""

from __future__ import annotations

from enum import Enum

from shardkeep.base.printable import printable


class Status(Enum):
    """(name of the gRPC code, HTTP status)"""

    INVALID = ("INVALID_ARGUMENT", 400)
    NO_TOKEN = ("UNAUTHENTICATED", 401)
    NOT_FOUND = ("NOT_FOUND", 404)
    TOO_LARGE = ("RESOURCE_EXHAUSTED", 413)
    BUSY = ("RESOURCE_EXHAUSTED", 503)
    STOPPING = ("UNAVAILABLE", 503)
    INTERNAL = ("INTERNAL", 500)

    @property
    def grpc_code(self) -> str:
        """A name of `grpc.StatusCode`."""
        return self.value[0]

    @property
    def http_code(self) -> int:
        return self.value[1]


class Refusal(Exception):
    """A request that gets an error; the text is one line for the client's developer. Never leaves the server."""

    def __init__(self, status: Status, text: str) -> None:
        text = printable(text[:1001])  # names and values come from clients
        super().__init__(text if len(text) <= 1000 else text[:997] + "...")
        self.status = status


def invalid(text: str) -> Refusal:
    """The client's mistake."""
    return Refusal(Status.INVALID, text)

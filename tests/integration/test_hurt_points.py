"""The points at which chaos tests hurt a job: those tests run long, a renamed function is seen here."""

from __future__ import annotations

import importlib
from operator import attrgetter

from tests.support.cases import every
from tests.support.hurt import POINTS, WRITE


@every("function", sorted({WRITE, *(point.function for point in POINTS.values())}))
def test_every_function_that_chaos_tests_hurt_exists(function: str) -> None:
    module, _, name = function.partition(":")
    assert callable(attrgetter(name)(importlib.import_module(module)))

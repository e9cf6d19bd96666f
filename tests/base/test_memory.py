"""Memory that the system does not give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardkeep.base.errors import UserError
from shardkeep.base.machine.memory import memory_errors
from tests.support.cases import every


def test_an_allocation_that_fails_says_how_much_was_asked() -> None:
    with pytest.raises(UserError, match=r"^out of memory: 4,000,000\.0 GB asked at once by us$"), memory_errors("us"):
        torch.empty(10**15, dtype=torch.float32)
    with pytest.raises(UserError, match=r"^out of memory: 3\.55 PiB asked at once by us$"), memory_errors("us"):
        np.empty(10**15, np.float32)


@every("error", [RuntimeError("a shape"), ValueError("a value")], ids=["runtime", "value"])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error), match=r"^a ") as caught, memory_errors("us"):
        raise error
    assert not isinstance(caught.value, UserError)

"""Which of its role's processes this one is: an index given by hand, or the number that a launcher sets."""

from __future__ import annotations

import os
from collections.abc import Mapping

from shardkeep.base.errors import UserError

LAUNCHERS = ("RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX")
"""The variables of torchrun, Slurm and Kubernetes' indexed jobs, in the order in which they count."""


def index_of(index: int | None, environment: Mapping[str, str] = os.environ) -> int:
    """Returns `index`, or the number in the first of `LAUNCHERS` that is set. Raises UserError.

    The number counts all processes of one launch. So start servers by one `srun` (or torchrun) and workers by another.
    """
    if index is not None:
        return index
    for name in LAUNCHERS:
        if text := environment.get(name, "").strip():
            if not (text.isascii() and text.isdigit()):
                raise UserError(f"{name}={text} is not a whole number from 0; set it to one, or give the index")
            return int(text)
    raise UserError(f"no index: give it, or use a launcher that sets {', '.join(LAUNCHERS[:-1])} or {LAUNCHERS[-1]}")

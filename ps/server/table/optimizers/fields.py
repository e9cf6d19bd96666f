"""Types of settings that several row optimizers have."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardkeep.base.config.schedule import ScheduleConfig
from shardkeep.base.settings import MayDiffer

Number = Annotated[float, Field(ge=0.0, le=1e6)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0, le=1e6)]
Rate = Annotated[Positive, Field(description="Learning rate.")]
Betas = Annotated[tuple[Share, Share], Field(description="Decay of the first and the second moment.")]
Decay = Annotated[Number, Field(description="L2 penalty added to the gradient of rows: `g + weight_decay * w`.")]
_DECAY_ON = "touched = the rows of a push; table = all rows of the table, at each update, the others with gradient 0."
DecayOn = Annotated[Literal["touched", "table"], Field(description=_DECAY_ON)]
Schedule = Annotated[ScheduleConfig, MayDiffer.STARTS, Field(description="Learning rate over steps.")]
NO_SCHEDULE = ScheduleConfig()

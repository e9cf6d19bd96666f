"""What a callback of `train` receives; jobs in TensorBoard; rows in the checkpoints of other libraries' trainers.

Each module needs its library, which is no dependency.
"""

from shardkeep.run.summary import Summary
from shardkeep.view.callback import Callback, CheckpointEvent, EvaluationEvent, ProgressEvent, StartEvent

__all__ = ["Callback", "CheckpointEvent", "EvaluationEvent", "ProgressEvent", "StartEvent", "Summary"]

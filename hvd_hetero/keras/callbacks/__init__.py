"""`hvd.callbacks`: the Keras callbacks of Horovod, under their names, and callbacks for mixed hardware."""

from . import dispatch as _dispatch  # noqa: F401  # before any fit
from .balance import LatencyAwareLearningRate, RebalanceCallback, TraceCallback
from .best_model import BestModelCheckpoint
from .broadcast import BroadcastGlobalVariablesCallback
from .elastic import CheckpointCallback, CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback
from .local import LocalSGDCallback
from .metrics import MetricAverageCallback
from .schedule import LearningRateScheduleCallback, LearningRateWarmupCallback
from .stop import StopTogetherCallback

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "CheckpointCallback",
    "CommitStateCallback",
    "LatencyAwareLearningRate",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "LocalSGDCallback",
    "MetricAverageCallback",
    "RebalanceCallback",
    "StopTogetherCallback",
    "TraceCallback",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
]

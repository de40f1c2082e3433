"""`hvd.callbacks`: the Keras callbacks of Horovod, under their names, and callbacks for mixed hardware."""

from . import dispatch as _dispatch  # noqa: F401  # before any fit
from .agreement import BestModelCheckpoint, BroadcastGlobalVariablesCallback, MetricAverageCallback
from .balance import LatencyAwareLearningRate, RebalanceCallback, TraceCallback
from .elastic import CheckpointCallback, CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback
from .local import LocalSGDCallback
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

"""Records of a run, written as it goes and read when it is done: who computed, who waited, who had which share."""

from .entry import Event, Step
from .reader import NewerFormatError, read
from .record import Trace
from .run import RankRun, RankSummary, Run

__all__ = ["Event", "NewerFormatError", "RankRun", "RankSummary", "Run", "Step", "Trace", "read"]

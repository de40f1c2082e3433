"""Records of a run, written as it goes and read when it is done: who computed, who waited, who had which share."""

from .reader import Event, NewerFormatError, RankRun, RankSummary, Run, Step, read
from .record import Trace

__all__ = ["Event", "NewerFormatError", "RankRun", "RankSummary", "Run", "Step", "Trace", "read"]

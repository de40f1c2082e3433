"""An emulated mixed cluster on one machine; Python's standard library is all it needs."""

from .cluster import Cluster, EmulatedRank
from .running import Finished, find_horovodrun

__all__ = ["Cluster", "EmulatedRank", "Finished", "find_horovodrun"]

"""Topology: which ranks form a node, found from their hosts and from the bandwidths between them.

Ranks of one host form a node. Which hosts form a node together depends on bandwidths: the maximum spanning tree over
hosts is cut at the largest gap between its bandwidths. That is single-linkage clustering (Gower & Ross 1969, "Minimum
spanning trees and single linkage cluster analysis"; KungFu, Mai et al. 2020, builds the same tree over (W + W^T) / 2).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .link import Link

# The least ratio of bandwidths that separates nodes. With less than 2 between the levels, an all-reduce in two levels
# gains little, and two measurements of one kind of link may differ by nearly as much on a busy machine.
SIGNIFICANT_GAP = 2.0
# The same between ranks that give the same host identity. They share memory, and the noise of shared cores makes their
# pairs differ by up to 4. If the identity is wrong, and a wire separates them, that is slower by 8 or more.
GAP_WITHIN_HOST = 8.0
_SAME = 1e-9            # relative: gaps that differ by less count as equal, so that rounding decides nothing


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The ranks of each node, and the links within and between nodes.

    Args:
        nodes: the ranks of each node, ascending; nodes in the order of their first rank.
        local: the link between ranks of one node; None: not measured.
        cross: the link between nodes; None: not measured.

    Raises:
        TypeError, ValueError: `nodes` does not have each rank from 0 upwards once, in this order.
    """

    nodes: tuple[tuple[int, ...], ...]
    local: Link | None = None
    cross: Link | None = None

    def __post_init__(self) -> None:
        try:
            nodes = tuple(tuple(operator.index(rank) for rank in node) for node in self.nodes)
        except TypeError:
            raise TypeError(
                f"nodes: expected the ranks of each node, as ((0, 1), (2, 3)). Received: {self.nodes!r}."
            ) from None
        object.__setattr__(self, "nodes", nodes)
        ranks = [rank for node in nodes for rank in node]
        if not ranks or not all(nodes) or sorted(ranks) != list(range(len(ranks))):
            raise ValueError("nodes: expected each rank from 0 upwards in exactly one node, and no empty node. "
                             f"Received: {self.nodes}.")
        if any(list(node) != sorted(node) for node in nodes) or list(nodes) != sorted(nodes):
            raise ValueError("nodes: expected the ranks of each node in ascending order, and nodes in the order of "
                             f"their first rank. Received: {self.nodes}.")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.nodes))

    @property
    def rails(self) -> int:
        """The number of ranks of the smallest node: so many pairs of ranks can exchange between two nodes at once."""
        return min(map(len, self.nodes))

    @property
    def is_flat(self) -> bool:
        """Whether there are no two levels: a single node, or one rank on each node."""
        return len(self.nodes) == 1 or all(len(node) == 1 for node in self.nodes)

    def check_size(self, size: int) -> None:
        """Raises ValueError unless this is a topology of `size` ranks."""
        if self.size != size:
            raise ValueError(f"topology: expected one of {size} ranks, those of this job. Received: one of {self.size} "
                             f"ranks in {len(self.nodes)} nodes, {self.nodes}.")

    def node_of(self, rank: int) -> int:
        """The index of the node of `rank`; raises ValueError for a rank that does not exist."""
        for index, node in enumerate(self.nodes):
            if rank in node:
                return index
        raise ValueError(f"rank: expected 0 to {self.size - 1}. Received: {rank}.")

    def as_dict(self) -> dict[str, Any]:
        """The topology as a dictionary that JSON can hold."""
        return {
            "nodes": [list(node) for node in self.nodes],
            "local": asdict(self.local) if self.local else None,
            "cross": asdict(self.cross) if self.cross else None,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Topology:
        """The topology from the dictionary that `as_dict` returned."""
        links = {name: Link(**content[name]) if content[name] else None for name in ("local", "cross")}
        return cls(nodes=tuple(tuple(int(rank) for rank in node) for node in content["nodes"]), **links)


def by_host(hosts: Sequence[str | int]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host, hosts in the order of their first rank; `hosts[r]` is the identity of rank r's host."""
    found: dict[str | int, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values())


def group(hosts: Sequence[str | int], bandwidth: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Groups ranks into nodes, for `Topology.nodes`.

    1. Ranks of one host are one node, unless the tree of bandwidths within the host has a gap of `GAP_WITHIN_HOST`.
       Then the identity was wrong (two machines that look alike), and the parts count as hosts of their own.
    2. The bandwidths of the tree between hosts and of the trees within hosts are sorted. If the largest ratio of
       neighbours is at least `SIGNIFICANT_GAP`, hosts that are joined by bandwidths above it become one node. A ratio
       counts only if a bandwidth of the tree between hosts lies below it (else it would separate no hosts). Of equal
       ratios, the one at the slowest bandwidths counts.

    Args:
        hosts: the identity of each rank's host.
        bandwidth: [i, j] is the bandwidth from rank i to rank j in bytes/s; the diagonal is not read.

    Raises:
        ValueError: a matrix of another shape, or bandwidths that are not finite and above 0.
    """
    weights = _checked(hosts, bandwidth)
    parts = [part for ranks in by_host(hosts) for part in _cut(ranks, _tree(weights, [(r,) for r in ranks]),
                                                               None, GAP_WITHIN_HOST)]
    edges = _tree(weights, parts)
    within = [w for part in parts for w, *_ in _tree(weights, [(rank,) for rank in part])]
    joined = _cut(range(len(parts)), edges, within, SIGNIFICANT_GAP)
    return tuple(sorted(tuple(sorted(rank for part in node for rank in parts[part])) for node in joined))


def tournament(players: Sequence[int]) -> list[list[tuple[int, int]]]:
    """A round-robin schedule (circle method): lists of disjoint pairs, in which each two players meet exactly once.

    The probe measures the pairs of a list at the same time. There are n - 1 lists for an even number n of players, n
    lists for an odd n, in each of which one player is left out, and none for a single player.
    """
    seats: list[int | None] = [*players, *([None] if len(players) % 2 else [])]
    turns = []
    for _ in range(len(seats) - 1):
        pairs = [(seats[i], seats[-1 - i]) for i in range(len(seats) // 2)]
        turns.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [turn for turn in turns if turn]


def _checked(hosts: Sequence[str | int], bandwidth: np.ndarray) -> np.ndarray:
    """(W + W^T) / 2 of the bandwidths W; raises ValueError if they are not valid, see `group`."""
    weights = np.asarray(bandwidth, dtype=float)
    if not len(hosts) or weights.shape != (len(hosts), len(hosts)):
        raise ValueError("hosts and bandwidth: expected at least one host and a square matrix of as many rows. "
                         f"Received: {len(hosts)} hosts and shape {list(weights.shape)}.")
    between = weights[~np.eye(len(hosts), dtype=bool)]
    if not (np.isfinite(between).all() and (between > 0).all()):
        raise ValueError("bandwidth: expected finite numbers of bytes/s above 0 outside the diagonal. "
                         f"Received: {weights.tolist()}.")
    return (weights + weights.T) / 2


def _tree(weights: np.ndarray, parts: Sequence[tuple[int, ...]]) -> list[tuple[float, int, int]]:
    """The maximum spanning tree over parts (Prim 1957), as edges (bandwidth, index of a part, index of another part).

    The bandwidth between two parts is that of their fastest link.
    """
    ranks, starts = np.concatenate(parts), np.cumsum([0, *map(len, parts[:-1])])
    between = np.maximum.reduceat(np.maximum.reduceat(weights[np.ix_(ranks, ranks)], starts, axis=0), starts, axis=1)
    best = between[0].copy()
    source: np.ndarray = np.zeros(len(parts), dtype=int)
    outside = np.arange(len(parts)) > 0
    edges = []
    for _ in range(len(parts) - 1):
        new = int(np.argmax(np.where(outside, best, -np.inf)))
        edges.append((float(best[new]), int(source[new]), new))
        outside[new] = False
        closer = between[new] > best
        best[closer], source[closer] = between[new][closer], new
    return edges


def _cut(members: Sequence[int], edges: Sequence[tuple[float, int, int]], within: Sequence[float] | None,
         significant: float) -> list[tuple[int, ...]]:
    """The groups of members that are joined by the edges above the largest gap between bandwidths.

    Args:
        members: what is grouped.
        edges: a spanning tree over indices of `members`, from `_tree`.
        within: further bandwidths between which a gap may lie; None: there are none.
        significant: the least ratio that counts as a gap. Without a gap, each member is a group of its own, or if
            `within` is None, all are one group.
    """
    values = sorted([weight for weight, *_ in edges] + list(within or []))
    slowest = min((weight for weight, *_ in edges), default=math.inf)
    widest, threshold = 1.0, -math.inf if within is None else math.inf
    for low, high in itertools.pairwise(values):
        if low >= slowest and high / low >= significant and high / low > widest * (1.0 + _SAME):
            widest, threshold = high / low, high
    part = list(range(len(members)))
    for weight, a, b in edges:
        if weight >= threshold:
            part = [part[a] if p == part[b] else p for p in part]
    return [tuple(m for m, p in zip(members, part, strict=True) if p == name) for name in dict.fromkeys(part)]

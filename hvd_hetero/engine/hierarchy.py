"""All-reduce in two levels, within nodes and between them, written on the port.

    scatter  reduce-scatter within each node, all-reduce of each part between the nodes, all-gather within each node
    rails    the same with an all-reduce first: Gloo's reduce-scatter takes several times as long (16 MB on two ranks:
             110 ms against 15), while MPI's may win
    leader   all-reduce within each node, all-reduce between the nodes' first ranks, broadcast within each node

(BlueConnect, Cho et al., MLSys 2019; how long they take: `hvd_hetero.policy.cost_model`.) All work for nodes of unlike
size: there are as many rails as the smallest node has ranks. Sums are taken everywhere and divided nowhere: averaging
averages would be wrong where nodes differ in size.

Process sets are few, because each costs its members a negotiation in every cycle: one per node and one per rail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from hvd_hetero.policy.partition import equal_shares
from hvd_hetero.policy.topology import Topology

from .environment import is_elastic
from .port import Engine, Steps
from .stderr import tell


class Sum(Protocol):
    """A function that sums an array over the ranks of one level: the `steps` of a reduction, maybe with a codec."""

    def __call__(self, engine: Engine, array: Any, *, name: str) -> Steps: ...


Algorithm = Callable[..., Steps]


def plain_sum(engine: Engine, array: Any, *, name: str) -> Steps:
    """Sums an array over an engine's ranks by its own all-reduce, without a codec."""
    return (yield engine.allreduce_async(array, name=name))


@dataclass(frozen=True, kw_only=True)
class Levels:
    """The groups that one rank belongs to: those of its node and of its rail, for all-reduces in two levels.

    Attributes:
        everyone: the engine of all ranks.
        rails: the number of rails: the ranks of the smallest node. Rail r joins rank r of every node.
    """

    everyone: Engine
    local: Engine | None
    """The engine of the ranks on this rank's node; None if it is the only rank of its node."""
    cross: Engine | None
    """The engine of this rank's rail, which has one rank of each node; None without a rail, and on a single node."""
    rails: int
    even: bool
    """Whether every rank belongs to a rail, because all nodes have the same number of ranks."""
    ranks: tuple[tuple[int, ...], ...] = ()
    """The global ranks of each node; empty if all ranks sum at once (`one_level`)."""

    @property
    def local_rank(self) -> int:
        return self.local.rank if self.local is not None else 0


def one_level(engine: Engine) -> Levels:
    """Returns `Levels` without nodes, in which all ranks sum at once (topology "flat")."""
    return Levels(everyone=engine, local=None, cross=None, rails=1, even=False)


def levels_of(engine: Engine, topology: Topology) -> Levels:
    """This rank's groups. A collective call, with the same topology on all ranks.

    Raises:
        ValueError: a topology of another number of ranks, on every rank.
    """
    topology.check_size(engine.size)
    local = cross = None
    for node in topology.nodes:
        if len(node) > 1:
            group = engine.group(node)
            local = group if engine.rank in node else local
    if len(topology.nodes) > 1:
        for rail in range(topology.rails):
            ranks = [node[rail] for node in topology.nodes]
            group = engine.group(sorted(ranks))
            cross = group if engine.rank in ranks else cross
    even = all(len(node) == topology.rails for node in topology.nodes)
    return Levels(everyone=engine, local=local, cross=cross, rails=topology.rails, even=even, ranks=topology.nodes)


def topology_now(engine: Engine, topology: Topology | str | None) -> Topology | str | None:
    """Returns the user's `topology`, adapted to the present ranks of an elastic job.

    If it is a `Topology` of another number of ranks, it becomes "auto", and rank 0 prints that. In a job that is not
    elastic such a topology is a mistake; it is returned unchanged, so that `levels_of` raises.
    """
    if not is_elastic() or not isinstance(topology, Topology) or topology.size == engine.size:
        return topology
    if engine.rank == 0:
        text = (
            f"hvd_hetero: the topology is one of {topology.size} ranks, and there are {engine.size}: going on as with "
            'topology="auto".'
        )
        tell(text)
    return "auto"


def levels_for(engine: Engine, topology: Topology | str | None) -> Levels:
    """Returns this rank's groups for a user's `topology`. A collective call.

    Args:
        topology: "flat" or None for one level; a `Topology` for its nodes; any other text, such as "auto", for the
            nodes that `probe` finds.
    """
    if topology is None or topology == "flat":
        return one_level(engine)
    if isinstance(topology, Topology):
        return levels_of(engine, topology)
    from .probe import probe  # few jobs need it

    return levels_of(engine, probe(engine).topology)


def part_of(levels: Levels, length: int) -> slice | None:
    """Returns the slice of an array of `length` values that this rank sums along its rail; empty if it has no rail.

    None if the array is not divided: there is one rail or one level, or there are fewer values than rails. The slices
    are those of a reduce-scatter: the first `length % rails` have one value more.
    """
    if levels.local is None or levels.rails == 1 or length < levels.rails:
        return None
    lengths = equal_shares(length, levels.rails)
    begin = sum(lengths[: levels.local_rank])
    return slice(begin, begin + sum(lengths[levels.local_rank : levels.local_rank + 1]))


def flat(levels: Levels, array: Any, *, name: str, local: Sum | None, cross: Sum) -> Steps:
    """Sums over all ranks in one level."""
    return (yield from cross(levels.everyone, array, name=name))


def rails(levels: Levels, array: Any, *, name: str, local: Sum | None, cross: Sum) -> Steps:
    """Sums over all ranks: an all-reduce within each node, then each rail sums its part between the nodes, then an
    all-gather within each node. As `leader` if the array cannot be divided."""
    part = part_of(levels, len(array))
    if levels.local is None or part is None:
        return (yield from leader(levels, array, name=name, local=local, cross=cross))
    array = yield from (local or plain_sum)(levels.local, array, name=f"{name}.within")
    return (yield from _across(levels, array[part], name=name, cross=cross))


def scatter(levels: Levels, array: Any, *, name: str, local: Sum | None, cross: Sum) -> Steps:
    """Sums over all ranks as `rails`, but begins with a reduce-scatter within each node. As `rails` if some rank has no
    rail, or the sum within the node uses a codec."""
    if levels.local is None or not levels.even or local is not None or len(array) < levels.rails:
        return (yield from rails(levels, array, name=name, local=local, cross=cross))
    part = yield levels.local.reducescatter_async(array, name=f"{name}.within")
    return (yield from _across(levels, part, name=name, cross=cross))


def _across(levels: Levels, part: Any, *, name: str, cross: Sum) -> Steps:
    """Sums this rank's part of its node's sum over its rail, and gathers all parts within the node. Returns the whole
    sum."""
    assert levels.local is not None
    if levels.cross is not None:
        part = yield from cross(levels.cross, part, name=f"{name}.between")
    return (yield levels.local.allgather_async(part, name=f"{name}.out"))


def leader(levels: Levels, array: Any, *, name: str, local: Sum | None, cross: Sum) -> Steps:
    """Sums over all ranks: an all-reduce within each node, one between the nodes' first ranks, and a broadcast within
    each node."""
    if levels.local is not None:
        array = yield from (local or plain_sum)(levels.local, array, name=f"{name}.node")
    if levels.cross is not None and levels.local_rank == 0:
        array = yield from cross(levels.cross, array, name=f"{name}.leaders")
    if levels.local is not None and levels.everyone.size > levels.local.size:
        array = yield levels.local.broadcast_async(array, root=0, name=f"{name}.back")
    return array


ALGORITHMS: dict[str, Algorithm] = {"flat": flat, "rails": rails, "scatter": scatter, "leader": leader}
IN_PARTS = ("rails", "scatter")  # the algorithms in which each rail sums only a part of the array between the nodes

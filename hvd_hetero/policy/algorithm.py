"""Chooses the algorithm that all-reduces a bucket fastest, from a model of the links and from measured times.

With p ranks on m nodes, at most R on one, n bytes, latency a and seconds per byte b of a local (l) and a cross (x) link
(ring all-reduce as in Thakur, Rabenseifner & Gropp 2005; two levels as in BlueConnect, MLSys 2019):

    flat      2 (p - 1) a_x + 2 (p - 1) / p n b_x
    rails     2 (R - 1) a_l + 2 (R - 1) / R n b_l + 2 (m - 1) a_x + 2 (m - 1) / m n b_x
    leader    2 (R - 1) a_l + 2 n b_l             + 2 (m - 1) a_x + 2 (m - 1) / m n b_x

"scatter" is expected to take as long as "rails" (see `engine.hierarchy` for the algorithms). The rails of a node share
one network interface, so together they take as long between the nodes as a leader alone. A codec of compression ratio r
divides n between the nodes by r. So two levels save slow hops (much of the latency, little of the transfer time), and
for large n it is the codec between the nodes that saves time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .link import Link
from .topology import Topology


def expected_s(algorithm: str, size_bytes: float, topology: Topology, *, ratio: float = 1.0) -> float:
    """The seconds of an all-reduce by the formulas of this module's docstring.

    `hvd-hetero probe` prints them; what a job uses follows from measured times, see `choose`.

    Args:
        algorithm: "flat", "rails", "scatter" or "leader".
        size_bytes: size of the array.
        topology: nodes, with measured links.
        ratio: compression ratio of a codec: bytes of the array over bytes that travel between nodes (with "flat",
            between ranks).

    Raises:
        ValueError: an unknown algorithm, or a topology without a link that is needed.
    """
    local, cross = topology.local, topology.cross
    nodes, rails, ranks = len(topology.nodes), topology.rails, topology.size
    most = max(len(node) for node in topology.nodes)
    if algorithm not in ("flat", "rails", "scatter", "leader"):
        raise ValueError(f"algorithm: expected flat, rails, scatter or leader. Received: {algorithm!r}.")
    if (nodes > 1 and cross is None) or (most > 1 and local is None):
        raise ValueError("topology: expected measured links (see hvd_hetero.engine.probe). Received: one without.")
    slow = cross if nodes > 1 else local
    if algorithm == "flat":
        if ranks == 1 or slow is None:
            return 0.0
        return 2 * (ranks - 1) * slow.latency_s + 2 * (ranks - 1) / ranks * size_bytes / ratio / _rate(slow)
    within = 0.0
    if local is not None and most > 1:
        share = 2.0 if algorithm == "leader" or rails == 1 else 2 * (most - 1) / most
        within = 2 * (most - 1) * local.latency_s + share * size_bytes / _rate(local)
    between = 0.0
    if cross is not None and nodes > 1:
        between = 2 * (nodes - 1) * cross.latency_s + 2 * (nodes - 1) / nodes * size_bytes / ratio / _rate(cross)
    return within + between


def _rate(link: Link) -> float:
    return link.bandwidth_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The route that was chosen for a bucket, and why."""

    route: str  # the title of the route: its algorithm and codecs
    predicted_s: float  # predicted or measured seconds of the bucket's sum
    reason: str


MARGIN = 0.1  # a route replaces the default only if it takes less time by this fraction: timing has errors


def choose(size_bytes: float, timed: Mapping[str, Link], *, default: str) -> Choice:
    """The route that should be fastest for a bucket of `size_bytes`.

    Args:
        size_bytes: size of the bucket.
        timed: maps each route to its time as a function of size, fitted to timings.
        default: the route that is chosen unless another one is faster by `MARGIN`.

    Raises:
        ValueError: `default` was not timed.
    """
    if default not in timed:
        raise ValueError(f"default: expected one of {', '.join(timed)}. Received: {default!r}.")
    predicted = {route: line.time_s(size_bytes) for route, line in timed.items()}
    best = min(predicted, key=lambda route: (predicted[route], route))
    if predicted[best] > (1 - MARGIN) * predicted[default]:
        best = default
    others = sorted((seconds, route) for route, seconds in predicted.items() if route != best)
    against = f"; next {others[0][1]} {1e3 * others[0][0]:.1f} ms" if others else ""
    return Choice(
        route=best,
        predicted_s=predicted[best],
        reason=f"{size_bytes / 2**20:.2f} MiB: {best} {1e3 * predicted[best]:.1f} ms predicted{against}",
    )


def rivals(size_bytes: float, timed: Mapping[str, Link], chosen: str, *, within: float = 1.5) -> Sequence[str]:
    """The routes that a trial on the running job should compare, see `router.Trial`.

    Args:
        size_bytes: size of the bucket.
        timed: as for `choose`.
        chosen: the route that `choose` returned.
        within: the next best route is compared too if it should take at most so many times as long as `chosen`.
    """
    predicted = sorted((line.time_s(size_bytes), route) for route, line in timed.items() if route != chosen)
    near = [route for seconds, route in predicted[:1] if seconds <= within * timed[chosen].time_s(size_bytes)]
    return (chosen, *near)


def confirm(measured_s: Mapping[str, Sequence[float]], chosen: str, size_bytes: float) -> Choice:
    """The result of a trial on the running job: `chosen`, unless another route has a smaller median by `MARGIN`.

    Args:
        measured_s: maps each route to its measured seconds.
        chosen: the route that `choose` returned.
        size_bytes: size of the bucket, for the reason.
    """
    medians = {route: sorted(times)[len(times) // 2] for route, times in measured_s.items()}
    best = min(medians, key=lambda route: (medians[route], route))
    if medians[best] > (1 - MARGIN) * medians[chosen]:
        best = chosen
    listed = ", ".join(f"{route} {1e3 * seconds:.1f} ms" for route, seconds in sorted(medians.items()))
    return Choice(
        route=best, predicted_s=medians[best], reason=f"{size_bytes / 2**20:.2f} MiB: {best}; measured {listed}"
    )

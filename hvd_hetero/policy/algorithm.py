"""Which algorithm sums a bucket of so many bytes fastest: what links make one expect, and what timing says.

With p ranks on m nodes, at most R on one, n bytes, latency a and seconds per byte b of a local (l) and a cross (x) link
(FORMULAE of ring all-reduce as in Thakur, Rabenseifner & Gropp 2005; of the levels as in BlueConnect, MLSys 2019):

    flat      2 (p - 1) a_x + 2 (p - 1) / p n b_x
    rails     2 (R - 1) a_l + 2 (R - 1) / R n b_l + 2 (m - 1) a_x + 2 (m - 1) / m n b_x
    leader    2 (R - 1) a_l + 2 n b_l             + 2 (m - 1) a_x + 2 (m - 1) / m n b_x

where the rails of a node share one network interface, so that together they take as long as a leader alone. A codec of
ratio r divides n between the nodes by r. So the hierarchy saves slow hops – much of the latency, little of the
bandwidth – and for large n it is the codec between the nodes that gains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .link import Link
from .topology import Topology


def expected_s(algorithm: str, size_bytes: float, topology: Topology, *, ratio: float = 1.0) -> float:
    """Seconds that the formulas above expect of `algorithm`, from the links of `topology`.

    Args:
        ratio: bytes of the array over bytes that travel between nodes (with "flat", between ranks).

    Raises:
        ValueError: an unknown algorithm, or a topology without links that it needs.
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
    """The algorithm that sums a bucket, and why it was chosen."""

    route: str
    predicted_s: float
    reason: str


MARGIN = 0.1  # so much less time than flat must a route promise: timing has errors, and flat has the fewest operations


def choose(size_bytes: float, timed: Mapping[str, Link], *, default: str) -> Choice:
    """The route that should be fastest for `size_bytes`, from the time each took at several sizes.

    Args:
        timed: route → what it takes for n bytes, as timed.
        default: the route to beat, by `MARGIN`.
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
    """The routes that a trial on the running job should compare: `chosen` and, if it is near, the next best."""
    predicted = sorted((line.time_s(size_bytes), route) for route, line in timed.items() if route != chosen)
    near = [route for seconds, route in predicted[:1] if seconds <= within * timed[chosen].time_s(size_bytes)]
    return (chosen, *near)


def confirm(measured_s: Mapping[str, Sequence[float]], chosen: str, size_bytes: float) -> Choice:
    """What the trial says: the route with the smallest median, `chosen` unless another is faster by `MARGIN`."""
    medians = {route: sorted(times)[len(times) // 2] for route, times in measured_s.items()}
    best = min(medians, key=lambda route: (medians[route], route))
    if medians[best] > (1 - MARGIN) * medians[chosen]:
        best = chosen
    listed = ", ".join(f"{route} {1e3 * seconds:.1f} ms" for route, seconds in sorted(medians.items()))
    return Choice(
        route=best, predicted_s=medians[best], reason=f"{size_bytes / 2**20:.2f} MiB: {best}; measured {listed}"
    )

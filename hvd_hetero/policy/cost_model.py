"""Predicts how long an all-reduce takes, from the latency and bandwidth of the links, for `hvd-hetero probe`.

With p ranks on m nodes, at most R on one, n bytes, latency a and seconds per byte b of a local (l) and a cross (x) link
(ring all-reduce as in Thakur, Rabenseifner & Gropp 2005; two levels as in BlueConnect, MLSys 2019):

    flat      2 (p - 1) a_x + 2 (p - 1) / p n b_x
    rails     2 (R - 1) a_l + 2 (R - 1) / R n b_l + 2 (m - 1) a_x + 2 (m - 1) / m n b_x
    leader    2 (R - 1) a_l + 2 n b_l             + 2 (m - 1) a_x + 2 (m - 1) / m n b_x

"scatter" is expected to take as long as "rails" (see `engine.hierarchy` for the algorithms). The rails of a node share
one network interface, so together they take as long between the nodes as a leader alone. A codec of compression ratio r
divides n between the nodes by r. So two levels save slow hops (much of the latency, little of the transfer time), and
for large n it is the codec between the nodes that saves time.

A running job does not use these formulas: it measures, see `route_choice`.
"""

from __future__ import annotations

from .topology import Topology


def expected_s(algorithm: str, size_bytes: float, topology: Topology, *, ratio: float = 1.0) -> float:
    """The seconds of an all-reduce by the formulas of this module's docstring.

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
        if slow is None:  # one rank alone
            return 0.0
        sent_bytes = 2 * (ranks - 1) / ranks * size_bytes / ratio
        return 2 * (ranks - 1) * slow.latency_s + sent_bytes / slow.bandwidth_bytes_per_s
    within = 0.0
    if local is not None and most > 1:
        sent_bytes = (2.0 if algorithm == "leader" or rails == 1 else 2 * (most - 1) / most) * size_bytes
        within = 2 * (most - 1) * local.latency_s + sent_bytes / local.bandwidth_bytes_per_s
    between = 0.0
    if cross is not None:
        sent_bytes = 2 * (nodes - 1) / nodes * size_bytes / ratio
        between = 2 * (nodes - 1) * cross.latency_s + sent_bytes / cross.bandwidth_bytes_per_s
    return within + between

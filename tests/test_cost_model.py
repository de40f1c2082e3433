"""How long an all-reduce should take: the formulas, and their limits."""

import pytest

from hvd_hetero.policy.cost_model import expected_s
from hvd_hetero.policy.link import Link
from hvd_hetero.policy.topology import Topology

LOCAL = Link(latency_s=5e-6, bandwidth_bytes_per_s=50e9)
ETHERNET = Link(latency_s=30e-6, bandwidth_bytes_per_s=1.25e9)
SLOW = Link(latency_s=200e-6, bandwidth_bytes_per_s=12.5e6)


def nodes(*sizes):
    ranks = iter(range(sum(sizes)))
    return tuple(tuple(next(ranks) for _ in range(size)) for size in sizes)


def test_two_levels_gain_latency_and_a_codec_between_nodes_gains_bandwidth():
    """4 nodes of 8 ranks on 10 Gbit/s: 7.2, 2.3 and 1.27 times, by size; 4.6 with 4 x compression between nodes."""
    topology = Topology(nodes=nodes(8, 8, 8, 8), local=LOCAL, cross=ETHERNET)
    for size, gain in ((10e3, 7.2), (1e6, 2.3), (100e6, 1.27)):
        assert expected_s("flat", size, topology) / expected_s("rails", size, topology) == pytest.approx(gain, rel=0.03)
    compressed = expected_s("rails", 100e6, topology, ratio=4)
    assert expected_s("flat", 100e6, topology) / compressed == pytest.approx(4.6, rel=0.05)


@pytest.mark.parametrize("algorithm, local_bytes", [("rails", 1.5), ("scatter", 1.5), ("leader", 2.0)])
def test_two_levels_take_the_time_of_each(algorithm, local_bytes):
    """3 nodes of 4 ranks: 6 hops and 2 * 3/4 (or 2) of the bytes within, 4 hops and 2 * 2/3 of a quarter between."""
    local = Link(latency_s=1e-3, bandwidth_bytes_per_s=1e6)
    cross = Link(latency_s=1e-2, bandwidth_bytes_per_s=1e5)
    found = expected_s(algorithm, 3e6, Topology(nodes=nodes(4, 4, 4), local=local, cross=cross), ratio=4)
    assert found == pytest.approx(6 * 1e-3 + local_bytes * 3e6 / 1e6 + 4 * 1e-2 + 4 / 3 * 3e6 / 4 / 1e5)


def test_over_a_slow_link_two_nodes_of_two_gain_half():
    topology = Topology(nodes=nodes(2, 2), local=LOCAL, cross=SLOW)
    assert expected_s("flat", 16e6, topology) / expected_s("leader", 16e6, topology) == pytest.approx(1.5, rel=0.01)


@pytest.mark.parametrize("algorithm", ["flat", "rails", "scatter", "leader"])
@pytest.mark.parametrize("sizes", [(1,), (3,), (1, 1), (2, 1), (2, 2), (3, 1, 2)])
def test_more_bytes_and_slower_links_never_take_less(algorithm, sizes):
    def seconds(size, cross=ETHERNET, local=LOCAL, **more):
        return expected_s(algorithm, size, Topology(nodes=nodes(*sizes), local=local, cross=cross), **more)

    assert seconds(0) <= seconds(1e3) <= seconds(1e6) <= seconds(1e9)
    assert seconds(1e6) <= seconds(1e6, cross=SLOW)
    assert seconds(1e6, ratio=4) <= seconds(1e6)
    if sizes == (1,):
        assert seconds(1e9) == 0.0


@pytest.mark.parametrize("sizes", [(3, 1), (1, 2, 4)])
def test_without_a_second_rank_on_every_node_all_goes_through_leaders(sizes):
    topology = Topology(nodes=nodes(*sizes), local=LOCAL, cross=ETHERNET)
    for algorithm in ("rails", "scatter"):
        assert expected_s(algorithm, 1e6, topology) == expected_s("leader", 1e6, topology)


@pytest.mark.parametrize("algorithm", ["flat", "leader"])
def test_the_largest_node_takes_longest_wherever_it_is(algorithm):
    found = [
        expected_s(algorithm, 1e6, Topology(nodes=nodes(*sizes), local=LOCAL, cross=ETHERNET))
        for sizes in ((3, 1), (1, 3), (3, 2) if algorithm == "leader" else (2, 2))
    ]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(("sizes", "links", "enough"), [
    ((2, 2), {}, False), ((2, 2), {"local": LOCAL}, False), ((2, 2), {"cross": SLOW}, False), ((1, 1), {}, False),
    ((1, 1), {"cross": SLOW}, True), ((2,), {}, False), ((2,), {"local": LOCAL}, True), ((1,), {}, True),
])  # fmt: skip
def test_a_link_is_missed_where_it_is_needed(sizes, links, enough):
    topology = Topology(nodes=nodes(*sizes), **links)
    if enough:
        assert (expected_s("flat", 1.0, topology) > 0.0) == (sizes != (1,))
        assert expected_s("flat", 1.0, topology) == pytest.approx(expected_s("rails", 1.0, topology), rel=1e-3)
        return
    with pytest.raises(ValueError, match="topology: expected measured links"):
        expected_s("flat", 1.0, topology)


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="algorithm: expected flat, rails, scatter or leader. Received: 'ring'"):
        expected_s("ring", 1.0, Topology(nodes=nodes(2), local=LOCAL))

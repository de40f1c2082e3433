"""Links fitted to times, and nodes found from hosts and bandwidths: laws and cases."""

import itertools
import json
import random

import numpy as np
import pytest

from hvd_hetero.policy.link import Curve, Link, fit_curve, fit_link
from hvd_hetero.policy.topology import Topology, group, tournament

SIZES = [1 << power for power in range(10, 25, 2)]


def times_of(link, sizes, noise=0.0, seed=0):
    generator = np.random.default_rng(seed)
    return [link.time_s(size) * (1.0 + noise * generator.exponential()) for size in sizes]


@pytest.mark.parametrize("latency_s", [0.0, 1e-5, 1e-3, 0.05])
@pytest.mark.parametrize("rate", [1e5, 12.5e6, 1e9, 4e10])
def test_the_fit_of_exact_times_is_exact(latency_s, rate):
    link = Link(latency_s=latency_s, bandwidth_bytes_per_s=rate)
    fitted = fit_link(SIZES * 3, times_of(link, SIZES) * 3)
    assert fitted.latency_s == pytest.approx(latency_s, rel=1e-3, abs=1e-9)
    assert fitted.bandwidth_bytes_per_s == pytest.approx(rate, rel=1e-6)


def test_spikes_do_not_move_the_fit():
    link = Link(latency_s=1e-3, bandwidth_bytes_per_s=1e8)
    for seed in range(20):
        times = times_of(link, SIZES * 5, noise=0.02, seed=seed)
        for spike in random.Random(seed).sample(range(len(times)), 4):
            times[spike] *= 10
        fitted = fit_link(SIZES * 5, times)
        assert fitted.latency_s == pytest.approx(link.latency_s, rel=0.1)
        assert fitted.bandwidth_bytes_per_s == pytest.approx(link.bandwidth_bytes_per_s, rel=0.1)


def test_a_burst_allowance_does_not_pass_for_bandwidth():
    """A token bucket of 256 kB: what fits into it travels at once, the rest at the link's rate."""
    sizes = [size for size in SIZES if size <= 1 << 22]
    times = [1e-3 + max(0, size - (1 << 18)) / 12.5e6 for size in sizes]
    fitted = fit_link(sizes, times)
    assert fitted.bandwidth_bytes_per_s == pytest.approx(12.5e6, rel=0.1)
    assert 0.0 < fitted.latency_s <= 1e-3


def test_noise_that_hides_the_slope_still_gives_a_link():
    falling = fit_link([1000, 4000], [0.002, 0.001])
    assert falling.latency_s == 0.0 and falling.bandwidth_bytes_per_s == pytest.approx(4000 / 0.001)
    single = fit_link([1000, 1000, 1000], [0.002, 0.001, 0.009])
    assert single.bandwidth_bytes_per_s == pytest.approx(1000 / 0.002)
    near = fit_link([1000, 2000], [0.001, 0.0015])  # of no size does the bandwidth make most of the time
    assert (near.latency_s, near.bandwidth_bytes_per_s) == (pytest.approx(0.0005), pytest.approx(2e6))
    steep = fit_link([1000, 4000], [1e-4, 1e-3])      # the line would begin below 0
    assert steep.latency_s == 0.0 and steep.bandwidth_bytes_per_s > 0


def test_a_curve_follows_what_a_line_does_not():
    """A shaper lets the first bytes of a message through at once, so that beyond them a line begins below 0."""

    def burst(size):
        return 1e-3 + max(0.0, size - 2**18) / 125e6

    sizes = [2**14, 2**18, 2**21, 2**23] * 3
    curve, line = fit_curve(sizes, list(map(burst, sizes))), fit_link(sizes, list(map(burst, sizes)), typical=True)
    assert isinstance(curve, Link)
    for size in (0, 2**14, 2**18, 2**20, 2**21, 3 * 2**20, 2**23, 2**24):
        assert curve.time_s(size) == pytest.approx(burst(size), rel=0.02)
    assert line.time_s(2**20) > 1.1 * burst(2**20), "then a line would do"
    bumpy = Curve(latency_s=0.0, bandwidth_bytes_per_s=1e6, sizes_bytes=(10.0, 20.0, 30.0), seconds=(1.0, 3.0, 2.0))
    assert [bumpy.time_s(size) for size in (0, 15, 20, 30)] == [1.0, 2.0, 3.0, 3.0]
    with pytest.raises(ValueError, match="size_bytes: expected 0 or more"):
        curve.time_s(-1)


@pytest.mark.parametrize("sizes, times", [([], []), ([1], [1, 2]), ([0], [1]), ([1], [0]), ([1], [float("nan")])])
def test_wrong_times_are_refused(sizes, times):
    with pytest.raises(ValueError, match="expected .* Received"):
        fit_link(sizes, times)


@pytest.mark.parametrize("wrong", [(-1.0, 1.0), (float("inf"), 1.0), (0.0, 0.0), (0.0, float("inf"))])
def test_a_link_is_checked(wrong):
    with pytest.raises(ValueError, match="Received"):
        Link(latency_s=wrong[0], bandwidth_bytes_per_s=wrong[1])


def test_a_topology_answers():
    topology = Topology(nodes=((0, 1, 3), (2, 4)), cross=Link(latency_s=1e-3, bandwidth_bytes_per_s=1e8))
    assert (topology.size, topology.rails, topology.is_flat) == (5, 2, False)
    assert [topology.node_of(rank) for rank in range(5)] == [0, 0, 1, 0, 1]
    assert Topology(nodes=((0, 1),)).is_flat and Topology(nodes=((0,), (1,))).is_flat
    assert Topology.from_dict(json.loads(json.dumps(topology.as_dict()))) == topology
    with pytest.raises(ValueError, match="0 to 4"):
        topology.node_of(5)


@pytest.mark.parametrize("nodes", [(), ((),), ((0,), ()), ((0, 1), (1,)), ((0, 2),), ((1, 0),), ((1,), (0,))])
def test_nodes_must_be_a_partition_in_order(nodes):
    with pytest.raises(ValueError, match="nodes: expected"):
        Topology(nodes=nodes)


def matrix(hosts, within, between):
    """Bandwidths of ranks: `within` a host, `between(a, b)` two hosts."""
    size = len(hosts)
    return np.array([[np.inf if i == j else within if hosts[i] == hosts[j] else between(hosts[i], hosts[j])
                      for j in range(size)] for i in range(size)])


def racks(a, b):
    return 10.0 if (a < 2) == (b < 2) else 1.0


@pytest.mark.parametrize(
    "hosts, within, between, expected",
    [
        ("aabb", 100, lambda a, b: 10, ((0, 1), (2, 3))),
        ("aabb", 1, lambda a, b: 1, ((0, 1), (2, 3))),                # no gap: the host decides
        ("aabb", 1, lambda a, b: 10, ((0, 1), (2, 3))),               # nor does a wire faster than shared memory join
        ("abab", 100, lambda a, b: 10, ((0, 2), (1, 3))),
        ("aab", 100, lambda a, b: 10, ((0, 1), (2,))),
        ("aaab", 100, lambda a, b: 10, ((0, 1, 2), (3,))),
        ("aaaa", 5, None, ((0, 1, 2, 3),)),
        ("abcd", 0, lambda a, b: 7, ((0,), (1,), (2,), (3,))),        # one rank each, equal links
        ((0, 1, 2, 3), 0, racks, ((0, 1), (2, 3))),                   # two racks of two
        ((0, 0, 1, 1, 2, 2, 3, 3), 20, racks, ((0, 1, 2, 3), (4, 5, 6, 7))),
        ((0, 0, 1, 1, 2, 2, 3, 3), 100, racks, ((0, 1, 2, 3), (4, 5, 6, 7))),     # gaps alike: the slow one counts
        ((0, 0, 1, 1, 2, 2, 3, 3), 1e4, racks, ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("abc", 0, lambda a, b: 1 if "c" in (a, b) else 9, ((0, 1), (2,))),
        ("abc", 0, lambda a, b: 5 if "c" in (a, b) else 9, ((0,), (1,), (2,))),   # a factor below 2
        ("a", 0, None, ((0,),)),
    ],
)
def test_nodes_are_found(hosts, within, between, expected):
    assert group(list(hosts), matrix(hosts, within, between)) == expected


def test_ranks_of_one_host_are_one_node_unless_a_wire_is_between_them():
    noisy = matrix((0, 0, 1, 1), 4e9, lambda a, b: 1e9)
    assert group(["a"] * 4, noisy) == ((0, 1, 2, 3),)
    wire = matrix((0, 0, 1, 1), 4e9, lambda a, b: 1e8)
    assert group(["a"] * 4, wire) == ((0, 1), (2, 3))


def test_the_two_directions_of_a_link_are_averaged():
    one_way = np.array([[0, 1, 1], [1, 0, 1], [1, 1, 0]], dtype=float)
    one_way[0, 1] = 9.0
    assert group("abc", one_way) == group("abc", one_way.T) == ((0, 1), (2,))


def random_case(seed):
    generator = np.random.default_rng(seed)
    size = int(generator.integers(1, 9))
    return [int(host) for host in generator.integers(0, 4, size)], 10.0 ** generator.uniform(6, 10, (size, size))


@pytest.mark.parametrize("seed", range(60))
def test_laws_of_grouping(seed):
    hosts, bandwidth = random_case(seed)
    nodes = group(hosts, bandwidth)
    Topology(nodes=nodes)       # a partition, in order
    renamed = [f"node-{(host * 7 + 3) % 11}" for host in hosts]
    assert group(renamed, bandwidth) == nodes, "names of hosts mean nothing"
    for scale in (1e-6, 3.7, 2.0**20):
        assert group(hosts, bandwidth * scale) == nodes, "nor do units"
    order = np.random.default_rng(seed + 1000).permutation(len(hosts))
    moved = group([hosts[rank] for rank in order], bandwidth[np.ix_(order, order)])
    assert {frozenset(int(order[rank]) for rank in node) for node in moved} == {frozenset(node) for node in nodes}


@pytest.mark.parametrize("hosts, bandwidth", [([], np.zeros((0, 0))), (["a"], np.zeros((2, 2))),
                                              (["a", "b"], np.zeros((2, 2))), (["a", "b"], np.full((2, 2), np.nan))])
def test_a_wrong_matrix_is_refused(hosts, bandwidth):
    with pytest.raises(ValueError, match="Received"):
        group(hosts, bandwidth)


@pytest.mark.parametrize("players", range(1, 10))
def test_in_a_tournament_each_two_meet_once_and_nobody_twice_at_a_time(players):
    turns = tournament(range(players))
    assert len(turns) == (0 if players == 1 else players - 1 + players % 2)
    assert sorted(itertools.chain(*turns)) == list(itertools.combinations(range(players), 2))
    for turn in turns:
        assert len(set(itertools.chain(*turn))) == 2 * len(turn)


def test_a_latency_is_no_more_than_the_fastest_transfer_took():
    """Where a shaper's burst makes small messages quicker than the line through the large ones."""
    sizes = [1e3, 1e6, 2e6, 4e6]
    link = fit_link(sizes, [1e-4, 3.0, 3.1, 3.3])
    assert 0.0 <= link.latency_s <= 1e-4


def test_one_node_of_several_ranks_is_enough_for_a_second_level():
    assert not Topology(nodes=((0,), (1, 2))).is_flat and not Topology(nodes=((0, 1), (2,))).is_flat


@pytest.mark.parametrize("nodes", [((), (0, 1)), ((0, 1), (3, 2)), ((0, 2), (1,), ())])
def test_a_single_node_that_is_wrong_is_refused(nodes):
    with pytest.raises(ValueError, match="nodes: expected"):
        Topology(nodes=nodes)


def test_a_topology_is_told_with_the_links_that_were_measured():
    local, cross = Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9), Link(latency_s=1e-3, bandwidth_bytes_per_s=1e8)
    for links in ({}, {"local": local}, {"cross": cross}, {"local": local, "cross": cross}):
        topology = Topology(nodes=((0, 1), (2,)), **links)
        found = Topology.from_dict(json.loads(json.dumps(topology.as_dict())))
        assert found == topology and (found.local, found.cross) == (links.get("local"), links.get("cross"))


def test_a_topology_is_one_of_as_many_ranks_as_there_are():
    Topology(nodes=((0, 1), (2,))).check_size(3)
    with pytest.raises(ValueError, match="topology: expected one of 4 ranks.* Received: one of 3 ranks in 2 nodes"):
        Topology(nodes=((0, 1), (2,))).check_size(4)


def test_two_hosts_are_as_near_as_their_fastest_link():
    bandwidth = matrix("aabbcc", 100.0, lambda a, b: 1.0)
    bandwidth[1, 2] = bandwidth[2, 1] = 60.0
    assert group("aabbcc", bandwidth) == ((0, 1, 2, 3), (4, 5))


def test_a_bandwidth_without_end_is_none():
    with pytest.raises(ValueError, match="bandwidth: expected finite numbers"):
        group("ab", np.full((2, 2), np.inf))


def test_a_message_of_no_bytes_takes_the_latency():
    assert Link(latency_s=0.25, bandwidth_bytes_per_s=1e6).time_s(0) == 0.25
    assert Link(latency_s=0.0, bandwidth_bytes_per_s=0.5).time_s(1) == 2.0, "of less than a byte a second, too"
    with pytest.raises(ValueError, match="size_bytes: expected 0 or more. Received: -1"):
        Link(latency_s=0.25, bandwidth_bytes_per_s=1e6).time_s(-1)


@pytest.mark.parametrize(("sizes", "times"), [
    ([1, 2, np.inf], [1, 2, 3]), ([1, 2, 3], [1, 2, np.inf]), ([1, 2, 0], [1, 2, 3]), ([1, 2, 3], [1, 2, 0]),
    ([1, 2, -3], [1, 2, 3]), ([1, 2, 3], [1, 2, -3]), ([[1, 2]], [[1, 2]]),
])
def test_one_time_that_is_wrong_is_refused_among_others(sizes, times):
    with pytest.raises(ValueError, match="sizes_bytes and seconds: expected"):
        fit_link(sizes, times)


def test_a_latency_is_that_of_undisturbed_transfers_or_of_the_typical_one():
    link = Link(latency_s=1e-3, bandwidth_bytes_per_s=1e8)
    times = [factor * seconds for factor in (1.0, 1.2, 1.4) for seconds in times_of(link, SIZES)]
    usual, typical = fit_link(SIZES * 3, times), fit_link(SIZES * 3, times, typical=True)
    assert usual.latency_s == pytest.approx(1e-3, rel=0.03) and typical.latency_s == pytest.approx(1.2e-3, rel=0.02)
    assert usual.bandwidth_bytes_per_s == typical.bandwidth_bytes_per_s == pytest.approx(1e8 / 1.2)


def test_the_slope_is_that_of_least_squares_with_noise_that_grows_with_the_time():
    sizes, times = [1.0, 100.0, 200.0, 400.0, 800.0], [0.001, 1.1, 1.9, 4.3, 7.5]
    slope = np.polyfit(sizes[1:], times[1:], 1, w=np.asarray(times[1:]) ** -0.5)[0]  # the first says nothing of it
    assert fit_link(sizes, times).bandwidth_bytes_per_s == pytest.approx(1.0 / slope)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e6])
def test_of_several_gaps_the_widest_parts_nodes(scale):
    """In whatever unit, and wherever among them it is."""
    for slow, slower, nodes in ((3.0, 1.0, ((0, 1), (2,), (3,))), (28.0, 1.0, ((0, 1, 2), (3,))),
                                (12.0, 1.0, ((0, 1, 2), (3,))), (3.0, 2.0, ((0, 1), (2,), (3,)))):
        joins = {"ab": 30.0, "ac": slow, "bc": slow, "ad": slower, "bd": slower, "cd": slower}
        bandwidth = matrix("abcd", 0.0, lambda a, b, joins=joins: joins["".join(sorted((a, b)))])
        assert group("abcd", scale * bandwidth) == nodes


@pytest.mark.parametrize("nodes", [[[0, 1], [2]], (range(2), range(2, 3)), ((0, 1), np.array([2])), ([0, 1], {2})])
def test_nodes_may_be_anything_that_lists_ranks(nodes):
    assert Topology(nodes=nodes) == Topology(nodes=((0, 1), (2,)))
    assert Topology(nodes=((rank,) for rank in range(2))).nodes == ((0,), (1,))

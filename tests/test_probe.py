"""The probe on simulated links, where the truth is known; its cache; and once on real ranks."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from launch import horovodrun
from simulated import Network, SimulatedEngine

from hvd_hetero.engine.build import installed_build
from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.engine.probe import probe
from hvd_hetero.engine.probe_result import ProbeResult
from hvd_hetero.policy.link import Link

FAST = Link(latency_s=0.0005, bandwidth_bytes_per_s=2e9)
SLOW = Link(latency_s=0.0012, bandwidth_bytes_per_s=12.5e6)
SLOWEST = Link(latency_s=0.003, bandwidth_bytes_per_s=4e6)


def run(network, folder, *, errors="raise", speed=lambda rank: 10.0 + rank, describe=None, **options):
    """What `probe` returned on each rank; `options` may be functions of the rank."""

    def program(inner):
        engine = SimulatedEngine(inner, network)
        mine = {name: value(inner.rank) if callable(value) else value for name, value in options.items()}
        found = probe(engine, clock=engine.clock, folder=folder(inner.rank) if callable(folder) else folder,
                      describe=lambda: (describe or network.device)(inner.rank),
                      benchmark=lambda clock: speed(inner.rank), **mine)
        return found, engine.calls

    outcome = World(len(network.hosts)).run(program, errors=errors)
    if errors == "return":
        return outcome
    (first, calls), *others = outcome
    for found, other_calls in others:
        assert found == first, "all ranks hold the same"
        assert other_calls == calls, "after the same calls"
    return first


def by_hosts(hosts, local=FAST, cross=SLOW):
    return lambda a, b: local if hosts[a] == hosts[b] else cross


def assert_near(found, link):
    assert found.latency_s == pytest.approx(link.latency_s, rel=0.05)
    assert found.bandwidth_bytes_per_s == pytest.approx(link.bandwidth_bytes_per_s, rel=0.05)


@pytest.mark.parametrize("hosts, nodes", [
    ("ab", ((0,), (1,))), ("aa", ((0, 1),)), ("aab", ((0, 1), (2,))), ("aaab", ((0, 1, 2), (3,))),
    ("aabb", ((0, 1), (2, 3))), ("abab", ((0, 2), (1, 3))),
])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_links_are_found_as_they_are(hosts, nodes, noise, tmp_path):
    found = run(Network(tuple(hosts), by_hosts(hosts), noise=noise), tmp_path)
    assert found.topology.nodes == found.hosts == nodes
    truth = by_hosts(hosts)
    for a in range(len(hosts)):
        assert found.latency_s[a][a] == 0.0 and found.bandwidth_bytes_per_s[a][a] == math.inf
        for b in range(a):
            assert_near(Link(latency_s=found.latency_s[a][b],
                             bandwidth_bytes_per_s=found.bandwidth_bytes_per_s[a][b]), truth(a, b))
            assert found.latency_s[a][b] == found.latency_s[b][a]
            assert found.bandwidth_bytes_per_s[a][b] == found.bandwidth_bytes_per_s[b][a]
    if len(set(hosts)) < len(hosts):
        assert_near(found.topology.local, FAST)
    else:
        assert found.topology.local is None
    if len(nodes) > 1:
        assert_near(found.topology.cross, SLOW)
    else:
        assert found.topology.cross is None
    assert found.seconds < 10 and not found.cached
    assert ProbeResult.from_dict(json.loads(json.dumps(found.as_dict()))) == found


def test_the_slowest_link_of_a_level_counts_and_racks_are_nodes(tmp_path):
    def link(a, b):
        return FAST if (a < 2) == (b < 2) else SLOWEST if {a, b} == {0, 3} else SLOW

    found = run(Network(tuple("abcd"), link), tmp_path)
    assert found.hosts == ((0,), (1,), (2,), (3,)) and found.topology.nodes == ((0, 1), (2, 3))
    assert_near(found.topology.cross, SLOWEST)
    assert_near(found.topology.local, FAST)


@pytest.mark.parametrize("shared, factor", [(True, 2.0), (False, 1.0)])
def test_rails_that_share_a_wire_are_told_from_those_that_do_not(shared, factor, tmp_path):
    found = run(Network(tuple("aabb"), by_hosts("aabb"), shared=shared), tmp_path)
    assert np.allclose(found.contended, [[1, factor], [factor, 1]], rtol=0.05)


def test_a_partner_that_comes_late_is_not_taken_for_a_slow_link(tmp_path):
    for late_s in ((0.02, 0.0), (0.0, 0.02)):
        found = run(Network(tuple("ab"), lambda a, b: SLOW, late_s=late_s), tmp_path, fresh=True)
        assert_near(found.topology.cross, SLOW)


@pytest.mark.parametrize(("most", "kept"), [(0.4, False), (0.7, True)])
def test_what_was_found_on_a_busy_machine_is_not_kept(tmp_path, monkeypatch, most, kept):
    def stalled():
        return run(Network(tuple("ab"), lambda a, b: FAST, stall_s=0.04), tmp_path)  # half of them

    stalled()
    monkeypatch.setattr("hvd_hetero.engine.probe.MOST_STALLED", most)
    assert stalled().cached == kept, "nor is it taken where an earlier version has kept it"
    assert stalled().cached == kept


def test_transfers_that_stall_are_counted_and_do_not_bend_the_links(tmp_path):
    found = run(Network(tuple("ab"), lambda a, b: FAST, stall_s=0.04), tmp_path)
    assert_near(found.topology.cross, FAST)
    assert 0.4 < found.stalled < 0.6
    endless = run(Network(tuple("ab"), lambda a, b: FAST, stall_s=8.0), tmp_path, fresh=True)
    assert endless.seconds < 10.0 + 8.0, "at most one transfer too many"
    assert run(Network(tuple("ab"), lambda a, b: SLOW), tmp_path, fresh=True).stalled == 0.0


@pytest.mark.parametrize("budget_s", [1.0, 2.0, 10.0])
def test_the_budget_is_kept(budget_s, tmp_path):
    slow = Link(latency_s=0.002, bandwidth_bytes_per_s=1e6)
    found = run(Network(tuple("aabbccdd"), by_hosts("aabbccdd", cross=slow)), tmp_path, budget_s=budget_s)
    assert found.seconds < budget_s
    assert found.topology.cross.bandwidth_bytes_per_s == pytest.approx(1e6, rel=0.05)
    if budget_s == 10.0:
        assert found.seconds > 2.0, "or else the smaller budgets would not have shortened anything"


def test_one_rank_alone(tmp_path):
    network = Network(("a",), lambda a, b: FAST)
    found = probe(SoloEngine(), folder=tmp_path, describe=lambda: network.device(0), benchmark=lambda clock: 1.0)
    assert found.topology.nodes == ((0,),) and found.topology.local is None and found.shares == (1.0,)


def test_shares_follow_speed_and_cores_are_divided_among_those_who_run_on_them(tmp_path):
    network = Network(tuple("aab"), by_hosts("aab"))
    assert run(network, tmp_path, speed=lambda rank: (1.0, 2.0, 1.0)[rank]).shares == (0.2, 0.4, 0.4)
    # two hosts that are emulated on one machine share its cores all the same
    found = run(network, tmp_path, describe=lambda rank: replace(network.device(rank), machine="one"),
                speed=lambda rank: (1.0, 2.0, 1.0)[rank])
    assert found.shares == (0.25, 0.5, 0.25)


def test_shares_follow_what_containers_of_one_machine_may_use_of_it(tmp_path):
    network = Network(tuple("aabc"), by_hosts("aabc"))
    quotas = (8.0, 8.0, 8.0, 2.0)  # of the container of each rank

    def describe(rank):
        return replace(network.device(rank), machine="one", affinity="0-31", cores=quotas[rank])

    found = run(network, tmp_path, describe=describe, speed=lambda rank: 1.0)
    assert found.shares == pytest.approx([4 / 18, 4 / 18, 8 / 18, 2 / 18])


def test_the_cache_holds_what_was_measured_on_the_same_hardware(tmp_path):
    network = Network(tuple("aab"), by_hosts("aab"))
    first = run(network, tmp_path)
    network.link = by_hosts("aab", cross=FAST)
    kept = run(network, tmp_path)
    assert kept.cached and replace(kept, cached=False) == first
    fresh = run(network, tmp_path, fresh=True)
    assert not fresh.cached and fresh.topology.cross.bandwidth_bytes_per_s > 1e9
    assert replace(run(network, tmp_path), cached=False) == fresh, "a fresh result replaces the old one"
    assert not run(Network(tuple("abb"), by_hosts("abb")), tmp_path).cached, "other ranks on the same hosts"
    changed = run(network, tmp_path, describe=lambda rank: replace(network.device(rank), cores=1.0 + rank))
    assert not changed.cached, "other hardware"
    assert not run(network, tmp_path, budget_s=20.0).cached, "that took less time"
    assert run(network, tmp_path, budget_s=5.0).cached
    noted = run(network, tmp_path, describe=lambda rank: replace(network.device(rank), notes=("other",)))
    assert noted.cached, "notes are no hardware"


def test_what_was_measured_over_another_interface_is_measured_anew(tmp_path, monkeypatch):
    network = Network(tuple("aab"), by_hosts("aab"))
    for interface, cached in (("eth0", False), ("eth0", True), ("ib0", False)):
        monkeypatch.setenv("HOROVOD_GLOO_IFACE", interface)
        assert run(network, tmp_path).cached is cached


def test_a_user_without_a_home_folder_measures_each_time(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", nowhere)
    network = Network(tuple("ab"), by_hosts("ab"))
    assert not run(network, None).cached and not run(network, None).cached


@pytest.mark.parametrize("damage", [
    lambda text: "", lambda text: "not json", lambda text: text[: len(text) // 2], lambda text: "[1]",
    lambda text: json.dumps({**json.loads(text), "key": "other"}), lambda text: text.replace("latency_s", "lat\u2028"),
    lambda text: text.replace('"nodes": [[0, 1], [2]]', '"nodes": [[0, 1]]'), lambda text: "\x00\x85\x1c",
    lambda text: "{}",
])
def test_a_corrupt_cache_is_ignored(damage, tmp_path):
    network = Network(tuple("aab"), by_hosts("aab"))
    run(network, tmp_path)
    (file,) = tmp_path.iterdir()
    before = file.read_text()
    assert damage(before) != before
    file.write_text(damage(before), encoding="utf-8")
    assert not run(network, tmp_path).cached
    assert run(network, tmp_path).cached, "and it is whole again"
    assert [path.name for path in tmp_path.iterdir()] == [file.name], "nothing half-written is left"


def test_only_rank_0s_cache_counts_and_one_that_cannot_be_written_is_no_error(tmp_path):
    network = Network(tuple("ab"), by_hosts("ab"))
    (tmp_path / "file").write_text("")
    for _ in range(2):
        assert not run(network, tmp_path / "file" / "folder").cached
    run(network, lambda rank: tmp_path / str(rank))
    assert (tmp_path / "0").exists() and not (tmp_path / "1").exists()
    assert not run(network, lambda rank: tmp_path / str(1 - rank)).cached


def failing(rank):
    raise OSError("no such device")


@pytest.mark.parametrize("wrong, error, text", [
    ({"describe": lambda rank: failing(rank) if rank == 1 else Network(("a",) * 3, FAST).device(rank)}, RuntimeError,
     "rank 1: OSError: no such device"),
    ({"speed": lambda rank: failing(rank) if rank == 1 else 1.0}, RuntimeError, "Received: none of rank 1"),
    ({"budget_s": lambda rank: 5.0 + rank}, ValueError, "budget_s: expected the same on every rank.*rank 1: 6.0"),
    ({"fresh": lambda rank: rank == 2}, ValueError, "fresh: expected the same on every rank"),
    ({"budget_s": 0.0}, ValueError, "budget_s: expected above 0"),
])
def test_what_is_wrong_on_one_rank_is_said_on_every_rank(wrong, error, text, tmp_path):
    outcome = run(Network(tuple("aab"), by_hosts("aab")), tmp_path, errors="return", **wrong)
    assert [type(each) for each in outcome] == [error] * 3
    assert all(re.search(text, str(each)) for each in outcome), outcome


@pytest.mark.horovod
@pytest.mark.skipif(installed_build() is None, reason="no Horovod installed: run `hvd-hetero build-horovod`")
def test_real_ranks_on_two_hosts(tmp_path):
    options = ("-H", "localhost:2,127.0.0.1:1")
    arguments = ("--json", str(tmp_path / "probe.json"), "--picture", str(tmp_path / "probe.png"))
    for again in (False, True):
        launched = horovodrun(3, "probe_worker.py", *arguments, options=options, XDG_CACHE_HOME=str(tmp_path / "cache"))
        assert launched.returncode == 0, launched.output[-4000:]
        found = ProbeResult.from_dict(json.loads((tmp_path / "probe.json").read_text()))
        assert found.cached == again
    assert found.topology.nodes == ((0, 1), (2,))
    for link in (found.topology.local, found.topology.cross):
        assert 0 < link.latency_s < 0.5 and 1e6 < link.bandwidth_bytes_per_s < 1e12
    assert found.seconds < 20 and math.fsum(found.shares) == pytest.approx(1.0)
    assert "node 0" in launched.output and "127.0.0.1" in launched.output
    assert (tmp_path / "probe.png").read_bytes()[:4] == b"\x89PNG"

"""`hvd-hetero probe`: its rows, its words and its picture; the launch with real ranks is in test_probe.py."""

import json
import sys

import pytest
from simulated import Network

from hvd_hetero.cli import console, probe_picture, probe_table
from hvd_hetero.cli.main import main
from hvd_hetero.engine.probe_result import ProbeResult
from hvd_hetero.policy.link import Link
from hvd_hetero.policy.topology import Topology


@pytest.fixture
def solo(monkeypatch, tmp_path):
    for name in ("HOROVOD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def found_on(hosts, rates):
    """A probe of ranks on `hosts`, without measuring; `rates[a, b]` is the bandwidth of two ranks, 1e9 if missing."""
    ranks = range(len(hosts))
    nodes = tuple(tuple(rank for rank in ranks if hosts[rank] == host) for host in dict.fromkeys(hosts))
    network = Network(tuple(hosts), lambda a, b: Link(latency_s=0.0, bandwidth_bytes_per_s=1.0))
    rate = [[float("inf") if a == b else rates.get((min(a, b), max(a, b)), 1e9) for b in ranks] for a in ranks]
    return ProbeResult(
        devices=tuple(map(network.device, ranks)), core_gflop_per_s=(10.0,) * len(hosts), hosts=nodes,
        latency_s=tuple(tuple(0.0 if a == b else 1e-3 for b in ranks) for a in ranks),
        bandwidth_bytes_per_s=tuple(map(tuple, rate)), contended=tuple((1.5,) * len(nodes) for _ in nodes),
        empty_s=1e-3, stalled=0.0, topology=Topology(nodes=nodes), seconds=2.0,
    )


def test_each_row_shows_the_slowest_link_that_it_stands_for():
    rows = probe_table.link_rows(found_on("aaabb", {(0, 2): 5e8, (1, 2): 7e8, (2, 3): 1e7, (0, 4): 2e7}))
    assert [(row.title, row.bandwidth_bytes_per_s) for row in rows] == [
        ("within node 0", 5e8), ("within node 1", 1e9), ("node 0 – node 1", 1e7)]
    assert [(row.title, row.bandwidth_bytes_per_s) for row in probe_table.by_level(rows)] == [
        ("slowest within a node", 5e8), ("slowest between nodes", 1e7)]


@pytest.mark.parametrize("seconds, text", [(0.0, "0 µs"), (85e-6, "85 µs"), (9.9999e-4, "1 ms"), (0.0123, "12.3 ms"),
                                           (3.4, "3.4 s"), (599.0, "599 s"), (700.0, "12 min"),
                                           (11085.0, "3 h 5 min"), (float("inf"), "inf s")])
def test_seconds_are_for_people(seconds, text):
    assert console.seconds_text(seconds) == text


def test_what_the_links_make_one_expect_is_said_where_there_are_several_nodes():
    slow, fast = (Link(latency_s=1e-4, bandwidth_bytes_per_s=rate) for rate in (12.5e6, 1e9))
    found = found_on("aabb", {})
    assert probe_table.expectations(found) == []
    known = Topology(nodes=((0, 1), (2, 3)), local=fast, cross=slow)
    said = probe_table.expectations(ProbeResult(**{**vars(found), "topology": known}))
    assert "in one level 2.01 s, in two levels 1.38 s, with fp16 between nodes 705 ms, with int8 369 ms" in said[0]
    assert probe_table.expectations(found_on("aaaa", {})) == []


def test_the_tables_say_what_was_found(capsys):
    probe_table.show(found_on("aab", {(0, 2): 12.5e6, (1, 2): 12.5e6}))
    said = capsys.readouterr().out
    for words in ("12.5 MB/s", "1,000 MB/s", "node 0: ranks 0, 1; node 1: rank 2", "25.0 %", "50.0 %", "in 2.0 s"):
        assert words in said, words
    assert "× slower" not in said, "one rank on a side: nothing to share"
    probe_table.show(found_on("aabb", {}))
    assert "1.5 × slower" in capsys.readouterr().out
    probe_table.show(found_on("abcdefgh", {(0, 7): 1e6}))       # 28 links
    said = capsys.readouterr().out
    assert "slowest between nodes" in said and "1 MB/s" in said and "node 1 – node 2" not in said


@pytest.mark.parametrize("hosts", ["a", "ab", "aabbbc", "abcdefgh"])
def test_the_picture_is_drawn(hosts, tmp_path):
    probe_picture.draw(found_on(hosts, {(0, 1): 1e7})).savefig(tmp_path / "probe.svg")
    text = (tmp_path / "probe.svg").read_text()
    assert text.count("<svg") == 1 and len(text) > 2000


def test_one_rank_sees_its_device_and_how_to_start_several(solo, capsys, tmp_path):
    assert main(["probe", "--json", str(tmp_path / "probe.json")]) == 0
    said = capsys.readouterr().out
    assert "GFLOP/s" in said and "horovodrun -np 4" in said
    found = ProbeResult.from_dict(json.loads((tmp_path / "probe.json").read_text()))
    assert found.size == 1 and found.core_gflop_per_s[0] > 0
    assert main(["probe", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cached"] is True
    assert main(["probe", "--json", "--fresh"]) == 0
    assert json.loads(capsys.readouterr().out)["cached"] is False


@pytest.mark.parametrize("words, code, message", [
    (["--budget", "0"], 2, "rank 0: budget_s: expected above 0"),
    (["--json", "missing/folder/file"], 1, "expected a file that can be written"),
    (["--picture", "missing/folder/probe.svg"], 1, "expected a file that can be written"),
    (["--picture", "probe.unknown"], 2, "expected a file name that ends in .png or .svg"),
])
def test_what_is_wrong_is_said_and_the_exit_status_tells(words, code, message, solo, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["probe", *words]) == code
    assert message in capsys.readouterr().err


def test_ranks_that_do_not_come_together_are_an_error_without_a_traceback(solo, capsys, monkeypatch):
    def start():
        raise RuntimeError("Expected 2 ranks, which HOROVOD_SIZE says were started.")

    monkeypatch.setenv("HOROVOD_SIZE", "2")
    monkeypatch.setattr("hvd_hetero.engine.binding.start", start)
    assert main(["probe"]) == 1
    assert capsys.readouterr().err.startswith("hvd-hetero probe: Expected 2 ranks")


def test_without_a_framework_it_says_what_to_do(solo, capsys, monkeypatch):
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "horovod.torch.mpi_ops", None)
    assert main(["probe"]) == 4
    assert "hvd-hetero build-horovod" in capsys.readouterr().err

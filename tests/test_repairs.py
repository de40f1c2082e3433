"""Every repair of `hvd-hetero build-horovod` on real processes. Few launches, each looked at by several tests."""

from __future__ import annotations

import collections
import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from launch import python_path

from hvd_hetero.engine.build import installed_build
from tests.repair import needs

WORKER = Path(__file__).parent / "workers" / "repair_worker.py"
HOROVODRUN = Path(sys.executable).with_name("horovodrun")
LIMIT_S = 90

pytestmark = [
    pytest.mark.horovod,
    pytest.mark.skipif(installed_build() is None, reason="no Horovod installed: run `hvd-hetero build-horovod`"),
]


class Launch(NamedTuple):
    """What came of one launch."""

    code: int
    text: str
    ranks: dict[int, dict]


def _end(process: subprocess.Popen, folder: Path) -> None:
    """Ends the launcher's process group and the ranks, which horovodrun puts into groups of their own."""
    ranks = [pid for path in folder.glob("*.pid") if _is_worker(pid := int(path.stem.split("-")[1]))]
    for end, target in [(os.killpg, process.pid), *((os.kill, pid) for pid in ranks)]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            end(target, signal.SIGKILL)
    process.wait()


def _is_worker(pid: int) -> bool:
    try:
        return WORKER.name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _launch(mode: str, folder: Path, ranks: int, hosts: str = "", **variables: str) -> Launch:
    command = [HOROVODRUN, "--gloo", "-np", str(ranks), "-H", hosts or f"localhost:{ranks}"]
    command += [sys.executable, WORKER, mode, folder]
    env = {n: v for n, v in os.environ.items() if not n.startswith("HOROVOD_")}
    env.update({"OMP_NUM_THREADS": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "20", "PYTHONPATH": python_path(WORKER.name)})
    env.update(variables)
    with (output := folder / "output").open("w") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            _end(process, folder)
    text = output.read_text(errors="replace")
    return Launch(code, text, {int(p.stem): json.loads(p.read_text()) for p in folder.glob("*.json")})


def _other_interface() -> str | None:
    """An interface that the host name does not resolve to, or None."""
    psutil = pytest.importorskip("psutil")
    resolved = set()
    with contextlib.suppress(OSError):
        resolved = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, addresses in psutil.net_if_addrs().items():
        v4 = [a.address for a in addresses if a.family == socket.AF_INET]
        if name in up and v4 and resolved.isdisjoint(v4):
            return name
    return None


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return _launch(
        "plain",
        tmp_path_factory.mktemp("plain"),
        2,
        HOROVOD_LOG_LEVEL="debug",
        HOROVOD_CYCLE_TIME="25",
        HOROVOD_STALL_CHECK_TIME_SECONDS="1",
        HOROVOD_TIMELINE="DYNAMIC",
        REPAIR_WORKER_IFACE=_other_interface() or "",
    )


@pytest.fixture(scope="module")
def speed(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return _launch(
        "speed",
        tmp_path_factory.mktemp("speed"),
        4,
        HOROVOD_BLOCKING_WAIT="1",
        HOROVOD_EVENT_DRIVEN_CYCLE="1",
        HOROVOD_CYCLE_TIME="2000",
        HOROVOD_GLOO_ALLREDUCE="hierarchical",
        HOROVOD_FUSION_LIMIT="1048576",
        HOROVOD_TIMELINE="DYNAMIC",
        REPAIR_WORKER_NODES="a,a,b,b",
        HOROVOD_DYNAMIC_PROCESS_SETS="1",
    )


def ended_well(launch: Launch, ranks: int) -> None:
    assert (launch.code, sorted(launch.ranks)) == (0, list(range(ranks))), launch.text[-3000:]


@needs("process_set_interface")
def test_every_context_listens_on_the_chosen_interface(plain: Launch) -> None:
    if (interface := _other_interface()) is None:
        pytest.skip("the host name resolves to every interface there is: nothing to tell apart")
    contexts = re.findall(r"(\S+) rendezvous started .*?iface=([^,]*),", plain.text)
    assert any("process_set_hash" in name for name, _ in contexts), plain.text[-3000:]
    assert {where for _, where in contexts} == {interface}, contexts


@needs("stall_inspector")
def test_a_late_rank_is_reported_under_gloo(plain: Launch) -> None:
    ended_well(plain, 2)
    assert re.search(r"\b1: \[allreduce\.late_tensor\]", plain.text), plain.text[-3000:]


@needs("vectorised_half")
def test_sums_of_half_precision_are_no_slower_than_single(plain: Launch) -> None:
    # Half as many bytes in half the time; with Gloo's scalar sums, fp16 takes more than twice as long as fp32.
    # Closer for both ranks together: which of them spends time on taking messages in changes from run to run.
    ended_well(plain, 2)
    for seen in plain.ranks.values():
        assert seen["half_s"] < 2 * seen["single_s"], seen
    half_s, single_s = (sum(seen[f"{name}_s"] for seen in plain.ranks.values()) for name in ("half", "single"))
    assert half_s < 1.5 * single_s, plain.ranks


def test_sums_in_place_are_right(plain: Launch) -> None:
    ended_well(plain, 2)
    for seen in plain.ranks.values():
        assert seen["half_right"] and seen["single_right"], seen


@needs("half_assignment")
def test_sums_of_half_precision_lose_nothing(plain: Launch) -> None:
    ended_well(plain, 2)
    for seen in plain.ranks.values():
        assert seen["half_exact"] and seen["half_few"] == [29488.0] * 3, seen


@needs("released_when_done")
def test_horovods_thread_has_no_business_with_pythons_objects(plain: Launch) -> None:
    ended_well(plain, 2)
    for seen in plain.ranks.values():
        assert not seen["ended_aside"], collections.Counter(seen["ended_aside"])
        assert seen["ends_under_lock"], "Horovod's thread waits for Python's"


def test_without_its_variable_the_cycle_is_as_upstream(plain: Launch) -> None:
    for seen in plain.ranks.values():
        assert seen["cycles_s"] > 0.2, seen  # ten cycles of 25 ms


def test_without_its_variable_all_tensors_travel_as_one(plain: Launch) -> None:
    ended_well(plain, 2)
    assert plain.ranks[0]["fused"] == ["small", "also small", "large", "also large"]


@needs("fusion_limit")
def test_tensors_beyond_the_limit_travel_by_themselves(speed: Launch) -> None:
    ended_well(speed, 4)
    assert speed.ranks[0]["fused"] == ["small", "also small"]


@needs("gloo_hierarchy")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_in_two_levels_are_exact(speed: Launch, ranks: int) -> None:
    ended_well(speed, 4)
    sums = [seen["wrong"][str(ranks)] for seen in speed.ranks.values() if str(ranks) in seen["wrong"]]
    assert len(sums) == ranks and not any(sums), sums


@needs("gloo_loop")
def test_an_idle_rank_sleeps(speed: Launch) -> None:
    ended_well(speed, 4)
    for seen in speed.ranks.values():
        assert seen["idle_wake_ups"] < 100, seen  # each of several event threads alone would come to 100


@needs("blocking_wait")
def test_waiting_takes_no_processor_time(speed: Launch) -> None:
    ended_well(speed, 4)
    for seen in (speed.ranks[rank] for rank in (1, 2, 3)):  # rank 0 is the late one
        assert seen["wait_s"] > 1.2 and seen["wait_cpu_s"] < 0.3 * seen["wait_s"], seen


@needs("event_driven_cycle")
def test_a_long_cycle_costs_no_latency(speed: Launch) -> None:
    ended_well(speed, 4)
    for seen in speed.ranks.values():
        assert seen["ping_s"] < 8.0, seen  # twenty cycles of 2 s are 40 s
        assert seen["many_right"], seen


@needs("event_driven_cycle")
def test_changes_of_process_sets_do_not_wait_for_many_cycles(speed: Launch) -> None:
    ended_well(speed, 4)
    for seen in speed.ranks.values():
        assert seen["add_set_s"] < 6.0 and seen["remove_set_s"] < 6.0 and seen.get("added_right", True), seen


@needs("event_driven_cycle")
def test_join_and_shutdown_work_with_events(speed: Launch) -> None:
    ended_well(speed, 4)
    assert speed.ranks[3]["joined_sum"] == 1.0
    for seen in speed.ranks.values():
        assert seen["last_joined"] == 3 and seen["after_join"] == 4.0, seen
        assert seen["shutdown_s"] < 6.0, seen


@needs("allgather_with_joined")
def test_gathering_while_others_have_joined_is_an_error_and_no_crash(speed: Launch) -> None:
    ended_well(speed, 4)
    assert "not supported with Join" in speed.ranks[3]["gather"], speed.ranks[3]


@pytest.fixture(scope="module")
def hierarchy(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    settings = {"HOROVOD_GLOO_ALLREDUCE": "hierarchical", "REPAIR_WORKER_NODES": "a,b,a,c,c"}
    return _launch("hierarchy", tmp_path_factory.mktemp("hierarchy"), 5, HOROVOD_BLOCKING_WAIT="1", **settings)


@needs("gloo_hierarchy")
def test_sums_in_two_levels_are_in_the_order_of_nodes_bit_for_bit(hierarchy: Launch) -> None:
    ended_well(hierarchy, 5)
    for seen in hierarchy.ranks.values():
        assert seen["wrong"] == [] and seen["extremes"] == [0.0, 4.0], seen


@needs("gloo_send_buffer")
def test_small_sums_leave_the_send_buffers_alone(hierarchy: Launch) -> None:
    ended_well(hierarchy, 5)
    least = int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split()[1])  # what the kernel begins with
    for seen in hierarchy.ranks.values():
        assert seen["least_send_buffer"] >= least, seen


@needs("cross_scope")
@pytest.mark.parametrize("algorithm", [pytest.param("ring", marks=pytest.mark.slow), "hierarchical"])
def test_a_process_set_may_have_some_of_a_nodes_ranks(tmp_path: Path, algorithm: str) -> None:
    settings = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "8", "HOROVOD_GLOO_ALLREDUCE": algorithm}
    launch = _launch("uneven_set", tmp_path, 4, "localhost:2,127.0.0.1:2", **settings)
    ended_well(launch, 4)
    assert [launch.ranks[rank]["total"] for rank in range(4)] == [3.0, 3.0, 0.0, 3.0]


@needs("peer_death_with_process_sets")
@pytest.mark.parametrize("algorithm", [pytest.param("ring", marks=pytest.mark.slow), "hierarchical"])
def test_survivors_of_a_dead_peer_raise_and_end(tmp_path: Path, algorithm: str) -> None:
    settings = {"HOROVOD_GLOO_ALLREDUCE": algorithm, "HOROVOD_LOG_LEVEL": "warning"}
    launch = _launch("peer_death", tmp_path, 3, **settings)
    ended_well(launch, 3)
    assert launch.ranks[2] == {"died_with": -signal.SIGKILL}
    assert [launch.ranks[r] for r in (0, 1)] == [{"error": "HorovodInternalError"}] * 2, launch.text[-3000:]


@needs("failure_disconnects")
def test_survivors_on_another_node_hear_of_a_death_at_once(tmp_path: Path) -> None:
    settings = {"HOROVOD_GLOO_ALLREDUCE": "hierarchical", "REPAIR_WORKER_NODES": "a,a,b,b"}
    launch = _launch("disconnect", tmp_path, 4, **settings)
    assert [launch.ranks[r].keys() for r in range(3)] == [{"heard_s"}] * 3, launch.text[-3000:]
    assert max(launch.ranks[r]["heard_s"] for r in range(3)) < 10.0, "not after Gloo's time-out of 20 s"


@needs("failed_init")
def test_a_failed_initialisation_is_an_error_and_can_be_made_again(tmp_path: Path) -> None:
    launch = _launch("failed_init", tmp_path, 2, HOROVOD_GLOO_TIMEOUT_SECONDS="4")
    assert launch.ranks[0] == {"error": launch.ranks[0]["error"], "total": 2.0}, launch.text[-3000:]
    assert "initialization failed" in launch.ranks[0]["error"] and launch.ranks[1]["total"] == 2.0


@needs("connect_timeout")
def test_a_rank_that_is_lost_while_ranks_come_together_is_waited_for_once(tmp_path: Path) -> None:
    launch = _launch("lost_connect", tmp_path, 2, HOROVOD_GLOO_TIMEOUT_SECONDS="3", HOROVOD_ELASTIC="1")
    assert launch.ranks[1]["error"] != "none", launch.text[-3000:]
    assert launch.ranks[1]["waited_s"] < 8.0, launch.ranks[1]


@needs("fresh_settings")
def test_settings_that_are_fixed_stay_so_when_ranks_come_together_again() -> None:
    program = "import horovod.torch as hvd; hvd.init(); hvd.shutdown(); hvd.init(); hvd.shutdown()"
    fixed = {"HOROVOD_CYCLE_TIME": "5", "HOROVOD_FUSION_THRESHOLD": "1000000"}
    command = [HOROVODRUN, "--gloo", "-np", "1", sys.executable, "-c", program]
    subprocess.run(command, env={**os.environ, **fixed}, check=True, timeout=LIMIT_S)


@needs("quick_launch")
def test_a_launch_loads_no_framework(tmp_path: Path) -> None:
    for name in ("tensorflow", "torch"):
        (tmp_path / f"{name}.py").write_text("open(__file__ + '.loaded', 'w').close()\n")
    program = "import sys; from horovod.common.util import gloo_built; sys.exit(not gloo_built())"
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=True)
    assert not list(tmp_path.glob("*.loaded"))


@needs("gloo_hierarchy")
def test_an_unknown_algorithm_is_refused(tmp_path: Path) -> None:
    launch = _launch("bad_algorithm", tmp_path, 1, HOROVOD_GLOO_ALLREDUCE="star")
    error = launch.ranks[0]["error"]
    assert "must be ring or hierarchical" in error and "star" in error, launch.text


@needs("rendezvous_scope")
def test_a_scope_that_ends_leaves_the_lists_of_others_alone() -> None:
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    try:
        server.init(get_host_assignments(parse_hosts("somewhere:2"), 2))

        def ask(method: str, path: str, data: bytes | None = None) -> int:
            request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", data=data, method=method)
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            try:
                return int(opener.open(request, timeout=10).status)
            except urllib.error.HTTPError as error:
                return error.code

        assert ask("PUT", "local_somewhere/0", b"an address of this round") == 200
        # one of two leaves the local scope, then both leave the global one, then the other leaves the local one
        for path in ("local_somewhere/0", "global/0", "global/1", "local_somewhere/1"):
            ask("DELETE", path)
        assert ask("GET", "local_somewhere/0") == 404, "a stale address is still served"
    finally:
        server.stop()


@needs("own_host")
def test_a_host_that_debian_calls_127_0_1_1_is_this_one(monkeypatch):
    from horovod.runner.util import network

    names = {"me": "127.0.1.1", "other": "192.0.2.7", "nobody": None}
    monkeypatch.setattr(network, "resolve_host_address", names.get)
    assert network.filter_local_addresses(list(names)) == ["other", "nobody"]


@needs("as_many_ranks")
def test_there_are_as_many_ranks_as_np_says_and_other_hosts_need_not_be_there(tmp_path: Path) -> None:
    say = f"echo $HOROVOD_RANK of $HOROVOD_SIZE, $HOROVOD_LOCAL_SIZE here > {tmp_path}/$HOROVOD_RANK"
    command = [HOROVODRUN, "--gloo", "-np", "2", "-H", "localhost:3,nowhere.invalid:2", "sh", "-c", say]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["0 of 2, 2 here\n", "1 of 2, 2 here\n"]


@needs("as_many_ranks")
@pytest.mark.parametrize(("ranks", "needed"), [(1, "a:1"), (4, "a:4"), (5, "a:4,b:1"), (8, "a:4,b:4"), (9, "a:4,b:4")])
def test_hosts_are_filled_in_order(ranks, needed):
    from horovod.runner.launch import needed_hosts

    assert needed_hosts("a:4,b:4", ranks) == needed  # of 9 ranks, the launcher says that there are too few slots


@needs("as_many_ranks")
@pytest.mark.parametrize("hosts", ["localhost", "a b", "localhost:x", "a:1,"])
def test_what_is_no_list_of_hosts_is_told_what_one_looks_like(hosts):
    command = [HOROVODRUN, "--gloo", "-np", "1", "-H", hosts, "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode and "worker-0:2,worker-1:2" in done.stderr


@needs("host_list_error")
def test_of_a_list_of_hosts_the_wrong_one_is_named():
    from horovod.runner.common.util.hosts import parse_hosts_and_slots

    with pytest.raises(ValueError, match="Received: 'b' in 'a:1,b,c:2'"):
        parse_hosts_and_slots("a:1,b,c:2")


@needs("hosts_listed_twice")
def test_a_host_that_is_listed_twice_has_the_slots_of_both_entries():
    from horovod.runner.common.util.hosts import parse_hosts_and_slots
    from horovod.runner.launch import needed_hosts

    assert needed_hosts("a:2,b:3,a:2", 6) == "a:4,b:2"
    assert parse_hosts_and_slots("a:2,b:3,a:2") == (["a", "b"], {"a": 4, "b": 3})


@needs("hostfile_lines")
def test_a_hostfile_may_have_empty_lines_comments_and_hosts_of_one_slot(tmp_path: Path) -> None:
    from horovod.runner.common.util.hosts import parse_host_files

    (tmp_path / "hosts").write_text("# the fast ones\n\na slots=4\nb slots = 2  # half\n  \nc\nd slots=3 max_slots=5\n")
    assert parse_host_files(tmp_path / "hosts") == "a:4,b:2,c:1,d:3"
    (tmp_path / "hosts").write_text("a max_slots=8 slots=4\nb\tslots=2\nc max-slots=4\n")
    assert parse_host_files(tmp_path / "hosts") == "a:4,b:2,c:1"


TWO_SIGNALS = """
import signal
from horovod.runner import gloo_run

event = gloo_run.register_shutdown_event()
signal.raise_signal(signal.SIGTERM)
with event._cond:  # as the handler of the first signal holds it
    signal.raise_signal(signal.SIGINT)
print(event.is_set())
"""


@needs("two_signals")
def test_a_signal_may_come_while_another_one_is_handled():
    done = subprocess.run([sys.executable, "-c", TWO_SIGNALS], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout == "True\n", done.stderr


@needs("one_output")
def test_one_rank_may_have_its_output_in_a_file(tmp_path: Path) -> None:
    command = [HOROVODRUN, "--gloo", "-np", "1", "--output-filename", tmp_path, "echo", "here"]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    assert "here" in (tmp_path / "rank.0" / "stdout").read_text()


class Closed:
    """A stream of the launcher that nobody reads any more."""

    encoding = "ascii"

    def write(self, text: str) -> None:
        raise BrokenPipeError(text)


def passed_on(said: bytes, to: Any) -> bool:
    """Whether the launcher has read all that a rank has said, to pass it on to the stream `to`."""
    from horovod.runner.common.util.safe_shell_exec import prefix_connection

    source, sink = os.pipe()
    os.write(sink, said)
    os.close(sink)
    with os.fdopen(source, "rb", 0) as stream:
        prefix_connection(stream, to, "stdout", 1, False)
        return stream.closed  # as it does at the end


@needs("any_output")
@pytest.mark.parametrize(("said", "encoding", "passed"), [
    (b"Gr\xfcn\nand more", "utf8", "Gr\ufffdn\n[1]<stdout>:and more"),
    ("Grün\nand more".encode(), "ascii", "Gr\\xfcn\n[1]<stdout>:and more"),
])  # fmt: skip
def test_whatever_a_rank_prints_is_passed_on(said, encoding, passed):
    to = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    assert passed_on(said, to)
    to.seek(0)
    assert to.read() == f"[1]<stdout>:{passed}"


@needs("any_output")
@pytest.mark.parametrize("to", [Closed(), None])
def test_a_rank_whose_output_nobody_reads_goes_on(to):
    assert passed_on(b"one\ntwo\n", to)


@needs("any_output")
def test_the_files_have_what_the_launcher_cannot_show():
    from horovod.runner.gloo_run import MultiFile

    file = io.StringIO()
    assert passed_on("Grün\n".encode(), MultiFile([None, Closed(), file]))
    assert file.getvalue() == "[1]<stdout>:Grün\n"


def run_by_launcher(command: str, *, elastic: bool = True, host: str = "localhost", files: Path | None = None) -> int:
    """The exit status that the launcher hears of, of a rank that it is to start."""
    from horovod.runner.gloo_run import _exec_command_fn

    settings = SimpleNamespace(
        elastic=elastic, output_filename=files and str(files), num_proc=1, verbose=2, ssh_port=None,
        ssh_identity_file=None, prefix_output_with_timestamp=False,
    )  # fmt: skip
    code, _ = _exec_command_fn(settings)(command, SimpleNamespace(rank=0, hostname=host, local_rank=0), [])
    return code


@needs("heard_end")
@pytest.mark.parametrize("elastic", [True, False])
def test_a_rank_that_cannot_be_started_has_failed(tmp_path: Path, elastic, capsys):
    (tmp_path / "rank.0").write_text("where its folder should be")
    assert run_by_launcher("true", elastic=elastic, files=tmp_path) == 1
    assert "Process 0 failed: NotADirectoryError" in capsys.readouterr().out


@needs("heard_end")
@pytest.mark.parametrize("host", [".cluster", "a\0b"])
def test_a_rank_on_a_host_whose_name_is_none_has_failed(host):
    assert run_by_launcher("true", host=host) == 1


@needs("heard_end")
def test_a_rank_whose_output_a_full_disk_does_not_take_has_not_failed(tmp_path: Path, capsys):
    (tmp_path / "rank.0").mkdir()
    for name in ("stdout", "stderr"):
        (tmp_path / "rank.0" / name).symlink_to("/dev/full")
    assert run_by_launcher("echo said", files=tmp_path) == 0
    assert "lacks what Process 0 said" in capsys.readouterr().out


@needs("heard_end")
@pytest.mark.parametrize("elastic", [True, False])
@pytest.mark.parametrize(("command", "code"), [("exit 3", 1), ("true", 0)])
def test_a_rank_ends_as_it_ends_where_nobody_reads_it(monkeypatch, command, code, elastic):
    monkeypatch.setattr("sys.stdout", Closed())
    assert run_by_launcher(command, elastic=elastic) == code


@needs("last_words")
@pytest.mark.parametrize("verbose", [True, False])
@pytest.mark.parametrize(("asked", "said"), [
    (["-np", "1", "sh", "-c", "exit 3"], "Process name: 0\nExit code: 3"),
    (["-np", "1", "-H", "a:many", "true"], "'a:many'"),
    (["-np", "1", "--hostfile", "nowhere", "true"], "'nowhere'"),
])  # fmt: skip
def test_a_failed_horovodrun_ends_with_what_has_failed(tmp_path, asked, said, verbose):
    command = [HOROVODRUN, "--gloo", *(["--verbose"] if verbose else []), *asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=tmp_path)
    assert done.returncode == 1
    assert ("Traceback" in done.stderr) == verbose
    assert said in done.stderr[-100:]


@needs("launcher_cache")
@pytest.mark.parametrize("folder", ["new", "half-written", "no folder"])
def test_the_launchers_cache_is_whole_or_empty(tmp_path: Path, folder):
    from horovod.runner.util.cache import Cache

    place = tmp_path / "home"
    if folder == "no folder":
        place.write_text("a file")
    elif folder == "half-written":
        place.mkdir()
        (place / "cache.bin").write_bytes(b"(dp0")
    cache = Cache(str(place), 60, "these parameters")
    assert cache.get("interfaces") is None
    cache.put("interfaces", ["lo"])
    assert cache.get("interfaces") == ["lo"]
    again = Cache(str(place), 60, "these parameters").get("interfaces")
    assert again == (None if folder == "no folder" else ["lo"])
    assert folder == "no folder" or os.listdir(place) == ["cache.bin"]


@needs("restored_handlers")
@pytest.mark.parametrize("fails", [False, True])
def test_signals_do_after_a_launch_what_they_did_before(fails):
    from horovod.runner import gloo_run

    def launched() -> None:
        gloo_run.register_shutdown_event()
        if fails:
            raise RuntimeError("a rank failed")

    def here(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, here), signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
            gloo_run.with_handlers_restored(launched)()
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == (here, before[1])
    finally:
        signal.signal(signal.SIGTERM, before[0])

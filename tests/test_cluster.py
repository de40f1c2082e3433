"""The emulated cluster: shares of a core are kept, links are shaped, real launchers start, and nothing is left."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

CI = Path(__file__).resolve().parent.parent / "ci"
sys.path.insert(0, str(CI))

from emulation import Cluster, EmulatedRank, leftovers, network, quota  # noqa: E402

needs_namespaces = pytest.mark.skipif(bool(network.namespaces_missing()), reason=network.namespaces_missing() or "-")
needs_cgroup = pytest.mark.skipif(quota.writable_cgroup() is None, reason="no cgroup tree accepts a CPU quota from us")
needs_horovod = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")

SHARE = """
import os, sys, threading, time
from emulation_hold import hold, release
def burn():
    while True: pass
threading.Thread(target=burn, daemon=True).start()  # before hold(): it must catch every thread
def share(seconds):
    wall, cpu = time.monotonic(), time.process_time()
    time.sleep(seconds)
    return (time.process_time() - cpu) / (time.monotonic() - wall)
"""


@pytest.mark.parametrize("how", [pytest.param("cgroup", marks=needs_cgroup), "duty"])
def test_a_rank_gets_its_share_also_a_new_one_until_it_is_released(how: str, tmp_path: Path) -> None:
    found = []
    for attempt in range(3):  # a machine that others use takes time away in single seconds
        (folder := tmp_path / str(attempt)).mkdir()
        found.append(shares_of(how, folder))
        held, changed, released = (found[-1][word] for word in ("held", "changed", "released"))
        # A busy machine may give less, never more; and after the release what it has to spare.
        if 0.08 < held < 0.33 and 0.03 < changed < 0.15 and released > 0.16:
            return
    raise AssertionError(f"0.25 cores, then 0.1, then all: {found}")


def shares_of(how: str, tmp_path: Path) -> dict[str, float]:
    """The cores that a process got while it was held to 0.25, to 0.1, and released."""
    script = SHARE + (
        "assert hold(); print('held', share(1.2), flush=True); open('measured', 'w')\n"
        "while not os.path.exists('changed'): time.sleep(0.05)\n"
        "print('changed', share(1.0), flush=True)\n"
        "assert release(); print('released', share(0.5), flush=True)\n"
    )

    def change() -> None:
        wait_for((tmp_path / "measured").exists)
        cluster.set_cores(0, 0.1)
        (tmp_path / "changed").touch()

    with Cluster([EmulatedRank(cores=0.25)], quota=how) as cluster:
        changer = threading.Thread(target=change)
        changer.start()
        command = ["sh", "-c", f'cd {tmp_path} && exec {sys.executable} -c "$0"', script]
        done = cluster.processes(command, timeout_s=20)
        changer.join()
    assert done.returncode == 0, done.output
    return {word: float(number) for word, number in re.findall(r"(\w+) ([\d.]+)\n", done.output)}


@pytest.mark.parametrize("how", [pytest.param("cgroup", marks=needs_cgroup), "duty"])
def test_a_rank_can_be_stopped_for_a_while(how: str, tmp_path: Path) -> None:
    script = SHARE + (
        "assert hold(); last, longest = time.monotonic(), 0; end = last + 2.5; open('running', 'w')\n"
        "while last < end: time.sleep(0.01); now = time.monotonic(); longest, last = max(longest, now - last), now\n"
        "release(); print('longest', longest, flush=True); os._exit(0)\n"
    )

    def stop() -> None:
        wait_for((tmp_path / "running").exists)
        cluster.stop(0)
        time.sleep(1.0)
        cluster.stop(0, False)

    with Cluster([EmulatedRank(cores=0.25)], quota=how) as cluster:
        stopper = threading.Thread(target=stop)
        stopper.start()
        command = ["sh", "-c", f'cd {tmp_path} && exec {sys.executable} -c "$0"', script]
        done = cluster.processes(command, timeout_s=20)
        stopper.join()
    assert done.returncode == 0, done.output
    assert 0.9 < float(done.output.partition("longest")[2]) < 2.4


def test_hold_at_start_holds_commands_that_know_nothing_of_it() -> None:
    script = "import time; t = time.monotonic()\nwhile time.monotonic() < t + 1: pass\nprint(time.process_time())"
    with Cluster([EmulatedRank(cores=0.25)]) as cluster:
        done = cluster.processes([sys.executable, "-SE", "-c", script], timeout_s=20, hold_at_start=True)
    assert 0.08 < float(done.output.partition(":")[2]) < 0.35  # a busy machine may give less


def test_ranks_are_numbered_as_torchrun_does_and_one_alone_is_a_world_of_its_own() -> None:
    command = ["sh", "-c", "echo $HVD_EMULATION_RANK $RANK $LOCAL_RANK $LOCAL_WORLD_SIZE $WORLD_SIZE"]
    ranks = [EmulatedRank(cores=0.5), EmulatedRank(cores=0.5), EmulatedRank(cores=0.5, node=1)]
    with Cluster(ranks, network="loopback") as cluster:
        everyone = cluster.processes(command, timeout_s=20)
        alone = cluster.processes(command, timeout_s=20, ranks=[2])
    assert sorted(re.findall(r":(.*)", everyone.output)) == ["0 0 0 2 3", "1 1 1 2 3", "2 2 0 1 3"]
    assert alone.output == "[0]<stdout>:2 0 0 1 1\n"


@needs_namespaces
@pytest.mark.parametrize("nodes", [2, 3])
def test_links_are_shaped_and_nodes_have_names(nodes: int) -> None:
    script = """
import os, socket, time
assert socket.gethostname() == f"node{os.environ['RANK']}"
assert socket.gethostbyname(socket.gethostname()) == socket.gethostbyname("node" + os.environ["RANK"]) != "127.0.0.1"
here = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    connection = socket.create_server(here).accept()[0]
    began, size = time.monotonic(), 0
    while got := connection.recv(1 << 20): size += len(got)
    print(size * 8e-6 / (time.monotonic() - began))
elif int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
    with socket.socket() as connection:
        while connection.connect_ex(here): time.sleep(0.02)
        connection.sendall(bytes(10_000_000))
"""
    with Cluster([EmulatedRank(cores=0.5, node=node) for node in range(nodes)], link_mbit=100) as cluster:
        done = cluster.processes([sys.executable, "-c", script], timeout_s=20)
    assert done.returncode == 0, done.output
    assert 30 < float(done.output.partition(":")[2]) < 107  # Mbit/s; a busy machine may let less through, never more


@needs_namespaces
@needs_cgroup
def test_a_rank_on_a_node_sees_its_quota_as_in_a_container() -> None:
    script = (
        "from emulation_hold import hold, release; from hvd_hetero.engine.machine import CpuQuota\n"
        "quota = CpuQuota(); before = quota.cores(); hold(); held = quota.cores(); release()\n"
        "print(before, held, quota.cores())"
    )
    ranks = [EmulatedRank(cores=0.5), EmulatedRank(cores=0.25, node=1)]
    with Cluster(ranks, quota="cgroup") as cluster:
        done = cluster.processes([sys.executable, "-c", script], timeout_s=30)
    assert sorted(re.findall(r":(.*)", done.output)) == ["None 0.25 None", "None 0.5 None"], done.output


def test_one_failing_rank_ends_all_and_so_does_time() -> None:
    with Cluster([EmulatedRank(cores=0.5), EmulatedRank(cores=0.5)]) as cluster:
        failed = cluster.processes(["sh", "-c", "[ $RANK = 0 ] && exit 7; sleep 60"], timeout_s=30)
        late = cluster.processes(["sh", "-c", "trap '' TERM; setsid sleep 61 & echo on; wait; sleep 61"], timeout_s=0.5)
        assert not leftovers.marked(f"{cluster.name}/")
    assert (failed.returncode, failed.timed_out) == (7, False)
    assert failed.seconds < 10
    assert (late.returncode, late.timed_out) == (124, True)
    assert "[1]<stdout>:on" in late.output


def test_nothing_is_left_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), Cluster(mixed(), link_mbit=1000) as cluster:
        job = threading.Thread(target=cluster.processes, args=(["sleep", "62"],), kwargs={"timeout_s": 62})
        job.start()
        wait_for(lambda: len(leftovers.marked(f"{cluster.name}/")) >= 4)
        assert len(traces(cluster.name)) > 1
        raise ZeroDivisionError
    job.join(5)
    assert traces(cluster.name) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(number: signal.Signals, stub: Path) -> None:
    command = [str(CI / "cluster"), "--python", str(stub), "--", "sleep", "63"]
    running = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert running.stdout is not None
    while not (line := running.stdout.readline()).startswith("{"):
        assert line, "ci/cluster ended early"
    name = json.loads(line)["job"].partition("/")[0]
    wait_for(lambda: len(leftovers.marked(f"{name}/")) >= 2 and traces(name))  # the launcher and its rank
    running.send_signal(number)
    assert running.wait(15) == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    wait_for(lambda: number != signal.SIGKILL or not traces(name))  # killed, its keeper clears up a moment later
    assert traces(name) == []


def test_the_next_start_removes_what_nobody_could() -> None:
    script = (
        f"import sys, time; sys.path.insert(0, {str(CI)!r})\n"
        "from emulation import Cluster, EmulatedRank\n"
        "with Cluster([EmulatedRank(cores=0.5), EmulatedRank(cores=0.5, node=1)]) as cluster:\n"
        "    print(cluster.name, cluster.keeper_pid, flush=True); time.sleep(64)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    name, keeper = owner.stdout.readline().split()
    os.kill(int(keeper), signal.SIGKILL)
    owner.kill()
    owner.wait()
    assert traces(name)
    with Cluster([EmulatedRank(cores=0.5)]):
        assert traces(name) == []


def test_the_command_line_hands_over_to_horovodrun_and_returns_its_status(stub: Path) -> None:
    assert cluster_command("--check").stdout.startswith("speed of ranks: ")
    options = ["--cores", "0.5,0.25,0.25", "--nodes", "2", "--network", "loopback", "--python", str(stub)]
    done = cluster_command(*options, "--horovodrun=--verbose", "--", "exit", "9")
    assert done.returncode == 9
    assert "rank 2: 0.25 cores on 127.0.0.1" in done.stdout
    arguments = json.loads(done.stdout[done.stdout.index("{") :].splitlines()[0])["arguments"]
    assert arguments[:4] == ["-np", "3", "-H", "localhost:2,127.0.0.1:1"]
    assert {"--gloo", "--disable-cache", "--verbose"} <= set(arguments)
    assert arguments[-5:] == [str(stub), "-SE", str(CI / "emulation/worker/emulation_hold.py"), "exit", "9"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cores", "a,b", "--", "true"], "expected numbers like 0.8,0.4,0.2,0.2, received 'a,b'"),
        (["--nodes", "9", "--", "true"], "expected 1 to 4"),
        (["--cores", "0.05,1", "--", "true"], "a longer period_us allows smaller shares"),
        (["--network", "moon", "--", "true"], "expected one of auto, namespaces, loopback, received 'moon'"),
        (["--controller", "x", "--", "true"], 'expected "gloo" or "mpi"'),
        ([], "expected a command after --"),
        (["--python", "/nowhere/python", "--", "true"], "hvd-hetero build-horovod"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(arguments: list[str], message: str, stub: Path) -> None:
    done = cluster_command("--python", str(stub), *arguments)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr


@pytest.mark.horovod
@needs_horovod
def test_the_real_horovodrun_starts_two_ranks_on_each_of_two_nodes() -> None:
    script = (
        "import horovod.torch as hvd, torch\nfrom emulation_hold import hold, release\nhvd.init(); hold()\n"
        "total = int(hvd.allreduce(torch.tensor([hvd.rank()]), op=hvd.Sum, name='sum'))\n"
        "line = hvd.rank(), hvd.local_rank(), hvd.size(), hvd.local_size(), hvd.cross_rank(), total\n"
        "release(); print('at', *line); hvd.shutdown()\n"
    )
    with Cluster(mixed(), link_mbit=1000) as cluster:
        done = cluster.horovodrun(["python", "-c", script], timeout_s=90, python=sys.executable)
    assert done.returncode == 0, done.output
    assert sorted(re.findall(r"at (.*)", done.output)) == ["0 0 4 2 0 6", "1 1 4 2 0 6", "2 0 4 2 1 6", "3 1 4 2 1 6"]


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A Python with a horovodrun beside it that starts one rank, in a session of its own as the real one does."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    (python.parent / "horovodrun").write_text(
        "import json, os, subprocess, sys\n"
        "print(json.dumps({'arguments': sys.argv[1:], 'job': os.environ['HVD_EMULATION_JOB']}), flush=True)\n"
        "command = sys.argv[sys.argv.index('-SE') + 2 :]\n"
        "sys.exit(subprocess.Popen(['sh', '-c', ' '.join(command)], start_new_session=True).wait())\n"
    )
    return python


def cluster_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, CI / "cluster", *arguments], capture_output=True, text=True, timeout=60)


def mixed() -> list[EmulatedRank]:
    return [EmulatedRank(cores=cores, node=node) for cores, node in [(0.8, 0), (0.4, 0), (0.2, 1), (0.2, 1)]]


def traces(name: str) -> list[str]:
    """Whatever of this cluster is on the machine: processes, sshds, namespaces (with their veths), cgroups, files."""
    places = [leftovers.NAMESPACES, leftovers.NAMESPACE_FILES, Path(tempfile.gettempdir())]
    places += [root for _, root in leftovers.cgroup_roots()]
    found = [str(entry) for place in places if place.is_dir() for entry in place.glob(f"{name}*")]
    found += [f"process {pid}" for pid in leftovers.marked(f"{name}/")]
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # ended since
            if f"{name}-".encode() in process.read_bytes():  # sshd and its configuration, the keeper and its socket
                found.append(str(process))
    return found


def wait_for(condition: Callable[[], object], patience_s: float = 15.0) -> None:
    give_up = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.05)


def test_a_process_that_a_job_leaves_behind_is_told_and_ended() -> None:
    leave = "sleep 600 >/dev/null 2>&1 & echo left $!"
    with Cluster([EmulatedRank(cores=0.5)]) as cluster:
        done = cluster.processes(["sh", "-c", leave], timeout_s=20)
        tidy = cluster.processes(["sh", "-c", "sleep 0.1 & wait"], timeout_s=20)
    (pid,) = map(int, re.findall(r"left (\d+)", done.output))
    assert (done.returncode, done.left, tidy.left) == (0, (pid,), ())
    assert not Path(f"/proc/{pid}").exists() or state(pid) == "Z"  # its new parent has not asked for it


def test_a_tool_is_one_process_so_that_signals_reach_it(tmp_path: Path) -> None:
    ci, elsewhere = tmp_path / "ci", tmp_path / "elsewhere"
    ci.mkdir()
    elsewhere.mkdir()
    (ci / "inside.py").write_text((CI / "inside.py").read_text())
    (ci / "environment").write_text(f'export PATH="{Path(sys.executable).parent}:$PATH"\ncd {tmp_path}\n')
    (ci / "tool").write_text(
        "import os, sys\nfrom inside import enter_environment\nenter_environment(__file__)\n"
        "print(os.getpid(), os.getcwd(), *sys.argv[1:])\n"
    )
    clean = {name: value for name, value in os.environ.items() if name != "HVD_HETERO_BENCH"}
    command = [sys.executable, str(ci / "tool"), "--json", "a b"]
    process = subprocess.Popen(command, cwd=elsewhere, env=clean, stdout=subprocess.PIPE, text=True)
    assert process.communicate(timeout=20)[0] == f"{process.pid} {elsewhere} --json a b\n"


def test_a_rank_without_time_left_waits_for_some_also_after_it_was_stopped() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        duty = quota.DutyQuota([0.01], 10_000)
        duty.hold(0, busy.pid)
        wait_for(lambda: duty.tick() or state(busy.pid) == "T")  # what it may use is used up
        duty.stop(0, True)
        duty.stop(0, False)
        assert state(busy.pid) == "T"
        wait_for(lambda: duty.tick() or state(busy.pid) != "T")
        duty.stop(0, True)
        wait_for(lambda: state(busy.pid) == "T")
        duty.stop(0, False)
        duty.close()
        wait_for(lambda: state(busy.pid) != "T")
    finally:
        busy.kill()
        busy.wait()


def state(pid: int) -> str:
    """Of a process, as the kernel tells it: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

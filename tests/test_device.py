"""What is read of processor, cores, memory, GPUs and host: each from a text or a folder that the test wrote."""

import json
import threading
import time
import types
from dataclasses import asdict
from pathlib import Path

import pytest
from spinning import spin

from hvd_hetero.engine import environment, host, machine
from hvd_hetero.engine.device import Device, core_gflop_per_s, describe_device, kind_of
from hvd_hetero.engine.gpu import Gpu, installed_gpus, visible_of

X86 = "processor\t: 0\nmodel\t\t: 85\nmodel name\t: Intel(R) Xeon(R)  CPU @ 2.50GHz\n\nmodel name\t: other\n"
V1_MOUNTS = (
    "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
)
V2_MOUNTS = "41 31 0:38 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize("text, model", [
    (X86, "Intel(R) Xeon(R) CPU @ 2.50GHz"),
    ("processor\t: 0\nBogoMIPS\t: 48.00\nCPU implementer\t: 0x41\n", None),
    ("processor: 0\nModel\t\t: Raspberry Pi 4 Model B Rev 1.4\n", "Raspberry Pi 4 Model B Rev 1.4"),
    ("processor\t: 0\ncpu\t\t: POWER9, altivec supported\n", "POWER9, altivec supported"),
    ("", None),
])
def test_the_processor_is_named(text, model):
    assert machine.cpu_model(text) == model


def test_lists_of_numbers_are_the_kernels():
    assert machine.listed("0-2,8\n") == (0, 1, 2, 8) and machine.listed("\n") == () and machine.listed("3") == (3,)
    for text in ("", "0", "0-3", "0-1,4,6-7"):
        assert machine.listing(set(machine.listed(text))) == text


def limits(root: Path, mounts: str, cgroup: str) -> tuple[float | None, int | None]:
    return (machine.cpu_quota_cores(machine.cgroup_folders("cpu", mounts, cgroup, root)),
            machine.memory_limit_bytes(machine.cgroup_folders("memory", mounts, cgroup, root)))


def test_cgroup_v2_limits_and_those_of_its_parents(tmp_path):
    top = "sys/fs/cgroup/"
    write(tmp_path, {top + "job/cpu.max": "150000 100000\n", top + "job/rank/cpu.max": "max 100000\n",
                     top + "job/memory.max": "max\n", top + "job/rank/memory.max": "1073741824\n"})
    assert limits(tmp_path, V2_MOUNTS, "0::/job/rank\n") == (1.5, 1 << 30)
    assert limits(tmp_path, V2_MOUNTS, "0::/job\n") == (1.5, None)
    assert limits(tmp_path, V2_MOUNTS, "0::/other\n") == (None, None)
    write(tmp_path, {top + "job/rank/cpu.max": "20000 100000\n"})
    assert limits(tmp_path, V2_MOUNTS, "0::/job/rank\n")[0] == 0.2, "the tighter one holds"


def test_a_quota_is_that_of_now(tmp_path):
    """An orchestrator may change it, or move the process into another cgroup."""
    write(tmp_path, {"proc/self/mountinfo": "1 2 0:3 / /proc rw - proc proc rw\n" + V2_MOUNTS,
                     "proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "max 100000\n"})
    quota = machine.CpuQuota(tmp_path)
    assert quota.cores() is None
    write(tmp_path, {"sys/fs/cgroup/job/cpu.max": "25000 100000\n"})
    assert quota.cores() == 0.25
    write(tmp_path, {"proc/self/cgroup": "0::/other\n", "sys/fs/cgroup/other/cpu.max": "5000 10000\n"})
    assert quota.cores() == 0.5
    assert machine.CpuQuota(tmp_path / "nothing").cores() is None


def test_a_clock_of_threads_counts_what_they_have_run_and_nothing_of_others():
    def run():
        spin(0.05)
        ran.set()
        over.wait()

    before, ran, over = machine.threads(), threading.Event(), threading.Event()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ran.wait()
    assert machine.threads() - before == {thread.native_id} and threading.get_native_id() in before
    own, other = machine.ThreadClock([threading.get_native_id()]), machine.ThreadClock([thread.native_id])
    both = machine.ThreadClock([threading.get_native_id(), thread.native_id])
    assert other.seconds() == pytest.approx(0.05, abs=0.02) and machine.ThreadClock([]).seconds() == 0.0
    assert own.seconds() == pytest.approx(time.thread_time(), abs=0.02)
    assert both.seconds() == pytest.approx(own.seconds() + other.seconds(), abs=0.02)
    over.set()
    thread.join()
    while thread.native_id in machine.threads():  # the kernel takes its time
        time.sleep(0.001)
    assert other.seconds() == 0.0


def test_how_crowded_the_cores_are_since_the_last_look(tmp_path):
    def ran(text):
        write(tmp_path, {"proc/self/schedstat": "5 7 1\n", "proc/self/task/8/schedstat": text})

    ran("1000 3000 3\n")
    crowding = machine.Crowding(8, tmp_path)
    assert crowding.slowness() == 4.0, "since the thread began"
    assert crowding.slowness() is None, "it has not run"
    ran("1400 3200 5\n")
    assert crowding.slowness() == 1.5
    ran("1600 3200 6\n")
    assert crowding.slowness() == 1.0
    ran("0 0 0\n")
    assert crowding.slowness() is None, "as where the kernel does not count"
    assert machine.Crowding(8, tmp_path / "nothing").slowness() is None


def test_cgroup_v1_limits(tmp_path):
    cpu, memory = "sys/fs/cgroup/cpu/", "sys/fs/cgroup/memory/"
    write(tmp_path, {cpu + "rank/cpu.cfs_quota_us": "2500\n", cpu + "rank/cpu.cfs_period_us": "10000\n",
                     cpu + "cpu.cfs_quota_us": "-1\n", cpu + "cpu.cfs_period_us": "100000\n",
                     memory + "memory.limit_in_bytes": "9223372036854771712\n",
                     memory + "rank/memory.limit_in_bytes": "1048576\n"})
    assert limits(tmp_path, V1_MOUNTS, "4:memory:/\n2:cpu,cpuacct:/rank\n0::/\n") == (0.25, None)
    assert limits(tmp_path, V1_MOUNTS, "4:memory:/rank\n2:cpu,cpuacct:/\n") == (None, 1 << 20)


def test_a_containers_cgroup_is_the_mount_itself(tmp_path):
    """Without a cgroup namespace the path is the host's, and the mount shows the container's part of it."""
    mounts = V2_MOUNTS.replace(" / /sys", " /docker/abc /sys")
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "50000 100000\n", "sys/fs/cgroup/in/cpu.max": "10000 100000\n"})
    assert limits(tmp_path, mounts, "0::/docker/abc\n")[0] == 0.5
    assert limits(tmp_path, mounts, "0::/docker/abc/in\n")[0] == 0.1
    assert limits(tmp_path, mounts, "0::/docker/abcd\n")[0] == 0.5
    assert limits(tmp_path, "", "") == (None, None)


def a_machine(root: Path) -> None:
    write(root, {
        "proc/cpuinfo": X86, "proc/meminfo": "MemTotal:        8000000 kB\nMemFree: 1 kB\n",
        "proc/self/mountinfo": V2_MOUNTS, "proc/self/cgroup": "0::/rank\n",
        "sys/fs/cgroup/rank/cpu.max": "150000 100000\n", "sys/fs/cgroup/rank/memory.max": "4096000000\n",
        "sys/devices/system/node/online": "0-1\n", "proc/sys/kernel/random/boot_id": "boot-1\n",
    })


def test_the_device_is_what_this_process_may_use(tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_HOSTNAME", "fast")
    a_machine(tmp_path)
    device = describe_device(tmp_path, affinity={0, 1, 3})
    assert (device.cpu, device.cores, device.affinity) == ("Intel(R) Xeon(R) CPU @ 2.50GHz", 1.5, "0-1,3")
    assert (device.numa_nodes, device.memory_bytes) == (2, 4_096_000_000)
    assert device.host_name == "fast" and "boot-1" in device.host and device.machine == "boot-1"
    assert describe_device(tmp_path, affinity={2}).cores == 1.0, "affinity may be tighter than the quota"
    assert kind_of(device, 0) != kind_of(describe_device(tmp_path, affinity={2}), 0)
    assert Device.from_dict(json.loads(json.dumps(asdict(device)))) == device


def test_a_device_is_described_here_and_where_nothing_is_told(tmp_path):
    here = describe_device()
    assert here.cores > 0 and here.memory_bytes > 1 << 20 and here.cpu
    nothing = describe_device(tmp_path)
    assert nothing.cores >= 1 and nothing.numa_nodes is None and nothing.host_name


def test_what_separates_ranks_tells_hosts_apart(tmp_path, monkeypatch):
    a_machine(tmp_path)

    def seen(name):
        monkeypatch.setenv("HOROVOD_HOSTNAME", name)
        return host.host_identity(tmp_path)[1]

    assert seen("localhost") == seen("localhost")
    assert seen("localhost") != seen("127.0.0.1"), "names of `-H` are nodes, also on one machine"
    first = seen("node")
    write(tmp_path, {"proc/sys/kernel/random/boot_id": "boot-2\n"})
    second = seen("node")
    (tmp_path / "proc/self/ns").mkdir()
    (tmp_path / "proc/self/ns/net").symlink_to("net:[1]")
    third = seen("node")
    (tmp_path / "proc/self/ns/ipc").symlink_to("ipc:[1]")
    fourth = seen("node")
    assert len({first, second, third, fourth}) == 4, "machines of one name, containers that share nothing"
    monkeypatch.delenv("HOROVOD_HOSTNAME")
    name, without = host.host_identity(tmp_path)
    assert name and without == host.host_identity(tmp_path)[1]


class FakeMpi:
    """As much of mpi4py.MPI as is asked: `shared` are the ranks that share memory with rank `rank`."""

    THREAD_MULTIPLE, COMM_TYPE_SHARED = 3, "shared"

    def __init__(self, rank=0, shared=(0,), size=4, threads=3):
        self.shared, self.freed, self.threads = shared, 0, threads
        self.COMM_WORLD = types.SimpleNamespace(Get_size=lambda: size, Get_rank=lambda: rank, Split_type=self.split)

    def Query_thread(self):
        return self.threads

    def split(self, kind):
        assert kind == self.COMM_TYPE_SHARED
        return types.SimpleNamespace(bcast=lambda value, root: self.shared[root], Free=self.free)

    def free(self):
        self.freed += 1


def test_under_mpi_those_who_share_memory_are_a_host():
    mpi = FakeMpi(rank=3, shared=(2, 3))
    assert host.mpi_host(mpi) == host.mpi_host(FakeMpi(rank=2, shared=(2, 3))) == "mpi:2" and mpi.freed == 1
    assert host.mpi_host(FakeMpi(rank=0, shared=(0, 1))) != "mpi:2"


def test_mpi_is_asked_only_where_it_can_answer(monkeypatch):
    offered = FakeMpi()
    monkeypatch.setattr(host.importlib, "import_module", lambda name: offered)
    monkeypatch.setattr(host, "under_mpi", lambda: False)
    assert host.mpi_module(4) is None, "not launched by MPI"
    monkeypatch.setattr(host, "under_mpi", lambda: True)
    assert host.mpi_module(4) is offered
    assert host.mpi_module(2) is None, "another MPI than Horovod's"
    offered.threads = 1
    assert host.mpi_module(4) is None, "Horovod's thread is in MPI as well"

    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(host.importlib, "import_module", absent)
    assert host.mpi_module(4) is None


class FakeNvml:
    """As much of pynvml as is asked: two GPUs, of which the second has no NVLink and does not tell its slot."""

    class NVMLError(Exception):
        pass

    def __init__(self, broken=False):
        self.broken, self.open = broken, 0

    def nvmlInit(self):
        if self.broken:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, index):
        return [b"H200", "T4"][index]

    def nvmlDeviceGetUUID(self, index):
        return ["GPU-aa", "GPU-bb"][index]

    def nvmlDeviceGetMemoryInfo(self, index):
        return types.SimpleNamespace(total=[141 << 30, 16 << 30][index])

    def nvmlDeviceGetMaxPcieLinkGeneration(self, index):
        if index:
            raise self.NVMLError("Not Supported")
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, index):
        return 16

    def nvmlDeviceGetNvLinkState(self, index, link):
        if index or link > 17:
            raise self.NVMLError("Invalid Argument")
        return int(link < 4)


def test_gpus_are_told_by_nvml():
    library = FakeNvml()
    gpus, why = installed_gpus(None, library, by_bus=True)
    assert why is None and library.open == 0
    assert gpus == (Gpu(model="H200", uuid="GPU-aa", memory_bytes=141 << 30, pcie="gen5 x16", nvlinks=4),
                    Gpu(model="T4", uuid="GPU-bb", memory_bytes=16 << 30))
    assert installed_gpus("", library) == ((), "none of 2 GPUs is in CUDA_VISIBLE_DEVICES=''")
    assert installed_gpus(None, FakeNvml(broken=True)) == ((), "no GPU: Driver Not Loaded")


@pytest.mark.parametrize("visible, models", [(None, "H200 T4"), ("1", "T4"), ("1,0", "T4 H200"), ("", ""), ("-1", ""),
                                             ("GPU-b", "T4"), ("0,7,1", "H200"), ("GPU-", "")])
def test_cuda_visible_devices_counts(visible, models):
    assert " ".join(gpu.model for gpu in visible_of(installed_gpus(None, FakeNvml())[0], visible)) == models


def test_on_hosts_with_unlike_gpus_it_says_that_cuda_may_number_them_otherwise(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", FakeNvml())

    def notes(order, visible):
        for name, value in (("CUDA_DEVICE_ORDER", order), ("CUDA_VISIBLE_DEVICES", visible)):
            monkeypatch.setenv(name, value)
        return " ".join(describe_device().notes)

    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in notes("FASTEST_FIRST", "0,1")
    assert "CUDA_DEVICE_ORDER" not in notes("PCI_BUS_ID", "0,1")
    assert "CUDA_DEVICE_ORDER" in notes("FASTEST_FIRST", "1"), "CUDA's 1 may be the other one"
    assert "CUDA_DEVICE_ORDER" not in notes("FASTEST_FIRST", "GPU-b")


def test_without_nvml_it_says_so(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    gpus, why = installed_gpus()
    assert gpus == () and "nvidia-ml-py is not installed" in why


def test_the_benchmark_counts_by_the_clock_it_is_given():
    def speed(step_s):
        now = iter(range(10**9))
        return core_gflop_per_s(lambda: next(now) * step_s, length_s=0.01)

    assert speed(1e-3) == pytest.approx(2 * speed(2e-3))
    assert 0.01 < core_gflop_per_s(length_s=0.05) < 10_000


def test_the_cache_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environment.cache_folder() == tmp_path / "hvd_hetero"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert environment.cache_folder() == Path.home() / ".cache" / "hvd_hetero"


def test_a_kind_of_device_has_the_gpu_that_a_rank_uses_and_not_the_host():
    gpus = tuple(Gpu(model=model, uuid=f"GPU-{model}", memory_bytes=1) for model in ("A", "B"))

    def device(host, gpus):
        return Device(host_name=host, host=host, machine=host, cpu="x", cores=1.5, affinity="0-1", numa_nodes=1,
                      memory_bytes=1, gpus=gpus)

    here, there = device("a", gpus), device("b", gpus)
    assert kind_of(here, 0) == kind_of(there, 0) != kind_of(here, 1) == kind_of(device("c", gpus[1:]), 5)
    assert kind_of(device("a", ()), 0) not in (kind_of(here, 0), kind_of(here, 1))

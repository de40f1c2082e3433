"""One rank of the launches in `test_repairs.py`: `repair_worker.py MODE FOLDER` writes what it saw to FOLDER/RANK.json.

It ends by itself: with a traceback when it takes too long.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

LIMIT_S = 60
TENSORS = {"small": 1000, "also small": 1500, "large": 300_000, "also large": 400_000}  # float32 elements, of a group
SIZES = [*range(1, 33), 63, 64, 65, 1000, 1001, 65537, 300_001]


def seconds(action: Any, repeats: int = 1, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """How long each call took."""
    times = []
    for _ in range(repeats):
        start = clock()
        action()
        times.append(clock() - start)
    return times


def others_s() -> float:
    """Seconds of processor time of all threads but this one, which waits: that no other program disturbs."""
    return time.process_time() - time.thread_time()


def wake_ups() -> int:
    """How often the threads of this process have gone to sleep so far."""
    switches = 0
    for status in Path("/proc/self/task").glob("*/status"):
        lines = status.read_text().splitlines()
        switches += int(next(line.split()[1] for line in lines if line.startswith("voluntary_ctxt_switches")))
    return switches


def least_send_buffer() -> int:
    """Bytes, over all TCP connections of this process."""
    least = 1 << 62
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(link.name))) as end:
                    end.getpeername()
                    if end.type == socket.SOCK_STREAM and end.family in (socket.AF_INET, socket.AF_INET6):
                        least = min(least, end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
    return least


def wrong_sums(prefix: str, ranks: list[int], process_set: Any) -> list[str]:
    """The sums over the ranks that are not exact, by size and type."""
    wrong = []
    for size in SIZES:
        for dtype in (torch.float16, torch.float32, torch.float64, torch.int64):
            mine = (torch.arange(size) % 11 + hvd.rank()).to(dtype)
            got = hvd.allreduce(mine, op=hvd.Sum, name=f"{prefix}.{size}.{dtype}", process_set=process_set)
            want = sum((torch.arange(size) % 11 + rank).to(dtype) for rank in ranks)
            if not torch.equal(got, want):
                wrong.append(f"{size} × {dtype}")
    return wrong


def ended_aside() -> list[str]:
    """The operations after which a tensor that the script had dropped ended on another thread than this one."""
    aside: list[str] = []
    here = threading.get_ident()

    def ended(what: str, _: Any) -> None:
        if threading.get_ident() != here:
            aside.append(what)

    operations = {
        "allreduce": hvd.allreduce_async_,
        "allgather": hvd.allgather_async,
        "broadcast": functools.partial(hvd.broadcast_async_, root_rank=0),
        "grouped_allreduce": lambda tensor, name: hvd.grouped_allreduce_async_([tensor, tensor.clone()], name=name),
    }
    watched = []
    for what, begin in operations.items():
        for repeat in range(50):
            tensor = torch.ones(3)
            watched.append(weakref.ref(tensor, functools.partial(ended, what)))
            handle = begin(tensor, name=f"ended.{what}.{repeat}")
            del tensor
            hvd.synchronize(handle)
    hvd.barrier()
    return aside


def ends_under_lock() -> bool:
    """Whether an all-reduce ends while this thread keeps the interpreter's lock."""
    asleep = ctypes.PyDLL(None).usleep
    before = sys.getswitchinterval()
    handle = hvd.allreduce_async_(torch.ones(3), name="under_lock")
    sys.setswitchinterval(1000.0)
    try:
        return any(hvd.poll(handle) or asleep(20_000) for _ in range(500))
    finally:
        sys.setswitchinterval(before)
        hvd.synchronize(handle)


def plain(folder: Path) -> dict[str, Any]:
    """Two ranks, no speed variable: interface, stall inspector, fp16 sums, in-place sums, the ordinary cycle."""
    if interface := os.environ.get("REPAIR_WORKER_IFACE"):
        os.environ["HOROVOD_GLOO_IFACE"] = interface  # horovodrun sets its own choice
    hvd.init()
    seen: dict[str, Any] = {}
    with torch.no_grad():
        half, single = torch.ones(2_000_000, dtype=torch.float16), torch.ones(2_000_000)
        tensors = {"half": half, "single": single}
        times: dict[str, list[float]] = {name: [] for name in tensors}
        for _ in range(15):  # in turn, for the machine's speed may change from one second to the next
            for name, tensor in tensors.items():
                reduce = functools.partial(hvd.allreduce_, tensor.fill_(1.0), op=hvd.Sum, name=name)
                times[name] += seconds(reduce, clock=others_s)
        for name, tensor in tensors.items():
            seen[f"{name}_s"] = min(times[name])
            seen[f"{name}_right"] = bool((tensor == hvd.size()).all())
        wide = torch.linspace(-3e4, 3e4, 10_007).half()
        want = (wide.float() + wide.float()).half()
        seen["half_exact"] = bool(torch.equal(hvd.allreduce(wide, op=hvd.Sum, name="wide"), want))
        few = torch.full((3,), 14744.0).half()  # too few for the vectorised sums
        seen["half_few"] = hvd.allreduce(few, op=hvd.Sum, name="few").tolist()
        seen["ended_aside"] = ended_aside()
        seen["ends_under_lock"] = ends_under_lock()
        seen["cycles_s"] = sum(seconds(lambda: hvd.allreduce(torch.ones(1), name="cycle"), 10))
        seen["fused"] = fused(TENSORS, folder)
    if hvd.rank() == 1:
        time.sleep(4.0)  # longer than HOROVOD_STALL_CHECK_TIME_SECONDS, and its check comes once in so many seconds
    hvd.allreduce(torch.ones(1), name="late_tensor")
    return seen


def speed(folder: Path) -> dict[str, Any]:
    """Four ranks with all speed variables and a cycle of two seconds."""
    sets = {2: hvd.ProcessSet([0, 1]), 3: hvd.ProcessSet([1, 2, 3])}
    hvd.init(process_sets=list(sets.values()))
    rank, size = hvd.rank(), hvd.size()
    seen: dict[str, Any] = {"wrong": {}}
    seen["wrong"]["4"] = wrong_sums("all", list(range(size)), hvd.global_process_set)
    for count, process_set in sets.items():
        if process_set.included():
            seen["wrong"][str(count)] = wrong_sums(f"set{count}", list(process_set.ranks), process_set)
    hvd.allreduce(torch.ones(1), name="start")

    before = wake_ups()
    time.sleep(1.0)
    seen["idle_wake_ups"] = wake_ups() - before

    seen["ping_s"] = sum(seconds(lambda: hvd.allreduce(torch.ones(1), name="ping"), 20))
    handles = [hvd.allreduce_async(torch.full((10,), float(i)), op=hvd.Sum, name=f"many.{i}") for i in range(50)]
    seen["many_right"] = all(bool((hvd.synchronize(h) == i * size).all()) for i, h in enumerate(handles))

    if rank == 0:
        time.sleep(1.5)
    cpu, start = time.process_time(), time.perf_counter()
    hvd.allreduce(torch.ones(1), name="wait")
    seen["wait_cpu_s"], seen["wait_s"] = time.process_time() - cpu, time.perf_counter() - start

    seen["fused"] = fused(TENSORS, folder)

    # only the first set has work: the other ranks have nothing to wait for, and must not hold it up
    start = time.perf_counter()
    if sets[2].included():
        for _ in range(5):
            hvd.allreduce(torch.ones(1), name="some", process_set=sets[2])
    seen["some_s"] = time.perf_counter() - start

    start = time.perf_counter()
    added = hvd.add_process_set([0, size - 1])
    seen["add_set_s"] = time.perf_counter() - start
    if added.included():
        seen["added_right"] = bool(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="in_added", process_set=added) == 2)
    start = time.perf_counter()
    hvd.remove_process_set(added)
    seen["remove_set_s"] = time.perf_counter() - start

    # ranks join one after the other, while the last one still sums and then gathers
    if rank == size - 1:
        seen["joined_sum"] = float(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="while_joined"))
        for attempt in range(10):
            try:
                hvd.allgather(torch.ones(7 + attempt, 3), name=f"gather.{attempt}")
                seen["gather"] = "no error"
            except Exception as error:
                seen["gather"] = f"{type(error).__name__}: {error}"
    start = time.perf_counter()
    seen["last_joined"] = int(hvd.join())
    seen["after_join"] = float(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after_join"))

    start = time.perf_counter()
    hvd.shutdown()
    seen["shutdown_s"] = time.perf_counter() - start
    return seen


def fused(sizes: dict[str, int], folder: Path) -> list[str]:
    """Which of a group of tensors, of so many elements each, travelled in one operation with others; on rank 0."""
    timeline = folder / f"timeline.{hvd.rank()}"
    hvd.allreduce(torch.ones(1), name="before_timeline")
    hvd.start_timeline(str(timeline))
    tensors = [torch.ones(size) for size in sizes.values()]
    totals = hvd.grouped_allreduce(tensors, op=hvd.Sum, name="fused")
    hvd.stop_timeline()
    assert all(bool((total == hvd.size()).all()) for total in totals)
    if hvd.rank():
        return []
    events = json.loads(timeline.read_text())
    names = {event["pid"]: event["args"].get("name") for event in events if event.get("name") == "process_name"}
    together = {names[event["pid"]] for event in events if event.get("name") == "MEMCPY_IN_FUSION_BUFFER"}
    return [name for index, name in enumerate(sizes, 1) if f"grouped_allreduce.fused_{index}of{len(sizes)}" in together]


def in_order_of_nodes(parts: list[torch.Tensor], nodes: list[str]) -> torch.Tensor:
    """The sum of all ranks' parts, in the order of ranks within each node and then of nodes: a slow reference."""
    sums = []
    for node in dict.fromkeys(nodes):
        first, *others = [part for part, where in zip(parts, nodes, strict=True) if where == node]
        sums.append(first.clone())
        for other in others:
            sums[-1] += other
    total, *others = sums
    for other in others:
        total += other
    return total


def hierarchy(_folder: Path) -> dict[str, Any]:
    """Ranks on "nodes" of 2, 1 and 2: sums of random numbers, bit for bit, also many times and in a process set."""
    nodes = os.environ["REPAIR_WORKER_NODES"].split(",")
    some = hvd.ProcessSet([0, 2, 3])
    hvd.init(process_sets=[some])
    rank, size = hvd.rank(), hvd.size()
    for _ in range(3):
        hvd.allreduce(torch.ones(8), name="small")
    least = least_send_buffer()
    draws = [torch.Generator().manual_seed(rank) for rank in range(size)]
    wrong = []
    for repeat in range(3):
        for count in (1, 15, 17, 100, 4097, 65_536, 100_003, 524_288, 1_000_003):
            for dtype in (torch.float16, torch.float32, torch.float64):
                parts = [torch.randn(count, generator=draw).to(dtype) for draw in draws]
                for name, process_set in (("all", hvd.global_process_set), ("some", some)):
                    if not process_set.included():
                        continue
                    members = list(process_set.ranks) if name == "some" else list(range(size))
                    want = in_order_of_nodes([parts[m] for m in members], [nodes[m] for m in members])
                    got = hvd.allreduce(
                        parts[rank], op=hvd.Sum, name=f"{name}.{count}.{dtype}", process_set=process_set
                    )
                    if not torch.equal(got, want):
                        wrong.append(f"{name}: {count} × {dtype}, repeat {repeat}")
    extremes = [
        float(hvd.allreduce(torch.full((5000,), float(rank)), op=op, name=f"extreme.{op}")[-1])
        for op in (hvd.Min, hvd.Max)
    ]
    return {"wrong": wrong, "extremes": extremes, "least_send_buffer": least}


def uneven_set(_folder: Path) -> dict[str, Any]:
    """Two nodes of two ranks, and a process set of both of one and the second of the other."""
    some = hvd.ProcessSet([0, 1, 3])
    hvd.init(process_sets=[some])
    total = torch.zeros(1)
    if some.included():
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="some", process_set=some)
    hvd.barrier()
    return {"total": float(total)}


def peer_death(folder: Path) -> dict[str, Any]:
    """Three ranks with process sets; the last one dies. Its parent stays, so that horovodrun lets the others go on."""
    last = int(os.environ["HOROVOD_SIZE"]) - 1
    if int(os.environ["HOROVOD_RANK"]) == last and "REPAIR_WORKER_CHILD" not in os.environ:
        code = subprocess.call([sys.executable, *sys.argv], env={**os.environ, "REPAIR_WORKER_CHILD": "1"})
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and any(not (folder / f"{r}.json").exists() for r in range(last)):
            time.sleep(0.1)
        return {"died_with": code}
    hvd.init(process_sets=[hvd.ProcessSet([0, last]), hvd.ProcessSet([0, 1])])
    hvd.allreduce(torch.ones(1), name="alive")
    if hvd.rank() == last:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for step in range(1000):
            hvd.allreduce(torch.ones(1), name=f"step.{step}")
        seen = "no error"
    except Exception as error:
        seen = type(error).__name__
    hvd.shutdown()
    return {"error": seen}


def disconnect(folder: Path) -> dict[str, Any]:
    """Two nodes of two ranks; the last rank dies. Survivors stay until all have heard of it, as elastic ones do."""
    last = int(os.environ["HOROVOD_SIZE"]) - 1
    if int(os.environ["HOROVOD_RANK"]) == last and "REPAIR_WORKER_CHILD" not in os.environ:
        code = subprocess.call([sys.executable, *sys.argv], env={**os.environ, "REPAIR_WORKER_CHILD": "1"})
        _await(lambda: len(list(folder.glob("*.heard"))) == last, 25.0)
        return {"died_with": code}
    hvd.init()
    hvd.allreduce(torch.ones(1), name="alive")
    if hvd.rank() == last:
        (folder / "died").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            hvd.allreduce(torch.ones(1), name="step")
    except hvd.HorovodInternalError:
        heard_s = time.time() - float((folder / "died").read_text())
    rank = int(os.environ["HOROVOD_RANK"])
    hvd.shutdown()
    (folder / f"{rank}.heard").touch()
    _await(lambda: len(list(folder.glob("*.heard"))) == last, 25.0)
    return {"heard_s": heard_s}


def _await(done: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not done():
        time.sleep(0.05)


def failed_init(folder: Path) -> dict[str, Any]:
    """Rank 1 comes when rank 0 has given up once: rank 0 initialises again, and both meet."""
    first = os.environ["HOROVOD_RANK"] == "0"
    if first:
        try:
            hvd.init()
            return {"error": "none"}
        except ValueError as error:
            said = str(error)
        hvd.shutdown()
        (folder / "again").touch()
    else:
        said = ""
        _await((folder / "again").exists, 25.0)
    hvd.init()
    total = float(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="met"))
    hvd.shutdown()
    return {"error": said, "total": total}


def lost_connect(folder: Path) -> dict[str, Any]:
    """Rank 0 gives its address and then does nothing any more; rank 1 says how long it waits to be connected."""
    stopped: list[int] = []
    if os.environ["HOROVOD_RANK"] == "1":
        server = f"{os.environ['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:{os.environ['HOROVOD_GLOO_RENDEZVOUS_PORT']}"
        _await(lambda: _is_there(f"http://{server}/global/0"), 25.0)
        stopped = [int(path.stem.split("-")[1]) for path in folder.glob("0-*.pid")]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    start = time.perf_counter()
    try:
        hvd.init()
        return {"error": "none"}
    except ValueError as error:
        return {"error": str(error), "waited_s": time.perf_counter() - start}
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


def _is_there(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5.0):
            return True
    except urllib.error.HTTPError:
        return False


def bad_algorithm(_folder: Path) -> dict[str, Any]:
    """One rank with an algorithm that does not exist."""
    hvd.init()
    try:
        hvd.allreduce(torch.ones(3), name="x")
        return {"error": "no error"}
    except Exception as error:
        return {"error": str(error)}


def main() -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    mode, folder = sys.argv[1], Path(sys.argv[2])
    rank = os.environ.get("HOROVOD_RANK", "0")
    if nodes := os.environ.get("REPAIR_WORKER_NODES"):
        os.environ["HOROVOD_GLOO_NODE"] = nodes.split(",")[int(rank)]
    (folder / f"{rank}-{os.getpid()}.pid").touch()
    result = {
        "plain": plain,
        "speed": speed,
        "uneven_set": uneven_set,
        "peer_death": peer_death,
        "bad_algorithm": bad_algorithm,
        "disconnect": disconnect,
        "failed_init": failed_init,
        "lost_connect": lost_connect,
        "hierarchy": hierarchy,
    }[mode](folder)
    part = folder / f"{rank}.part"
    part.write_text(json.dumps(result), encoding="utf-8")
    part.replace(folder / f"{rank}.json")


if __name__ == "__main__":
    main()

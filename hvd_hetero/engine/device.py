"""The device of this rank: what it is, and how fast one of its cores computes."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import machine
from .environment import numbers_gpus_by_bus, visible_gpus
from .gpu import Gpu, installed_gpus
from .host import boot_id, host_identity

BENCHMARK_S = 0.2
# OpenBLAS shares out a product among threads when it has more than 262144 = 64^3 multiplications (interface/gemm.c:
# SMP_THRESHOLD_MIN * GEMM_MULTITHREAD_THRESHOLD), so one of this size stays on one core.
_EDGE = 64
_STACK = 32             # products in one call: Python's part of it is then below a percent


@dataclass(frozen=True, kw_only=True)
class Device:
    """The facts of one rank's device that do not change from one look to the next; None where they are not told."""

    host_name: str
    host: str                       # the host's identity: see `host_identity`
    machine: str                    # what hosts share that are emulated on one machine; they share its cores, too
    cpu: str
    cores: float                    # usable: the affinity mask's, and no more than the cgroup's quota
    affinity: str                   # the cores that this process may run on, such as "0-3,8"
    numa_nodes: int | None
    memory_bytes: int | None        # the machine's, or the cgroup's limit where that is less
    gpus: tuple[Gpu, ...] = ()
    notes: tuple[str, ...] = ()     # what could not be found out, and why

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Device:
        """The device of a `dataclasses.asdict`, also after that was stored as JSON and read again."""
        gpus = tuple(Gpu(**gpu) for gpu in content["gpus"])
        return cls(**{**content, "gpus": gpus, "notes": tuple(content["notes"])})


def describe_device(root: Path = Path("/"), *, affinity: set[int] | None = None) -> Device:
    """The device of this process. `root` is where /proc and /sys are, `affinity` the cores it may run on."""
    here = affinity if affinity is not None else os.sched_getaffinity(0)
    mounts, cgroup = (machine.read(root / "proc/self" / name) for name in ("mountinfo", "cgroup"))
    quota = machine.CpuQuota(root).cores()
    limit = machine.memory_limit_bytes(machine.cgroup_folders("memory", mounts, cgroup, root))
    memory = machine.memory_bytes(machine.read(root / "proc/meminfo"))
    numa = machine.listed(machine.read(root / "sys/devices/system/node/online"))
    host_name, host = host_identity(root)
    gpus, of_gpus = installed_gpus(visible_gpus(), by_bus=numbers_gpus_by_bus())
    notes = [of_gpus] if of_gpus else []
    if memory is None:
        notes.append("memory is unknown: /proc/meminfo does not tell it")
    return Device(
        host_name=host_name,
        host=host,
        machine=boot_id(root) or host_name,
        cpu=machine.cpu_model(machine.read(root / "proc/cpuinfo")) or platform.machine() or "unknown",
        cores=len(here) if quota is None else min(float(len(here)), quota),
        affinity=machine.listing(here),
        numa_nodes=len(numa) or None,
        memory_bytes=min((value for value in (memory, limit) if value), default=None),
        gpus=gpus,
        notes=tuple(notes),
    )


def kind_of(device: Device, local_rank: int) -> str:
    """What devices of one speed have in common, as text: processor, cores, and the model of the GPU.

    Args:
        local_rank: the rank's number on its host; ranks that see several GPUs are taken to use them in this order.
    """
    gpu = device.gpus[local_rank % len(device.gpus)].model if device.gpus else ""
    return f"{device.cpu}|{device.cores:g}|{gpu}"


def core_gflop_per_s(clock: Callable[[], float] = time.perf_counter, *, length_s: float = BENCHMARK_S) -> float:
    """The speed of one core on fp32 matrix products, in 10^9 operations per second; takes `length_s`.

    By the wall clock, so that a quota and other processes on the core count, as they do in training.
    """
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((_STACK, _EDGE, _EDGE), dtype=np.float32) for _ in range(2))
    out = np.matmul(a, b)       # once untimed: memory is mapped and the core awake
    start, elapsed_s, calls = clock(), 0.0, 0
    while elapsed_s < length_s:
        np.matmul(a, b, out=out)
        elapsed_s, calls = clock() - start, calls + 1
    return 2.0 * _EDGE**3 * _STACK * calls / elapsed_s / 1e9

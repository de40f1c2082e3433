"""The identity of a rank's host: equal for ranks that can share memory and a loopback link, different for others.

A host name alone does not tell. Two machines may have one name (clones), one machine may hold several containers, and
`-H localhost:2,127.0.0.1:2` means two nodes on one machine to Horovod and to whoever tries things out. So the
identity is made of all that separates ranks:

- the name that the launcher used (HOROVOD_HOSTNAME), else that of the system;
- the boot id: one per start of a kernel, so machines of one name differ;
- the network namespace: without a common one there is no common loopback link;
- the device number of /dev/shm, or else the IPC namespace: without a common one there is no common memory.

Under MPI the launcher's name is missing, and MPI can be asked instead, through mpi4py (optional): Horovod itself makes
its local communicator by `Split_type(COMM_TYPE_SHARED)`, so that the nodes found are those of `hvd.local_rank()`.
"""

from __future__ import annotations

import importlib
import os
import platform
from pathlib import Path
from typing import Any

from .environment import launcher_host_name, under_mpi
from .machine import read


def boot_id(root: Path) -> str:
    """One text per machine and start of its kernel, whatever containers run on it; "" where the system has none."""
    return read(root / "proc/sys/kernel/random/boot_id").strip()


def host_identity(root: Path = Path("/")) -> tuple[str, str]:
    """Returns the name of this rank's host, for messages, and its identity, to be compared with that of other ranks."""
    name = launcher_host_name() or platform.node() or "unknown"
    return name, identity(
        name=name,
        boot_id=boot_id(root),
        network=_namespace(root / "proc/self/ns/net"),
        memory=_device(root / "dev/shm") or _namespace(root / "proc/self/ns/ipc"),
    )


def identity(*, name: str, boot_id: str, network: str, memory: str) -> str:
    """Joins the parts of a host's identity into one text; "" stands for a part that the system does not provide."""
    return "|".join((name, boot_id, network, memory))


def _namespace(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _device(folder: Path) -> str:
    """The device number of a folder's file system; of each tmpfs that is mounted there is only one."""
    try:
        return f"shm:{folder.stat().st_dev}"
    except OSError:
        return ""


def mpi_module(size: int) -> Any:
    """Returns the module `mpi4py.MPI` if it can be used in this job of `size` ranks; else None.

    It is not used if MPI does not allow calls from several threads, as Horovod's thread may call MPI at the same time;
    or if its world has another size, as then mpi4py was built against another MPI than Horovod.
    """
    if not under_mpi():
        return None
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError):
        return None
    usable = mpi.Query_thread() == mpi.THREAD_MULTIPLE and mpi.COMM_WORLD.Get_size() == size
    return mpi if usable else None


def mpi_host(mpi: Any) -> str:
    """The identity of this rank's host by MPI: the lowest world rank of those that share memory with it. A collective
    call."""
    shared = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED)
    try:
        return f"mpi:{shared.bcast(mpi.COMM_WORLD.Get_rank(), root=0)}"
    finally:
        shared.Free()

"""Names of everything a cluster makes on the machine, and its removal by that name alone.

A cluster is called `hvdem-OWNERPID-COUNT`, and so are its namespaces, cgroups and temporary folder; its processes carry
the name in their environment. Removal therefore needs no memory of what was made: the owner, the keeper that outlives
a killed owner, and the next start all use the same function.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

PREFIX = "hvdem"
JOB_VARIABLE = "HVD_EMULATION_JOB"  # "hvdem-123-1/4": cluster and job of a process
NAMESPACES = Path("/run/netns")
NAMESPACE_FILES = Path("/etc/netns")
_NAME = re.compile(rf"({PREFIX}-(\d+)-\d+)(?:-|$)")
_count = itertools.count(1)


def new_name() -> str:
    """A cluster name that tells its owner and that no other cluster of this owner has."""
    return f"{PREFIX}-{os.getpid()}-{next(_count)}"


def find_tool(name: str) -> str | None:
    """Where the command is, also when PATH leaves out the places for system commands."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin:/usr/local/sbin")


def cgroup_roots() -> Iterator[tuple[str, Path]]:
    """Kind ("cgroup1" or "cgroup2") and mount point of each cgroup tree that may limit CPU time."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, where, kind, options, *_ = line.split(" ")
            if kind == "cgroup" and "cpu" in options.split(","):
                yield "cgroup1", Path(where)
            elif kind == "cgroup2":
                yield "cgroup2", Path(where)


def descendants(pid: int) -> list[int]:
    """The process itself, then its children, their children and so on."""
    children: dict[int, list[int]] = {}
    for process in _process_ids():
        with contextlib.suppress(OSError, IndexError, ValueError):
            # The command, in brackets, may itself hold brackets and blanks; the parent is the second field after it.
            parent = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(process)
    found = [pid]
    for process in found:
        found.extend(children.get(process, []))
    return found


def marked(prefix: str) -> list[int]:
    """Processes of the jobs that `prefix` covers: `NAME/` is every job of a cluster, `NAME/4/` its fourth."""
    found = []
    for process in _process_ids():
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                variable, _, value = entry.partition(b"=")
                if variable == JOB_VARIABLE.encode() and f"{value.decode(errors='replace')}/".startswith(prefix):
                    found.append(process)
    return found


def kill_job(job: str) -> None:
    """Nothing of this job (`NAME/4`) runs afterwards."""
    _kill_until_gone(lambda: marked(f"{job}/"))


def remove(name: str) -> None:
    """Nothing that the cluster of this name made is left: processes, namespaces, hosts files, cgroups, files."""
    namespaces = [entry.name for entry in _entries(NAMESPACES, f"{name}-*")]
    _kill_until_gone(lambda: [*marked(f"{name}/"), *_inside(namespaces)])
    ip = find_tool("ip")
    for namespace in namespaces:
        if ip:  # its veths go with it
            subprocess.run([ip, "netns", "del", namespace], capture_output=True, check=False)
    for folder in _entries(NAMESPACE_FILES, f"{name}-*"):
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        NAMESPACE_FILES.rmdir()  # only when it is empty
    for _, root in cgroup_roots():
        for group in [*_entries(root / name, "*/"), root / name]:
            _remove_group(group)
    for folder in _entries(Path(tempfile.gettempdir()), f"{name}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def sweep() -> list[str]:
    """The names of the dead owners' clusters that were found and removed."""
    places = [NAMESPACES, NAMESPACE_FILES, Path(tempfile.gettempdir()), *(root for _, root in cgroup_roots())]
    found = [_NAME.match(entry.name) for place in places for entry in _entries(place, f"{PREFIX}-*")]
    names = {match[1]: int(match[2]) for match in found if match}
    stale = [name for name, owner in names.items() if not _alive(owner)]
    for name in stale:
        remove(name)
    return stale


def _kill_until_gone(find: Callable[[], list[int]]) -> None:
    """Processes may be starting others while they are killed, hence the rounds; SIGKILL also ends stopped ones."""
    give_up = time.monotonic() + 10.0
    while (pids := [pid for pid in find() if pid != os.getpid()]) and time.monotonic() < give_up:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _inside(namespaces: Iterable[str]) -> list[int]:
    ip = find_tool("ip")
    commands = [[ip, "netns", "pids", namespace] for namespace in namespaces] if ip else []
    outputs = [subprocess.run(c, capture_output=True, text=True, check=False).stdout for c in commands]
    return [int(pid) for output in outputs for pid in output.split()]


def _remove_group(group: Path) -> None:
    give_up = time.monotonic() + 5.0
    while group.is_dir():
        try:
            group.rmdir()
        except OSError:  # killed processes leave a cgroup a moment after their parents were told
            if time.monotonic() > give_up:
                return
            time.sleep(0.02)


def _entries(place: Path, pattern: str) -> list[Path]:
    try:
        return sorted(place.glob(pattern))
    except OSError:
        return []


def _process_ids() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdecimal())


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True

"""An emulated mixed cluster on one machine: ranks of unequal speed on nodes with links of a chosen speed."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TextIO

from . import checks, leftovers, network, quota, running, signals
from .running import Finished, Process
from .worker import emulation_hold

HOLD = Path(emulation_hold.__file__).resolve()
KEEPER = Path(__file__).resolve().parent / "keeper.py"


@dataclass(frozen=True, kw_only=True)
class EmulatedRank:
    """A rank that gets `cores` of a core (1.5 is one and a half) on node number `node`."""

    cores: float
    node: int = 0


class Cluster:
    """Emulated ranks to run jobs on, for as long as the `with` block lasts; then nothing of it is left."""

    def __init__(
        self,
        ranks: Sequence[EmulatedRank],
        *,
        link_mbit: float | Sequence[float] | None = None,
        period_us: int = 10_000,
        network: str = "auto",
        quota: str = "auto",
        echo: TextIO | None = None,
    ) -> None:
        """`link_mbit`: of every node's link, or one for each node; `network`: "namespaces", "loopback" or "auto";
        `quota`: "cgroup", "duty" or "auto"; `echo`: where the jobs' output also goes as it comes."""
        self.ranks = tuple(ranks)
        nodes = [rank.node for rank in ranks]
        self._nodes = Counter(nodes)
        self._mbit = [link_mbit] * len(self._nodes) if isinstance(link_mbit, (int, float)) else link_mbit
        checks.check_cluster([rank.cores for rank in ranks], nodes, self._mbit, period_us, network, quota)
        self._period, self._echo = period_us, echo
        self._network_wanted, self._quota_wanted = network, quota
        self._cores = [rank.cores for rank in self.ranks]
        self._jobs = 0

    def __enter__(self) -> Cluster:
        leftovers.sweep()
        self.name = leftovers.new_name()
        self._restore_signals = signals.end_on_signals()
        try:
            self._folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-"))
            self.network = self._make_network()
            self._keeper = self._start_keeper()
            self.keeper_pid = self._keeper.pid
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with signals.deaf():
            if keeper := getattr(self, "_keeper", None):
                with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                    keeper.communicate(b"stop\n", timeout=5)
                keeper.kill()
                keeper.wait()
            leftovers.remove(self.name)
            if isinstance(net := getattr(self, "network", None), network.Namespaces):
                net.close()
        self._restore_signals()

    def horovodrun(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] = {},
        controller: str = "gloo",
        timeout_s: float,
        python: str = sys.executable,
        hold_at_start: bool = False,
        arguments: Sequence[str] = (),
    ) -> Finished:
        """What came of the command on every rank, started by the real horovodrun found beside `python`; that folder
        comes first on PATH. `arguments` are further ones of horovodrun's own; a discovery script among them says which
        hosts there are."""
        if controller not in ("gloo", "mpi"):
            raise ValueError(f'controller: expected "gloo" or "mpi", received {controller!r}')
        launcher = running.find_horovodrun(python)
        slots = [f"{name}:{self._nodes[node]}" for node, name in enumerate(self.network.names)]
        if controller == "mpi" and self.network.kind == "loopback":
            slots = [f"localhost:{len(self.ranks)}"]  # MPI is not fooled by several names of one host
        elastic = "--host-discovery-script" in arguments
        line = [
            *self.network.inside(0),
            python,
            str(launcher),
            "-np",
            str(len(self.ranks)),
            *(() if elastic else ("-H", ",".join(slots))),
            f"--{controller}",
            "--network-interfaces",
            self.network.interface,
            "--disable-cache",
            *arguments,
            *self._held(command, hold_at_start, python),
        ]
        return self._run([Process(command=line, env=self._environment(env, python))], timeout_s)

    def processes(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] = {},
        timeout_s: float,
        ranks: Sequence[int] | None = None,
        python: str = sys.executable,
        hold_at_start: bool = False,
    ) -> Finished:
        """What came of the command on every rank, or on `ranks` as a smaller world, without Horovod's launcher:
        RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and their like are set as torchrun sets them."""
        chosen = list(range(len(self.ranks)) if ranks is None else ranks)
        if not chosen or any(rank not in range(len(self.ranks)) for rank in chosen):
            raise ValueError(f"ranks: expected some of 0 to {len(self.ranks) - 1}, received {chosen}")
        nodes = [self.ranks[rank].node for rank in chosen]
        common = {
            **self._environment(env, python),
            "PYTHONUNBUFFERED": "1",
            "WORLD_SIZE": str(len(chosen)),
            "MASTER_ADDR": self.network.address(nodes[0]),
            "MASTER_PORT": str(_free_port()),
            "GLOO_SOCKET_IFNAME": self.network.interface,
        }
        started = []
        for rank, (emulated, node) in enumerate(zip(chosen, nodes, strict=True)):
            own = {
                "RANK": rank,
                "LOCAL_RANK": nodes[:rank].count(node),
                "LOCAL_WORLD_SIZE": nodes.count(node),
                "GROUP_RANK": sorted(set(nodes)).index(node),
                "HVD_EMULATION_RANK": emulated,
            }
            line = [*self.network.inside(node), *self._held(command, hold_at_start, python)]
            started.append(Process(command=line, env=common | {k: str(v) for k, v in own.items()}, rank=rank))
        return self._run(started, timeout_s)

    def set_cores(self, rank: int, cores: float) -> None:
        """From now on this rank gets `cores`, also in the middle of a job."""
        checks.check_cores(rank, cores, self._period)
        answer = emulation_hold.ask(str(self._folder / "hold"), f"cores {rank} {cores}")
        if answer != "ok":
            raise RuntimeError(f"set_cores({rank}, {cores}): the keeper answered {answer!r}")
        self._cores[rank] = cores

    def stop(self, rank: int, stopped: bool = True) -> None:
        """Stops what the rank runs at the moment, as SIGSTOP does, or lets it go on."""
        answer = emulation_hold.ask(str(self._folder / "hold"), f"stop {rank} {int(stopped)}")
        if answer != "ok":
            raise RuntimeError(f"stop({rank}, {stopped}): the keeper answered {answer!r}")

    def describe(self) -> str:
        """A few lines on what is emulated, how, and what falls short of it."""
        how = "stopping and continuing" if self.quota == "duty" else f"{self.quota} quotas of {self._period} µs periods"
        lines = [f"{len(self.ranks)} ranks held by {how}; {self.network.describe()}"]
        for rank, (cores, place) in enumerate(zip(self._cores, self.ranks, strict=True)):
            lines.append(f"  rank {rank}: {cores:g} cores on {self.network.names[place.node]}")
        if self._mbit is not None and self.network.kind == "loopback":
            rates = ", ".join(f"{rate:g}" for rate in sorted(set(self._mbit)))
            lines.append(f"  not emulated: links of {rates} Mbit/s, since {self._no_namespaces()}")
        if sum(self._cores) > (machine := len(os.sched_getaffinity(0))):
            lines.append(f"  beware: {sum(self._cores):g} cores are promised, the machine has {machine}")
        return "\n".join(lines)

    def _no_namespaces(self) -> str:
        return network.namespaces_missing() or "all ranks are on one host"

    def _make_network(self) -> network.Network:
        missing = "" if self._network_wanted == "loopback" else network.namespaces_missing()
        if self._network_wanted == "namespaces" and missing:
            raise RuntimeError(f'network="namespaces" is not to be had here: {missing}. Ask for network="auto".')
        if self._network_wanted == "loopback" or missing or len(self._nodes) == 1:
            return network.Loopback(len(self._nodes))
        return network.Namespaces(self.name, self._folder, len(self._nodes), self._mbit)

    def _start_keeper(self) -> subprocess.Popen[bytes]:
        cgroup = None if self._quota_wanted == "duty" else quota.writable_cgroup()
        if self._quota_wanted == "cgroup" and cgroup is None:
            raise RuntimeError(
                'quota="cgroup" is not to be had here: no cgroup tree accepts a CPU quota from us. '
                'Ask for quota="auto".'
            )
        self.quota = cgroup[0] if cgroup else "duty"
        orders = {
            "name": self.name,
            "socket": str(self._folder / "hold"),
            "quota": self.quota,
            "cores": self._cores,
            "cgroup_root": str(cgroup[1]) if cgroup else "",
            "period_us": self._period,
        }
        keeper = subprocess.Popen(
            [sys.executable, str(KEEPER), json.dumps(orders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert keeper.stdout is not None
        if keeper.stdout.readline() != b"ready\n":
            raise RuntimeError(
                f"the keeper of the emulated cluster did not start (exit status {keeper.wait()}); its error is above"
            )
        return keeper

    def _environment(self, env: Mapping[str, str], python: str) -> dict[str, str]:
        whole = {**os.environ, **env}
        folders = [*self.network.path, str(Path(python).parent), whole.get("PATH", os.defpath)]
        whole["PATH"] = os.pathsep.join(folders)
        whole["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HOLD.parent), whole.get("PYTHONPATH", "")]))
        whole["HVD_EMULATION_HOLD"] = str(HOLD)
        whole[emulation_hold.SOCKET_VARIABLE] = str(self._folder / "hold")
        self._jobs += 1
        whole[leftovers.JOB_VARIABLE] = f"{self.name}/{self._jobs}"
        return whole

    def _held(self, command: Sequence[str], hold_at_start: bool, python: str) -> list[str]:
        return [*([python, "-SE", str(HOLD)] if hold_at_start else []), *command]

    def _run(self, processes: Sequence[Process], timeout_s: float) -> Finished:
        job = processes[0].env[leftovers.JOB_VARIABLE]
        return running.run_together(
            processes,
            timeout_s=timeout_s,
            kill=lambda: leftovers.kill_job(job),
            find=lambda: leftovers.marked(f"{job}/"),
            echo=self._echo,
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

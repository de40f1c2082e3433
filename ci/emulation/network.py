"""The emulated network: one network namespace for each node, with sshd and shaped links, or one host for all."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from . import leftovers, quota, ssh
from .ssh import run, tool

# gethostbyname knows all of these as 127.0.0.1, and Horovod takes different names for different hosts.
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "127.0.1", "127.1")


class Network(Protocol):
    """Where the nodes of a cluster are and how to start a process on one."""

    kind: str
    interface: str
    names: list[str]
    path: list[str]  # folders to put before PATH on every node

    def inside(self, node: int) -> list[str]:
        """What to put before a command so that it runs on that node."""
        ...

    def address(self, node: int) -> str: ...
    def describe(self) -> str: ...


class Loopback:
    """All nodes on this very host, told apart by name alone."""

    kind = "loopback"
    interface = "lo"

    def __init__(self, nodes: int) -> None:
        if nodes > len(LOOPBACK_NAMES):
            raise ValueError(
                f"expected at most {len(LOOPBACK_NAMES)} nodes on one host, received {nodes}: there are no more names "
                "for 127.0.0.1. More nodes need network namespaces (ci/cluster --check says what is missing)."
            )
        self.names = list(LOOPBACK_NAMES[:nodes])
        self.path: list[str] = []

    def inside(self, node: int) -> list[str]:
        return []

    def address(self, node: int) -> str:
        return "127.0.0.1"

    def describe(self) -> str:
        hosts = f"nodes {', '.join(self.names)} on this host" if len(self.names) > 1 else "one node, this host"
        return f"{hosts}; links not shaped"


class Namespaces:
    """A namespace, a host name and an sshd for each node; two nodes share a cable, more of them a switch."""

    kind = "namespaces"
    interface = "e0"

    def __init__(self, name: str, folder: Path, nodes: int, link_mbit: Sequence[float] | None) -> None:
        """`link_mbit`: of each node's link; two nodes share one, the slower of both."""
        self._quotas_shown = quota.shown()
        self._name, self._folder, self._mbit = name, folder, link_mbit
        self.names = [f"node{node}" for node in range(nodes)]
        for node in range(nodes):
            self._make_node(node)
        if nodes == 2:
            self._cable(self._space(0), "e0", self._space(1), "e0", None if link_mbit is None else min(link_mbit))
        else:
            self._switch(nodes)
        for node in range(nodes):
            run("ip", "-n", self._space(node), "addr", "add", f"{self.address(node)}/24", "dev", "e0")
        self.path = [str(ssh.make_keys_and_client(folder))]
        self._daemons = [
            ssh.Daemon(folder, host, self.address(node), self.inside(node)) for node, host in enumerate(self.names)
        ]
        for daemon in self._daemons:
            daemon.await_start()

    def inside(self, node: int) -> list[str]:
        # A host name of its own, because MPI, and code that groups ranks by host name, would see a single host.
        script = f'echo {self.names[node]} > /proc/sys/kernel/hostname && {self._quotas_shown}exec "$@"'
        return [tool("ip"), "netns", "exec", self._space(node), tool("unshare"), "--uts", "sh", "-c", script, "sh"]

    def address(self, node: int) -> str:
        return f"10.99.0.{10 + node}"  # nothing outside the namespaces can see or reach it

    def describe(self) -> str:
        rates = sorted(set(self._mbit or ()))
        each = f"{rates[0]:g}" if len(rates) == 1 else ", ".join(f"{rate:g}" for rate in self._mbit or ())
        speed = f"{each} Mbit/s each way" if rates else "as fast as the machine"
        return f"nodes {', '.join(self.names)} as network namespaces with sshd, links {speed}"

    def cut(self, node: int, *, down: bool) -> None:
        """Pulls the plug of a node's link, or puts it back; of two nodes' common link."""
        run("ip", "-n", self._space(node), "link", "set", "e0", "down" if down else "up")

    def close(self) -> None:
        """The daemons, killed by `leftovers.remove`, have been waited for."""
        for daemon in self._daemons:
            daemon.await_end()

    def _space(self, node: int | str) -> str:
        return f"{self._name}-{node if isinstance(node, str) else self.names[node]}"

    def _make_node(self, node: int) -> None:
        """`ip netns exec` shows the files in /etc/netns/NAME as /etc: there the node's names lead to its address."""
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
        lines += [f"{self.address(other)} {name}" for other, name in enumerate(self.names)]
        if (machine := socket.gethostname()) not in ("localhost", *self.names):
            lines.append(f"{self.address(node)} {machine}")  # never 127.0.1.1, on which Gloo would listen in vain
        hosts = leftovers.NAMESPACE_FILES / self._space(node) / "hosts"
        hosts.parent.mkdir(parents=True)
        hosts.write_text("\n".join(lines) + "\n")
        run("ip", "netns", "add", self._space(node))
        run("ip", "-n", self._space(node), "link", "set", "lo", "up")

    def _switch(self, nodes: int) -> None:
        switch = self._space("switch")
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        for node in range(nodes):
            self._cable(self._space(node), "e0", switch, f"p{node}", None if self._mbit is None else self._mbit[node])
            run("ip", "-n", switch, "link", "set", f"p{node}", "master", "br0")

    def _cable(self, space: str, device: str, other_space: str, other: str, mbit: float | None) -> None:
        run("ip", "link", "add", device, "netns", space, "type", "veth", "peer", "name", other, "netns", other_space)
        for where, end in ((space, device), (other_space, other)):
            if mbit is not None:
                _shape(where, end, f"{round(mbit * 1000)}kbit")
            run("ip", "-n", where, "link", "set", end, "up")


@functools.cache
def namespaces_missing() -> str:
    """Why this machine cannot emulate nodes as network namespaces; empty when it just did so for a moment."""
    if os.geteuid() != 0:
        return "network namespaces want root"
    if missing := {name: package for name, package in ssh.TOOLS.items() if not leftovers.find_tool(name)}:
        return f"not installed: {', '.join(missing)} (packages {', '.join(sorted(set(missing.values())))})"
    name = leftovers.new_name()
    spaces = [f"{name}-a", f"{name}-b"]
    try:
        for space in spaces:
            run("ip", "netns", "add", space)
        run("ip", "link", "add", "e0", "netns", spaces[0], "type", "veth", "peer", "name", "e0", "netns", spaces[1])
        _shape(spaces[0], "e0", "1gbit")
        run("ip", "netns", "exec", spaces[0], "unshare", "--uts", "sh", "-c", "echo a > /proc/sys/kernel/hostname")
    except (RuntimeError, OSError) as error:
        return str(error)
    finally:
        leftovers.remove(name)
    return ""


def _shape(space: str, device: str, rate: str) -> None:
    run("tc", *f"-n {space} qdisc add {_bucket(device, rate)}".split())


def reshape_here(mbit: float) -> None:
    """From within a node: what it sends is as fast as this from now on."""
    run("tc", *f"qdisc change {_bucket(Namespaces.interface, f'{round(mbit * 1000)}kbit')}".split())


def _bucket(device: str, rate: str) -> str:
    return f"dev {device} root tbf rate {rate} burst 256kb latency 100ms"

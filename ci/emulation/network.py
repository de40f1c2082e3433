"""The emulated network: one network namespace for each node, with sshd and shaped links, or one host for all."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from . import leftovers

TOOLS = {"ip": "iproute2", "tc": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client",
         "ssh-keygen": "openssh-client", "unshare": "util-linux"}  # fmt: skip
# gethostbyname knows all of these as 127.0.0.1, and Horovod takes different names for different hosts.
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "127.0.1", "127.1")


class Network(Protocol):
    """Where the nodes of a cluster are and how to start a process on one."""

    kind: str
    interface: str
    names: Sequence[str]
    path: Sequence[str]  # folders to put before PATH on every node

    def inside(self, node: int) -> list[str]:
        """What to put before a command so that it runs on that node."""
        ...

    def address(self, node: int) -> str: ...
    def describe(self) -> str: ...


class Loopback:
    """All nodes on this very host, told apart by name alone."""

    kind = "loopback"
    interface = "lo"
    path: Sequence[str] = ()

    def __init__(self, nodes: int) -> None:
        if nodes > len(LOOPBACK_NAMES):
            raise ValueError(
                f"expected at most {len(LOOPBACK_NAMES)} nodes on one host, received {nodes}: there are no more names "
                "for 127.0.0.1. More nodes need network namespaces (ci/cluster --check says what is missing)."
            )
        self.names = LOOPBACK_NAMES[:nodes]

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

    def __init__(self, name: str, folder: Path, nodes: int, link_mbit: float | None) -> None:
        self._name, self._folder, self._mbit = name, folder, link_mbit
        self.names = [f"node{node}" for node in range(nodes)]
        self.path = [str(folder / "bin")]
        for node in range(nodes):
            self._make_node(node)
        if nodes == 2:
            self._cable(self._space(0), "e0", self._space(1), "e0")
        else:
            self._switch(nodes)
        for node in range(nodes):
            _run("ip", "-n", self._space(node), "addr", "add", f"{self.address(node)}/24", "dev", "e0")
        self._ssh_files()
        self._daemons = [self._start_sshd(node) for node in range(nodes)]
        for node, daemon in enumerate(self._daemons):
            self._await_sshd(node, daemon)

    def inside(self, node: int) -> list[str]:
        # A host name of its own, because MPI, and code that groups ranks by host name, would see a single host.
        script = f'echo {self.names[node]} > /proc/sys/kernel/hostname && exec "$@"'
        return [_tool("ip"), "netns", "exec", self._space(node), _tool("unshare"), "--uts", "sh", "-c", script, "sh"]

    def address(self, node: int) -> str:
        return f"10.99.0.{10 + node}"  # nothing outside the namespaces can see or reach it

    def describe(self) -> str:
        speed = "as fast as the machine" if self._mbit is None else f"{self._mbit:g} Mbit/s each way"
        return f"nodes {', '.join(self.names)} as network namespaces with sshd, links {speed}"

    def close(self) -> None:
        """The daemons, killed by `leftovers.remove`, have been waited for."""
        for daemon in self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(5)

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
        _run("ip", "netns", "add", self._space(node))
        _run("ip", "-n", self._space(node), "link", "set", "lo", "up")

    def _switch(self, nodes: int) -> None:
        switch = self._space("switch")
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for node in range(nodes):
            self._cable(self._space(node), "e0", switch, f"p{node}")
            _run("ip", "-n", switch, "link", "set", f"p{node}", "master", "br0")

    def _cable(self, space: str, device: str, other_space: str, other: str) -> None:
        _run("ip", "link", "add", device, "netns", space, "type", "veth", "peer", "name", other, "netns", other_space)
        for where, end in ((space, device), (other_space, other)):
            if self._mbit is not None:
                rate = f"{round(self._mbit * 1000)}kbit"
                _run("tc", "-n", where, "qdisc", "add", "dev", end, "root",
                     "tbf", "rate", rate, "burst", "256kb", "latency", "100ms")  # fmt: skip
            _run("ip", "-n", where, "link", "set", end, "up")

    def _ssh_files(self) -> None:
        """Throw-away keys, and an `ssh` that uses them and leaves the user's own files alone."""
        for key in ("host_key", "user_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self._name, "-f", str(self._folder / key))
        (self._folder / "ssh_config").write_text(
            f"IdentityFile {self._folder}/user_key\nIdentitiesOnly yes\nLogLevel ERROR\nBatchMode yes\n"
            "UserKnownHostsFile /dev/null\nGlobalKnownHostsFile /dev/null\nStrictHostKeyChecking no\n"
        )
        wrapper = self._folder / "bin" / "ssh"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nexec {_tool("ssh")} -F {self._folder}/ssh_config "$@"\n')
        wrapper.chmod(0o755)

    def _start_sshd(self, node: int) -> subprocess.Popen[bytes]:
        # Without PAM a login is quicker, but then sshd refuses accounts whose password is locked with "!".
        pam = "yes" if _locked_root() else "no"
        config = self._folder / f"sshd{node}.conf"
        config.write_text(
            f"ListenAddress {self.address(node)}\nHostKey {self._folder}/host_key\nPidFile {self._folder}/sshd{node}.pid\n"
            f"AuthorizedKeysFile {self._folder}/user_key.pub\nStrictModes no\nPermitRootLogin yes\nUsePAM {pam}\n"
            "PasswordAuthentication no\nUseDNS no\nPrintMotd no\nPrintLastLog no\nMaxStartups 100\nMaxSessions 100\n"
        )
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd insists on it; its service makes it at boot
        command = [*self.inside(node), _tool("sshd"), "-D", "-f", str(config), "-E", str(self._folder / f"sshd{node}.log")]
        environment = {"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}
        return subprocess.Popen(
            command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def _await_sshd(self, node: int, daemon: subprocess.Popen[bytes]) -> None:
        give_up = time.monotonic() + 10.0
        while not (self._folder / f"sshd{node}.pid").exists():  # written when it listens
            if daemon.poll() is not None or time.monotonic() > give_up:
                with contextlib.suppress(OSError):
                    raise RuntimeError(
                        f"sshd of emulated {self.names[node]} did not start; its log says: "
                        + (self._folder / f"sshd{node}.log").read_text()[-2000:]
                    )
                raise RuntimeError(f"sshd of emulated {self.names[node]} did not start and left no log")
            time.sleep(0.01)


@functools.cache
def namespaces_missing() -> str:
    """Why this machine cannot emulate nodes as network namespaces; empty when it just did so for a moment."""
    if os.geteuid() != 0:
        return "network namespaces want root"
    if missing := {tool: package for tool, package in TOOLS.items() if not leftovers.find_tool(tool)}:
        return f"not installed: {', '.join(missing)} (packages {', '.join(sorted(set(missing.values())))})"
    name = leftovers.new_name()
    spaces = [f"{name}-a", f"{name}-b"]
    try:
        for space in spaces:
            _run("ip", "netns", "add", space)
        _run("ip", "link", "add", "e0", "netns", spaces[0], "type", "veth", "peer", "name", "e0", "netns", spaces[1])
        _run("tc", "-n", spaces[0], "qdisc", "add", "dev", "e0", "root",
             "tbf", "rate", "1gbit", "burst", "256kb", "latency", "100ms")  # fmt: skip
        _run("ip", "netns", "exec", spaces[0], "unshare", "--uts", "sh", "-c", "echo a > /proc/sys/kernel/hostname")
    except (RuntimeError, OSError) as error:
        return str(error)
    finally:
        leftovers.remove(name)
    return ""


def _locked_root() -> bool:
    try:
        lines = Path("/etc/shadow").read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith("root:!") for line in lines)


def _tool(name: str) -> str:
    return leftovers.find_tool(name) or name


def _run(name: str, *arguments: str) -> None:
    done = subprocess.run([_tool(name), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"`{name} {' '.join(arguments)}` failed ({done.returncode}): {done.stderr.strip()}")

"""One sshd for each emulated node, and an `ssh` with throw-away keys that leaves the user's own files alone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from . import leftovers

TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "unshare": "util-linux",
}


def tool(name: str) -> str:
    """The command's path, also outside PATH; its bare name, to fail on, when it is nowhere."""
    return leftovers.find_tool(name) or name


def run(name: str, *arguments: str) -> None:
    """Returns when the command has succeeded; RuntimeError carries what it complained about."""
    try:
        done = subprocess.run([tool(name), *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(f"`{name}` cannot be run: {error}") from error
    if done.returncode != 0:
        raise RuntimeError(f"`{name} {' '.join(arguments)}` failed ({done.returncode}): {done.stderr.strip()}")


def make_keys_and_client(folder: Path) -> Path:
    """A folder for PATH whose `ssh` reaches the emulated nodes without a question and without known_hosts."""
    for key in ("host_key", "user_key"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", folder.name, "-f", str(folder / key))
    (folder / "ssh_config").write_text(
        f"IdentityFile {folder}/user_key\nIdentitiesOnly yes\nLogLevel ERROR\nBatchMode yes\n"
        "UserKnownHostsFile /dev/null\nGlobalKnownHostsFile /dev/null\nStrictHostKeyChecking no\n"
    )
    client = folder / "bin" / "ssh"
    client.parent.mkdir()
    client.write_text(f'#!/bin/sh\nexec {tool("ssh")} -F {folder}/ssh_config "$@"\n')
    client.chmod(0o755)
    return client.parent


class Daemon:
    """A running sshd that lets only the throw-away key in, on one address alone."""

    def __init__(self, folder: Path, host: str, address: str, inside: Sequence[str]) -> None:
        self._host, self._log, self._ready = host, folder / f"sshd-{host}.log", folder / f"sshd-{host}.pid"
        # Without PAM a login is quicker, but then sshd refuses accounts whose password is locked with "!".
        pam = "yes" if _locked_root() else "no"
        config = folder / f"sshd-{host}.conf"
        config.write_text(
            f"ListenAddress {address}\nHostKey {folder}/host_key\nPidFile {self._ready}\n"
            f"AuthorizedKeysFile {folder}/user_key.pub\nStrictModes no\nPermitRootLogin yes\nUsePAM {pam}\n"
            "PasswordAuthentication no\nUseDNS no\nPrintMotd no\nPrintLastLog no\n"
            "MaxStartups 100\nMaxSessions 100\n"
        )
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd insists on it; its service makes it at boot
        self._process = subprocess.Popen(
            [*inside, tool("sshd"), "-D", "-f", str(config), "-E", str(self._log)],
            env={"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def await_start(self) -> None:
        """Returns when sshd listens; RuntimeError carries its log."""
        give_up = time.monotonic() + 10.0
        while not self._ready.exists():  # written when it listens
            if self._process.poll() is not None or time.monotonic() > give_up:
                log = self._log.read_text()[-2000:] if self._log.exists() else "nothing: it left no log"
                raise RuntimeError(f"sshd of emulated {self._host} did not start; its log says: {log}")
            time.sleep(0.01)

    def await_end(self) -> None:
        """Returns when sshd, killed by `leftovers.remove`, has been waited for."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)


def _locked_root() -> bool:
    try:
        return any(line.startswith("root:!") for line in Path("/etc/shadow").read_text().splitlines())
    except OSError:
        return False

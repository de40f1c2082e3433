"""Questions to the processes of other ranks, beside Horovod: it cannot be asked while it waits.

Each rank listens at a port of its own. Who knows the job's token gets an answer, in a thread of its own, whatever the
rank's main thread is doing. How a question fails tells as much as an answer: a process that has ended refuses the
connection, and one that is stopped, or whose link is cut, says nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import json
import os
import secrets
import signal
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import background
from .environment import rendezvous_address
from .host import host_identity

QUESTION_S = 2.0  # for an answer; the thread that gives it may have little CPU
ENDING_S = (0.5, 1.0)  # before a process is asked again that has closed the connection without a word
ELSEWHERE = "192.0.2.1"  # of no host (RFC 5737); nothing is sent to it
LONGEST, LONGEST_ANSWER = 1 << 16, 1 << 24  # bytes; an answer names all operations that are under way
ASKING = 1024  # that a listener lets wait for it: all ranks may ask at once who is missing


class GoneError(ConnectionError):
    """No process listens there any more."""


class SilentError(ConnectionError):
    """Something is there, or was, and it does not answer."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Address and identity of a rank's process, which answers questions there."""

    rank: int
    host: str  # for people
    identity: str  # of its host
    address: str
    port: int
    pid: int
    born: str  # tells it from a later process of the same number
    token: str

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.pid})"

    def to_text(self) -> str:
        """On one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Peer:
        """Reads what `to_text` wrote."""
        return cls(**json.loads(text))

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this host that this one can see."""
        return self.identity == host_identity()[1] and bool(self.born) and _born(self.pid) == self.born

    def kill(self) -> None:
        """Ends a process of this host, also one that is stopped."""
        os.kill(self.pid, signal.SIGKILL)


def _born(pid: int) -> str:
    """When a process was started, in which namespace of processes; "" where that cannot be told."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{words[19]} {os.readlink('/proc/self/ns/pid')}"
    except (OSError, IndexError):
        return ""


def _address() -> str:
    """This host's address on the way to the launcher, or without one, as under mpirun, what its name stands for, or
    else its address on the way to other networks: a name may stand for a loopback address, which other hosts take for
    theirs."""
    launcher = rendezvous_address()
    if launcher is not None:
        return _address_to(launcher)
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = ""
    return named if named and not named.startswith("127.") else _address_to(ELSEWHERE) or named


def _address_to(host: str) -> str:
    """This host's address on the way to another; "" where there is no way."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _line(line: socket.socket, *, within_s: float) -> bytes:
    """The first line that comes, all of it within so many seconds. Raises OSError where it does not."""
    said, deadline = b"", time.monotonic() + within_s
    while not said.endswith(b"\n") and len(said) < LONGEST:
        line.settimeout(max(1e-3, deadline - time.monotonic()))
        if not (part := line.recv(LONGEST)):
            break
        said += part
        if time.monotonic() > deadline:
            raise TimeoutError
    return said


class Ear:
    """Listens for questions to this process, from its construction on.

    Args:
        answer: gives the answer to a question; both are what JSON can say. Called in a thread of its own.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.token = secrets.token_hex(16)
        self.ended = False
        ear = self

        places = threading.BoundedSemaphore(ASKING)

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                question = json.loads(_line(self.request, within_s=QUESTION_S))
                if hmac.compare_digest(str(question.pop("token", "")), ear.token):
                    self.request.settimeout(QUESTION_S)
                    self.request.sendall(json.dumps(answer(question)).encode() + b"\n")

        class Server(socketserver.ThreadingTCPServer):
            request_queue_size = ASKING

            def process_request(self, request: Any, client_address: Any) -> None:
                if not places.acquire(blocking=False):  # of more than all ranks, who do not mean this job
                    self.shutdown_request(request)
                    return

                def answer_it() -> None:
                    try:
                        self.process_request_thread(request, client_address)
                    finally:
                        places.release()

                background.begin(answer_it, name="hvd_hetero.answer")

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Drops a connection that asked wrongly, or went away."""

            def get_request(self) -> Any:
                try:
                    return super().get_request()
                except OSError:
                    if ear.ended:  # and so does this thread
                        raise SystemExit from None
                    raise

        launcher = rendezvous_address()
        here = launcher is not None and launcher.startswith("127.")  # then so are all ranks
        self._server = Server(("127.0.0.1" if here else "", 0), Handler)
        # The workers of a data loader are forks: one that outlives its rank must not keep the port open.
        os.register_at_fork(after_in_child=self._server.socket.close)
        background.begin(self._server.serve_forever, name="hvd_hetero.ear", end=self._end)
        # Nobody answers while the interpreter ends, for seconds where there is much to tear down: who asks then is to
        # hear that the process is gone, and not that it is stopped.
        atexit.register(self._end)

    def _end(self) -> None:
        """The process ends. A socket that is only closed listens until nobody looks at it any more."""
        self.ended = True
        with contextlib.suppress(OSError):  # a fork, which has closed its own
            self._server.socket.shutdown(socket.SHUT_RDWR)

    def peer(self, rank: int) -> Peer:
        """This process's address and identity, as those of `rank`."""
        host, identity = host_identity()
        return Peer(
            rank=rank, host=host, identity=identity, address=_address(), port=self._server.server_address[1],
            pid=os.getpid(), born=_born(os.getpid()), token=self.token,
        )  # fmt: skip

    def close(self) -> None:
        """Listens no more."""
        atexit.unregister(self._end)
        self._server.shutdown()
        self._server.server_close()


def ask(peer: Peer, question: dict[str, Any], *, within_s: float = QUESTION_S) -> dict[str, Any]:
    """The answer of a rank's process.

    Raises:
        GoneError: it has ended.
        SilentError: it does not answer.
    """
    address = "127.0.0.1" if peer.identity == host_identity()[1] else peer.address
    for wait_s in (0.0, *ENDING_S):
        time.sleep(wait_s)
        try:
            with socket.create_connection((address, peer.port), timeout=within_s) as line:
                line.sendall(json.dumps({**question, "token": peer.token}).encode() + b"\n")
                if said := line.makefile("rb").readline(LONGEST_ANSWER):
                    return dict(json.loads(said))
        except ConnectionRefusedError as error:
            raise GoneError(str(peer)) from error
        except (ConnectionResetError, BrokenPipeError):
            continue  # as of a process that is about to end: one that is stopped closes no connection
        except (OSError, ValueError) as error:  # or an answer that broke off
            raise SilentError(str(peer)) from error
    raise SilentError(str(peer))

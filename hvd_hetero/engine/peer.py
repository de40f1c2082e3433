"""Questions to the processes of other ranks over TCP, without Horovod, which cannot be asked while it waits.

Each rank listens at a TCP port (`QuestionServer`), and sends the other ranks its address and a secret token (`Peer`). A
question with that token is answered in a thread of its own, whatever the rank's main thread is doing. The way in which
a question fails is information as well: a process that has ended refuses the connection (`GoneError`), a process that
is stopped, or whose network link is cut, does not answer (`SilentError`), and one that is asked too much at a time says
so (`BusyError`). The watchdog (`watch`) uses all three.
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

QUESTION_S = 2.0  # time limit of a question; the thread that answers may have little CPU
ENDING_S = (0.5, 1.0)  # pauses before the second and third try, if the connection is closed without an answer
ELSEWHERE = "192.0.2.1"  # an address that no host has (RFC 5737), to find the default route; nothing is sent there
LONGEST, LONGEST_ANSWER = 1 << 16, 1 << 24  # bytes of a question and an answer, which names all operations under way
MAX_CONNECTIONS = 1024  # the most connections that a `QuestionServer` accepts at a time: all ranks may ask it at once
BUSY = b'{"busy": true}\n'  # the answer where no connection is free


class GoneError(ConnectionError):
    """The connection is refused: the process has ended."""


class SilentError(ConnectionError):
    """No answer comes: the process is stopped, its host or the link to it is down, or the answer is broken."""


class BusyError(ConnectionError):
    """The process runs, but has no connection free (`MAX_CONNECTIONS`), also at further tries."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A rank's process: how to connect to it (`ask`), and how to recognise it."""

    rank: int
    host: str  # the host's name, for messages
    identity: str  # the host's identity, to be compared: see `host_identity`
    address: str
    port: int
    pid: int
    born: str  # start time and PID namespace of the process: tells it from a later process with the same PID
    token: str  # the secret that a question must contain

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.pid})"

    def to_text(self) -> str:
        """Returns this peer as JSON on one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Peer:
        """Makes a peer from what `to_text` returned."""
        return cls(**json.loads(text))

    @property
    def is_here(self) -> bool:
        """Whether the process runs on this host, in this process's PID namespace, so that `kill` can end it."""
        return self.identity == host_identity()[1] and bool(self.born) and _born(self.pid) == self.born

    def kill(self) -> None:
        """Sends SIGKILL, which ends even a stopped process. Only for a peer that `is_here`."""
        os.kill(self.pid, signal.SIGKILL)


def _born(pid: int) -> str:
    """The start time of a process (in clock ticks since boot) and the PID namespace; "" if /proc does not tell them."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{words[19]} {os.readlink('/proc/self/ns/pid')}"
    except (OSError, IndexError):
        return ""


def _address() -> str:
    """The address at which other hosts reach this one.

    Under horovodrun: the local address of the route to its rendezvous server. Otherwise, as under mpirun: the address
    that this host's name resolves to, unless that is a loopback address, which is useless to other hosts. Then: the
    local address of the default route.
    """
    launcher = rendezvous_address()
    if launcher is not None:
        return _address_to(launcher)
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = ""
    return named if named and not named.startswith("127.") else _address_to(ELSEWHERE) or named


def _address_to(host: str) -> str:
    """This host's own address on the route to `host`; "" if there is no route."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _line(line: socket.socket, *, deadline: float, longest: int) -> bytes:
    """Reads one line from a socket. Raises OSError if it is not complete at the `deadline` (`time.monotonic`). Returns
    less than a line if the other side closes the connection, or the line exceeds `longest` bytes."""
    said = bytearray()
    while not said.endswith(b"\n") and len(said) < longest:
        line.settimeout(max(1e-3, deadline - time.monotonic()))
        if not (part := line.recv(1 << 16)):
            break
        said += part
        if time.monotonic() > deadline:
            raise TimeoutError
    return bytes(said)


class QuestionServer:
    """A TCP server that answers the questions of other ranks; it listens from its construction on.

    Args:
        answer: returns the answer to a question. Both are dictionaries that JSON can represent. It is called in a
            thread of its own for each question.

    Attributes:
        token: the secret that questions must contain.
        ended: whether this process is about to end, and listens no longer.

    Raises:
        OSError: no port can be opened.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.token = secrets.token_hex(16)
        self.ended = False
        this = self

        places = threading.BoundedSemaphore(MAX_CONNECTIONS)

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                said = _line(self.request, deadline=time.monotonic() + QUESTION_S, longest=LONGEST)
                question = json.loads(said)
                if hmac.compare_digest(str(question.pop("token", "")), this.token):
                    self.request.settimeout(QUESTION_S)
                    self.request.sendall(json.dumps(answer(question)).encode() + b"\n")

        class Server(socketserver.ThreadingTCPServer):
            request_queue_size = MAX_CONNECTIONS

            def process_request(self, request: Any, client_address: Any) -> None:
                if not places.acquire(blocking=False):  # too many connections: they are not all from this job's ranks
                    with contextlib.suppress(OSError):
                        request.send(BUSY)  # does not block: nothing else was sent
                    self.shutdown_request(request)
                    return

                def answer_it() -> None:
                    try:
                        self.process_request_thread(request, client_address)
                    finally:
                        places.release()

                background.begin(answer_it, name="hvd_hetero.answer")

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Ignores the exception: the question was malformed, or the connection was closed."""

            def get_request(self) -> Any:
                try:
                    return super().get_request()
                except OSError:
                    if this.ended:  # `_end` has shut the socket down: end this thread as well
                        raise SystemExit from None
                    raise

        launcher = rendezvous_address()
        here = launcher is not None and launcher.startswith("127.")  # then all ranks are on this host
        self._server = Server(("127.0.0.1" if here else "", 0), Handler)
        # The workers of a data loader are forks: one that outlives its rank must not keep the port open.
        os.register_at_fork(after_in_child=self._server.socket.close)
        background.begin(self._server.serve_forever, name="hvd_hetero.questions", end=self._end)
        # While the interpreter shuts down, which may take seconds, no thread answers. A rank that asks then must get
        # "connection refused" (the process is gone), and not a timeout (the process is stopped).
        atexit.register(self._end)

    def _end(self) -> None:
        """Stops listening as the process ends. A socket that is closed, but not shut down, would go on accepting
        connections while the server's thread polls it."""
        self.ended = True
        with contextlib.suppress(OSError):  # in a forked process, which has closed its copy of the socket
            self._server.socket.shutdown(socket.SHUT_RDWR)

    def peer(self, rank: int) -> Peer:
        """Returns the `Peer` that describes this process, as rank `rank`."""
        host, identity = host_identity()
        return Peer(
            rank=rank, host=host, identity=identity, address=_address(), port=self._server.server_address[1],
            pid=os.getpid(), born=_born(os.getpid()), token=self.token,
        )  # fmt: skip

    def close(self) -> None:
        """Stops listening and closes the port."""
        atexit.unregister(self._end)
        self._server.shutdown()
        self._server.server_close()


def ask(peer: Peer, question: dict[str, Any], *, within_s: float = QUESTION_S) -> dict[str, Any]:
    """Sends a question to a rank's process and returns the answer.

    If the connection closes without an answer, or the process is busy, that is tried again after each pause in
    `ENDING_S`.

    Args:
        within_s: the time limit of each try, from connecting to the end of the answer, in seconds.

    Raises:
        GoneError: the process has ended.
        SilentError: the process does not answer.
        BusyError: the process has no connection free.
    """
    address = "127.0.0.1" if peer.identity == host_identity()[1] else peer.address
    busy = False
    for wait_s in (0.0, *ENDING_S):
        time.sleep(wait_s)
        try:
            deadline = time.monotonic() + within_s
            with socket.create_connection((address, peer.port), timeout=within_s) as line:
                line.sendall(json.dumps({**question, "token": peer.token}).encode() + b"\n")
                said = _line(line, deadline=deadline, longest=LONGEST_ANSWER)
            if said and said != BUSY:
                return dict(json.loads(said))
            busy = busy or said == BUSY
        except ConnectionRefusedError as error:
            raise GoneError(str(peer)) from error
        except (ConnectionResetError, BrokenPipeError):
            continue  # the process is probably ending: a stopped one closes no connection
        except (OSError, ValueError) as error:  # ValueError: the answer is incomplete
            raise SilentError(str(peer)) from error
    raise (BusyError if busy else SilentError)(str(peer))

"""Questions between the processes of ranks: who is asked and answers, who is gone, silent or busy."""

import contextlib
import dataclasses
import json
import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from asking import LIMIT_S, stranger

from hvd_hetero.engine import peer


@pytest.mark.parametrize(("named", "routed", "expected"), [
    ("10.0.0.7", "10.0.0.9", "10.0.0.7"),
    ("127.0.1.1", "10.0.0.9", "10.0.0.9"),  # as Debian has it: other hosts would ask themselves
    ("127.0.1.1", "", "127.0.1.1"), ("", "10.0.0.9", "10.0.0.9"),
])  # fmt: skip
def test_a_rank_under_mpi_has_an_address_that_others_can_reach(monkeypatch, named, routed, expected):
    monkeypatch.setattr(peer, "rendezvous_address", lambda: None)
    monkeypatch.setattr(peer.socket, "gethostbyname", lambda name: named)
    monkeypatch.setattr(peer, "_address_to", lambda host: routed)
    assert peer._address() == expected


def test_a_rank_under_horovodrun_has_the_address_on_the_way_to_it_and_hears_other_hosts_where_there_are_any(
    monkeypatch
):
    for launcher, listens in (("127.0.0.1", "127.0.0.1"), ("localhost", "0.0.0.0"), (None, "0.0.0.0")):
        monkeypatch.setattr(peer, "rendezvous_address", lambda launcher=launcher: launcher)
        server = peer.QuestionServer(lambda question: {})
        assert server._server.server_address[0] == listens
        assert launcher is None or server.peer(0).address == "127.0.0.1"
        server.close()


def test_of_a_line_no_more_is_read_than_it_may_be_long():
    class Endless:
        reads = 0

        def settimeout(self, seconds): ...

        def recv(self, most):
            self.reads += 1
            assert self.reads <= 2
            return b"12345"

    assert peer._line(Endless(), deadline=float("inf"), longest=10) == b"1234512345"


def test_all_ranks_of_a_large_job_may_ask_at_once_and_answers_may_be_long():
    many = [f"hvd_hetero.balancer.1.0.{number}.bucket" for number in range(5000)]
    server, found, start = peer.QuestionServer(lambda question: {"submitted": many}), [], threading.Barrier(100)
    asked = server.peer(0)

    def asks():
        start.wait()
        found.append(peer.ask(asked, {"kind": "state"})["submitted"] == many)

    threads = [threading.Thread(target=asks) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.close()
    assert found == [True] * 100


def test_of_those_who_do_not_mean_this_job_no_more_are_heard_than_ranks_may_ask(monkeypatch):
    monkeypatch.setattr(peer, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(peer, "QUESTION_S", 30.0)
    server = peer.QuestionServer(lambda question: {"state": "here"})
    asked, others = server.peer(0), []
    try:
        others += [socket.create_connection(("127.0.0.1", asked.port), timeout=10) for _ in range(5)]
        assert [one.makefile("rb").read() for one in others[3:]] == [peer.BUSY] * 2, "closed at once"
        assert not answers(asked), "no connection is free"
        others[0].settimeout(0.2)
        with pytest.raises(TimeoutError):
            others[0].recv(1)
        others[0].close()  # and leaves its place
        deadline = time.monotonic() + 20
        while not answers(asked):
            assert time.monotonic() < deadline
    finally:
        for one in others:
            one.close()
        server.close()


def answers(asked):
    """Whether a process answers now."""
    try:
        return peer.ask(asked, {"kind": "state"}, within_s=5.0) == {"state": "here"}
    except ConnectionError:
        return False


def test_a_byte_now_and_then_is_no_question(monkeypatch):
    monkeypatch.setattr(peer, "QUESTION_S", 0.3)
    server = peer.QuestionServer(lambda question: {"state": "here"})
    slow = socket.create_connection(("127.0.0.1", server.peer(0).port), timeout=10)
    try:
        slow.settimeout(0.02)
        for _ in range(500):
            with contextlib.suppress(TimeoutError):
                slow.send(b"x")
                if not slow.recv(1):
                    break
    except OSError:
        pass  # it is closed
    else:
        assert slow.recv(1) == b""
    finally:
        slow.close()
        server.close()


def test_a_byte_now_and_then_is_no_answer():
    """It would keep the watchdog, and a process from its end."""

    def drips():
        line, _ = listener.accept()
        with line, contextlib.suppress(OSError):
            for _ in range(1000):
                line.send(b"x")
                time.sleep(0.02)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=drips, daemon=True).start()
        asked = dataclasses.replace(stranger(1), address="127.0.0.1", port=listener.getsockname()[1])
        began = time.monotonic()
        with pytest.raises(peer.SilentError):
            peer.ask(asked, {"kind": "state"}, within_s=0.3)
        assert time.monotonic() - began < LIMIT_S / 2


@pytest.mark.parametrize("other", [
    {"identity": "another host's"}, {"born": "1 pid:[1]"}, {"pid": 1 << 23, "born": ""}, {"pid": 1},
])  # fmt: skip
def test_only_the_very_process_is_taken_for_one_that_can_be_ended_from_here(other):
    server = peer.QuestionServer(lambda question: {})
    me = server.peer(0)
    server.close()
    assert me.is_here and not dataclasses.replace(me, **other).is_here


def test_a_fork_that_outlives_its_rank_does_not_answer_for_it():
    """As the worker of a data loader: who asks is to hear that the rank is gone."""
    server, (reads, writes) = peer.QuestionServer(lambda question: {}), os.pipe()
    asked = server.peer(0)
    if (pid := os.fork()) == 0:
        os.read(reads, 1)
        os._exit(0)
    server.close()
    try:
        with pytest.raises(peer.GoneError):
            peer.ask(asked, {"kind": "state"}, within_s=0.2)
    finally:
        os.write(writes, b"x")
        os.waitpid(pid, 0)


class Line:
    """A connection that says `said`, or fails with it."""

    def __init__(self, said):
        self.said, self.sent = said, b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def sendall(self, sent):
        self.sent += sent

    def settimeout(self, seconds):
        assert 0.0 < seconds <= 4.0

    def recv(self, most):
        said, self.said = self.said, b""
        return said


@pytest.mark.parametrize(("comes", "found", "slept"), [
    ([b'{"s": 1}\n'], {"s": 1}, [0.0]),
    ([ConnectionResetError(), b"", b'{"s": 2}\n'], {"s": 2}, [0.0, 0.5, 1.0]),
    ([b"", BrokenPipeError(), b""], peer.SilentError, [0.0, 0.5, 1.0]),
    ([peer.BUSY, peer.BUSY, b'{"s": 3}\n'], {"s": 3}, [0.0, 0.5, 1.0]),
    ([peer.BUSY, ConnectionResetError(), b""], peer.BusyError, [0.0, 0.5, 1.0]),
    ([peer.BUSY, ConnectionRefusedError()], peer.GoneError, [0.0, 0.5]),
    ([b'{"s": '], peer.SilentError, [0.0]), ([TimeoutError()], peer.SilentError, [0.0]),
    ([ConnectionRefusedError()], peer.GoneError, [0.0]), ([b"", ConnectionRefusedError()], peer.GoneError, [0.0, 0.5]),
])  # fmt: skip
@pytest.mark.parametrize("here", [True, False])
def test_who_closes_the_line_without_a_word_is_asked_again_and_nobody_else(monkeypatch, comes, found, slept, here):
    """It is about to end: soon it refuses the connection."""
    coming, waits, lines = iter(comes), [], []

    def connect(address, timeout):
        assert address == ("127.0.0.1" if here else "192.0.2.7", 9) and timeout == 4.0
        said = next(coming)
        if isinstance(said, Exception):
            raise said
        lines.append(Line(said))
        return lines[-1]

    monkeypatch.setattr(peer, "time", SimpleNamespace(sleep=waits.append, monotonic=time.monotonic))
    monkeypatch.setattr(peer.socket, "create_connection", connect)
    monkeypatch.setattr(peer, "host_identity", lambda: ("node", "another host's" if here else "mine"))
    asked, question = dataclasses.replace(stranger(1), token="secret"), {"kind": "state"}
    if isinstance(found, dict):
        assert peer.ask(asked, question, within_s=4.0) == found
    else:
        with pytest.raises(found, match="rank 1"):
            peer.ask(asked, question, within_s=4.0)
    assert waits == slept and question == {"kind": "state"}
    assert all(json.loads(line.sent) == {"kind": "state", "token": "secret"} for line in lines)

"""SIGTERM is heard, and what the engine tells people does not stop what it does."""

from __future__ import annotations

import gc
import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest

from hvd_hetero.engine.stderr import tell
from hvd_hetero.engine.termination import TerminationHandler


class Interrupted(io.RawIOBase):
    """A stream while whose first write SIGTERM comes."""

    def __init__(self):
        super().__init__()
        self.written, self.interrupted = [], False

    def writable(self):
        return True

    def write(self, data):
        if not self.interrupted:
            self.interrupted = True
            os.kill(os.getpid(), signal.SIGTERM)
        self.written.append(bytes(data))
        return len(data)


def stream(raw):
    return io.TextIOWrapper(io.BufferedWriter(raw), line_buffering=True)


def test_a_text_that_can_be_written_is(capsys):
    tell("hvd_hetero: so it is.")
    assert capsys.readouterr().err == "hvd_hetero: so it is.\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no stream that is always full on this machine")
def test_where_nothing_can_be_written_it_goes_on(monkeypatch):
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(sys, "stderr", stream(io.FileIO(full, "w", closefd=False)))
    tell("hvd_hetero: this finds no room.")
    monkeypatch.undo()
    os.close(full)


def test_where_nobody_reads_any_more_it_goes_on(monkeypatch):
    reads, writes = os.pipe()
    os.close(reads)
    monkeypatch.setattr(sys, "stderr", stream(io.FileIO(writes, "w", closefd=False)))
    tell("hvd_hetero: nobody reads this.")
    monkeypatch.undo()
    os.close(writes)


def test_sigterm_is_heard_while_something_is_being_written(monkeypatch):
    raw, heard = Interrupted(), []
    handler = TerminationHandler(lambda: heard.append(True), say="it ends.")
    try:
        monkeypatch.setattr(sys, "stderr", stream(raw))
        print("what a progress bar writes", file=sys.stderr, flush=True)
        monkeypatch.undo()
    finally:
        handler.close()
    assert heard and handler.told
    assert b"".join(raw.written).startswith(b"what a progress bar writes")


class Hearer:
    def hear(self):
        pass


def test_who_hears_sigterm_is_not_kept_and_swallows_none_once_it_is_gone():
    passed_on = []
    before = signal.signal(signal.SIGTERM, lambda *_: passed_on.append(True))
    try:
        hearer = Hearer()
        gone = weakref.ref(hearer)
        handler = TerminationHandler(hearer.hear, say="it ends.")
        del hearer
        gc.collect()
        assert gone() is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert passed_on == [True] and not handler.told
    finally:
        signal.signal(signal.SIGTERM, before)


RENDEZVOUS = """
    import ctypes, signal, sys, threading, time
    from hvd_hetero.engine import termination
    from hvd_hetero.engine.termination import TerminationHandler

    how = sys.argv[1]
    termination.LATE_S = 20.0 if how == "over" else 0.3
    waits = TerminationHandler(lambda: print("heard", flush=True), say="so it is.")
    if how == "own":
        signal.signal(signal.SIGTERM, lambda *_: print("own heard", flush=True))

    def leave():
        print("leaves", flush=True)
        if how == "fails":
            raise OSError("no room")
        if how == "saves":  # the rendezvous is over meanwhile
            libc.pthread_mutex_unlock(lock)
            time.sleep(0.5)
            print("left", flush=True)

    lock, libc = ctypes.create_string_buffer(128), ctypes.CDLL(None)

    def stuck(seconds):  # in C, where signals interrupt nothing: a lock that is taken already
        libc.pthread_mutex_lock(lock)
        threading.Timer(seconds, libc.pthread_mutex_unlock, [lock]).start()
        libc.pthread_mutex_lock(lock)

    with waits.unreachable(leave):
        print("waits", flush=True)
        if how == "heard":
            signal.pause()
        stuck(3.0 if how in ("own", "over") else 60.0)
    assert signal.set_wakeup_fd(-1) == -1
    print("goes on", flush=True)
"""


@pytest.mark.parametrize(("how", "said", "status"), [
    ("stuck", ["leaves"], 75), ("fails", ["leaves"], 75), ("own", ["own heard", "goes on"], 0),
    ("over", ["goes on"], 0), ("heard", ["leaves"], 75), ("saves", ["leaves", "left"], 75),
])  # fmt: skip
def test_who_is_stuck_in_a_rendezvous_ends_in_order(tmp_path, how, said, status):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(RENDEZVOUS))
    process = subprocess.Popen(
        [sys.executable, str(script), how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "waits\n"
    if how != "over":
        time.sleep(0.3)  # it is stuck by now, most likely
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    lines = out.split("\n")[:-1]
    assert [line for line in lines if line != "heard"] == said and process.returncode == status, err
    assert "heard" in lines or how not in ("over", "heard")
    assert ("OSError('no room')" in err) == (how == "fails")


def test_signals_wake_who_they_woke_before_and_after():
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    mine = signal.signal(signal.SIGUSR1, lambda *_: None)
    before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    try:
        handler = TerminationHandler(lambda: None, say="so it is.")
        with handler.unreachable(lambda: None):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert os.read(reads, 1) == bytes([signal.SIGUSR1])
        handler.close()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert os.read(reads, 1) == bytes([signal.SIGUSR1])
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGUSR1, mine)
        os.close(reads)
        os.close(writes)


def test_who_hears_in_a_rendezvous_ends_though_a_fork_has_its_ends():
    handler = TerminationHandler(lambda: None, say="so it is.")
    with handler.unreachable(lambda: None):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
    try:
        threads = [each for each in threading.enumerate() if each.name == "hvd_hetero.termination"]
        for each in threads:
            each.join(10)
        assert not any(each.is_alive() for each in threads)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        handler.close()

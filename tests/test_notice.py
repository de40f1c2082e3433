"""SIGTERM is heard, and what the engine tells people does not stop what it does."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import weakref

import pytest

from hvd_hetero.engine.notice import Notice
from hvd_hetero.engine.stderr import tell


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
    notice = Notice(lambda: heard.append(True), say="it ends.")
    try:
        monkeypatch.setattr(sys, "stderr", stream(raw))
        print("what a progress bar writes", file=sys.stderr, flush=True)
        monkeypatch.undo()
    finally:
        notice.close()
    assert heard and notice.told
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
        notice = Notice(hearer.hear, say="it ends.")
        del hearer
        gc.collect()
        assert gone() is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert passed_on == [True] and not notice.told
    finally:
        signal.signal(signal.SIGTERM, before)

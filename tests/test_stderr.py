"""What the engine tells people does not stop what it does."""

from __future__ import annotations

import io
import os
import signal
import sys

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

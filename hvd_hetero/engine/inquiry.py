"""Whether this rank keeps others waiting, while it waits itself."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Container, Sequence
from queue import SimpleQueue

from .absence import waits_for
from .peer import Peer, ask

FIRST_S = 0.5  # before others are asked: what is waited for usually comes sooner


class Inquiry:
    """Asks the processes of other ranks, beside what this one does, whether they wait for it elsewhere.

    Args:
        submitted: the operations that this rank takes part in.
    """

    def __init__(self, submitted: Container[str]) -> None:
        self._submitted = submitted
        self._awaited = False  # at the last answer: then the next wait asks at once

    def among(self, peers: Sequence[Peer], rank: int) -> Callable[[], bool]:
        """What tells, called again and again in a wait of `rank` for these others, whether one of them waits for it."""
        began, answers = time.monotonic(), SimpleQueue[bool]()
        due_s: float | None = 0.0 if self._awaited else FIRST_S  # None: somebody is being asked

        def inquire() -> None:
            answers.put(any(self._keeps_waiting(peer, rank) for peer in peers))

        def is_awaited() -> bool:
            nonlocal due_s
            waited_s = time.monotonic() - began
            if due_s is not None and waited_s >= due_s:
                due_s = None
                threading.Thread(target=inquire, name="hvd_hetero.inquiry", daemon=True).start()
            elif due_s is None and not answers.empty():
                self._awaited = answers.get()
                due_s = max(FIRST_S, 1.5 * waited_s)
                return self._awaited
            return False

        return is_awaited

    def _keeps_waiting(self, peer: Peer, rank: int) -> bool:
        """Whether a peer waits in an operation with `rank`, which has not come to it. One that does not answer waits
        for nobody."""
        with contextlib.suppress(ConnectionError):
            return waits_for(rank, ask(peer, {"kind": "state"}), self._submitted)
        return False

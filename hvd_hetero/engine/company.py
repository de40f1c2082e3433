"""The other ranks of a job, as far as their processes answer: who is missing in an operation, who waits for whom."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

from . import background
from .absence import JOIN, Absence, absence_of, waits_for
from .peer import Peer, ask

T = TypeVar("T")
FIRST_S = 0.5  # in a wait, before others are asked whether they wait: what is waited for usually comes sooner


class Company:
    """The ranks beside this one.

    Args:
        submitted: says in which operations this rank takes part.
        times: says how often it has in one of this name.
    """

    def __init__(
        self, submitted: Callable[[], Container[str]], times: Callable[[str], int] = lambda operation: 0
    ) -> None:
        self._submitted, self._times = submitted, times
        self._peers: dict[int, Peer] = {}
        self.awaited = False  # by one of them, who said so since this rank waited last
        self.me: Peer | None = None

    def meet(self, peers: Iterable[Peer]) -> None:
        """From here on these are the ranks."""
        self._peers = {peer.rank: peer for peer in peers}

    def _others(self, ranks: Sequence[int]) -> list[Peer]:
        """The known peers among these ranks, beginning after this rank: so not all ranks ask the same one first."""
        others = [self._peers[rank] for rank in ranks if rank in self._peers and self._peers[rank] != self.me]
        mine = 0 if self.me is None else self.me.rank
        return sorted(others, key=lambda peer: peer.rank < mine)

    def _asked(self, ask_one: Callable[[Peer], T], ranks: Sequence[int]) -> list[T]:
        """Asks the processes of these ranks, side by side, and returns their answers."""
        peers = self._others(ranks)
        try:
            with ThreadPoolExecutor(max(1, min(16, len(peers)))) as pool:
                return list(pool.map(ask_one, peers))
        except RuntimeError:  # this process is at its end, and begins no more threads
            return list(map(ask_one, peers))

    def absent(self, operation: str, ranks: Sequence[int] | None = None) -> list[Absence]:
        """Those of these ranks (default: all) that have not submitted an operation; those that wait in another one
        are left out, unless all of them do. In `hvd.join()`, ranks that answer are not missing: they train on."""
        ranks = tuple(self._peers) if ranks is None else ranks
        ask_one = functools.partial(
            absence_of, operation=operation, ranks=ranks, me=self.me, submitted=self._submitted,
            times=self._times(operation),
        )
        asked = self._asked(ask_one, ranks)
        found = [each for each in asked if each is not None and not (operation == JOIN and each.answers)]
        return [each for each in found if not each.elsewhere] or found

    def awaits(self, operation: str, ranks: Sequence[int]) -> Callable[[], bool]:
        """What tells, called again and again while this rank waits for these in an operation, whether one of them waits
        for it in another one that it has not come to. They are asked beside what this rank does."""
        began, answers = time.monotonic(), SimpleQueue[bool]()
        is_waiting = functools.partial(self._is_waiting, operation=operation)
        due_s: float | None = FIRST_S  # None: somebody is being asked

        def inquire() -> None:
            answers.put(any(self._asked(is_waiting, ranks)))

        def is_awaited() -> bool:
            nonlocal due_s
            waited_s = time.monotonic() - began
            if due_s is not None and waited_s >= due_s:
                due_s = None
                background.begin(inquire, name="hvd_hetero.company")
            elif due_s is None and not answers.empty():
                self.awaited = answers.get()
                due_s = 1.5 * waited_s
            return self.awaited

        return is_awaited

    def _is_waiting(self, peer: Peer, operation: str) -> bool:
        """Whether a peer waits for this rank, which waits in an operation. One that does not answer waits for nobody;
        nor does one for which the operation is over: it is about to be so here, and then this rank comes."""
        with contextlib.suppress(ConnectionError):
            state = ask(peer, {"kind": "state", "operation": operation})
            over = operation not in state["submitted"] and 0 < self._times(operation) <= state["times"]
            return not over and waits_for(self.me, state, self._submitted())
        return False

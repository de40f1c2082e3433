"""Asks the processes of a job's other ranks which of them are missing in an operation, and which wait for this rank."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

from . import background
from .absence import JOIN, Absence, absence_of, waits_for
from .peer import GoneError, Peer, ask

T = TypeVar("T")
FIRST_S = 0.5  # seconds of waiting before other ranks are first asked; most waits end sooner
UNANSWERED_S = 5.0  # seconds after which ranks are asked again, at the latest, if one of them has not answered


class PeerGroup:
    """The other ranks of the job. `Watch` asks them through this object.

    Args:
        submitted: returns the names of the operations that this rank has submitted and that are still under way.
        times: returns how often this rank has submitted an operation of a given name; 0 if that is not known.

    Attributes:
        awaited: whether another rank has answered, since this rank last began to wait, that it waits for this one.
        me: this rank's own process; None before the ranks have met.
    """

    def __init__(self, submitted: Callable[[], Container[str]], times: Callable[[str], int]) -> None:
        self._submitted, self._times = submitted, times
        self._peers: dict[int, Peer] = {}
        self.awaited = False
        self.me: Peer | None = None

    def meet(self, peers: Iterable[Peer]) -> None:
        """Sets the processes of all ranks, this one's included, in place of those set before."""
        self._peers = {peer.rank: peer for peer in peers}

    def _others(self, ranks: Sequence[int]) -> list[Peer]:
        """The known peers with these global ranks, without this rank. The ranks above this one come first, so that not
        all ranks ask the same one first."""
        others = [self._peers[rank] for rank in ranks if rank in self._peers and self._peers[rank] != self.me]
        mine = 0 if self.me is None else self.me.rank
        return sorted(others, key=lambda peer: peer.rank < mine)

    def _asked(self, ask_one: Callable[[Peer], T], ranks: Sequence[int]) -> list[T]:
        """Calls `ask_one` for the peers with these global ranks, up to 16 at a time, and returns the results."""
        peers = self._others(ranks)
        try:
            with ThreadPoolExecutor(max(1, min(16, len(peers)))) as pool:
                return list(pool.map(ask_one, peers))
        except RuntimeError:  # the interpreter is shutting down and starts no more threads
            return list(map(ask_one, peers))

    def absent(self, operation: str, ranks: Sequence[int] | None = None) -> list[Absence]:
        """Returns those of `ranks` (global; default: all) that have not submitted an operation.

        Ranks that wait in another operation may only be victims of the same missing rank, and are left out, unless all
        missing ranks are such. For the operation of `hvd.join()`, a rank that answers is not missing: it still trains.
        """
        ranks = tuple(self._peers) if ranks is None else ranks
        ask_one = functools.partial(
            absence_of, operation=operation, ranks=ranks, me=self.me, submitted=self._submitted,
            times=self._times,
        )
        asked = self._asked(ask_one, ranks)
        found = [each for each in asked if each is not None and not (operation == JOIN and each.answers)]
        return [each for each in found if not each.elsewhere] or found

    def awaits(self, operation: str, ranks: Sequence[int]) -> Callable[[], bool]:
        """Returns a function that tells whether another rank waits for this one, to be polled during a wait.

        It becomes true when one of `ranks` waits in another operation that this rank has not submitted. The ranks are
        asked in a thread, first after `FIRST_S`, then at growing intervals (half of the time waited so far). A rank
        that has not answered may wait for this one all the same: then the next question comes within `UNANSWERED_S`.

        Args:
            operation: the operation that this rank waits for.
            ranks: the global ranks that take part in it.
        """
        began, answers = time.monotonic(), SimpleQueue[set[bool | None]]()
        is_waiting = functools.partial(self._is_waiting, operation=operation)
        due_s: float | None = FIRST_S  # None: somebody is being asked

        def inquire() -> None:
            answers.put(set(self._asked(is_waiting, ranks)))

        def is_awaited() -> bool:
            nonlocal due_s
            waited_s = time.monotonic() - began
            if due_s is not None and waited_s >= due_s:
                due_s = None
                background.begin(inquire, name="hvd_hetero.peer_group")
            elif due_s is None and not answers.empty():
                found = answers.get()
                self.awaited = True in found
                due_s = 1.5 * waited_s
                if None in found:
                    due_s = min(due_s, waited_s + UNANSWERED_S)
            return self.awaited

        return is_awaited

    def still_there(self, ranks: Sequence[int]) -> Callable[[], list[bool]]:
        """Returns a function that asks the processes of these global ranks, as they are now. It returns, for each that
        has not ended, whether it waits for this rank."""
        peers = self._others(ranks)

        def asked(peer: Peer) -> list[bool]:
            try:
                state = ask(peer, {"kind": "state"})
            except GoneError:
                return []
            except ConnectionError:
                return [False]
            return [waits_for(self.me, state, self._submitted(), self._times)]

        return lambda: [waits for peer in peers for waits in asked(peer)]

    def _is_waiting(self, peer: Peer, operation: str) -> bool | None:
        """Whether a peer waits for this rank in another operation, while this rank waits in `operation`.

        None if the peer does not answer; False if its process has ended. Also False if `operation` is already complete
        on the peer: then it is about to complete here, and this rank will go on to the operation in which the peer
        waits.
        """
        try:
            state = ask(peer, {"kind": "state", "operation": operation})
        except GoneError:
            return False
        except ConnectionError:
            return None
        over = operation not in state["submitted"] and 0 < self._times(operation) <= state["times"]
        return not over and waits_for(self.me, state, self._submitted(), self._times)

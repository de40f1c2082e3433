"""Tracks how far ahead a rank has dealt batches, so that no new plan changes a batch that is dealt already.

In each exchange every rank reports how many batches it has dealt ahead, and a new plan holds only for batches beyond
the furthest. A loader thread may deal further batches at any moment, so between its report and the answer (the summed
control vectors, perhaps with a plan) a rank deals no batch beyond the one that it has reported.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator


class DealingHorizon:
    """The last global batch that one rank has dealt, and the bound for its loader threads until the next answer.

    Args:
        dealt: index of the last global batch dealt so far; -1 for none.
    """

    def __init__(self, dealt: int = -1) -> None:
        self._changed = threading.Condition()
        self._dealt = dealt
        self._bound = math.inf  # index of the last batch that may be dealt before the answer
        self._answers = 0  # how many are to come until dealing is free again
        self._asked_by = 0  # the thread that takes in the answer, and so must not wait for it in `reaching`

    @contextlib.contextmanager
    def reaching(self, step: int) -> Iterator[None]:
        """A context in which global batch `step` is dealt, and no plan is taken in meanwhile.

        Waits first for the answer under way, if `step` is beyond what this rank has reported.
        """
        with self._changed:
            self._changed.wait_for(lambda: step <= self._bound or threading.get_ident() == self._asked_by)
            self._dealt = max(self._dealt, step)
            yield

    def said(self, step: int, *, lookahead: int, ahead: int, answers: int = 1) -> int:
        """Returns how many batches after `step` this rank reports as dealt, and bounds dealing until the answer.

        Args:
            step: the global batch that this rank is at.
            lookahead: batches that it may deal before they are used; it reports no fewer.
            ahead: batches that it may begin before the answer, as in local SGD; the bound is so many batches further.
            answers: how many times `heard` is entered before dealing is free again.
        """
        with self._changed:
            dealt_ahead = max(self._dealt - step, lookahead)
            self._bound, self._asked_by = step + ahead + dealt_ahead, threading.get_ident()
            self._answers = answers
            return dealt_ahead

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """A context in which an answer, perhaps with a new plan, is taken in. The last answer lifts the bound."""
        with self._changed:
            try:
                yield
            finally:
                self._answers -= 1
                if self._answers <= 0:
                    self._bound = math.inf
                    self._changed.notify_all()

    def lift(self) -> None:
        """Lifts the bound before the answer: none will come, as the exchange has failed; or another rank waits for this
        one elsewhere, as in a validation.

        No plan will change the batches dealt meanwhile: none is made before that other rank contributes to a merge
        again, and then it holds for batches beyond those of both ranks.
        """
        with self._changed:
            self._bound = math.inf
            self._changed.notify_all()

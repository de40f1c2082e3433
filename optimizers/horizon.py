"""How far a rank has dealt, so that no new plan reaches back into batches that a rank has dealt by the old one.

In each exchange every rank says how far it has dealt, and a new plan holds for batches beyond the furthest. A thread
that loads ahead may deal at any moment; between what a rank has said and what it hears, it deals no further than that.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator


class Horizon:
    """The last global batch that one rank has dealt.

    Args:
        dealt: where it starts.
    """

    def __init__(self, dealt: int = -1) -> None:
        self._changed = threading.Condition()
        self._dealt = dealt
        self._bound = math.inf  # no batch beyond it is dealt before the answer is there
        self._answers = 0  # that are on their way
        self._asked_by = 0  # the thread that waits for the answer, and must not wait here as well

    @contextlib.contextmanager
    def reaching(self, step: int) -> Iterator[None]:
        """Within it, batch `step` is dealt and no plan comes in. Waits for an answer that is on its way, if it must."""
        with self._changed:
            self._changed.wait_for(lambda: step <= self._bound or threading.get_ident() == self._asked_by)
            self._dealt = max(self._dealt, step)
            yield

    def said(self, step: int, *, lookahead: int, ahead: int, answers: int = 1) -> int:
        """How many batches after `step` are dealt, or may be without waiting: `lookahead` of them.

        From now on none beyond is dealt, until `heard`, so many times as `answers` will come; but this rank may begin
        `ahead` further ones meanwhile, and deals as far ahead of those.
        """
        with self._changed:
            dealt_ahead = max(self._dealt - step, lookahead)
            self._bound, self._asked_by = step + ahead + dealt_ahead, threading.get_ident()
            self._answers = answers
            return dealt_ahead

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """A context in which the answer, perhaps a new plan, is taken in; dealing goes on after the last answer."""
        with self._changed:
            try:
                yield
            finally:
                self._answers -= 1
                if self._answers <= 0:
                    self._bound = math.inf
                    self._changed.notify_all()

    def lift(self) -> None:
        """Lets dealing go on before the answer, to where another rank waits for this one. No plan reaches back to that:
        none is made before that rank speaks again, and then it holds for batches beyond where both of them are."""
        with self._changed:
            self._bound = math.inf
            self._changed.notify_all()

    def unheard(self) -> None:
        """No answer will come."""
        with self._changed:
            self._answers = 1
        with self.heard():
            pass

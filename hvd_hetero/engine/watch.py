"""The watchdog: says who is missing, for how long, in which operation and at which line, and ends waits without end.

Horovod's own stall check knows which ranks have not submitted an operation, on rank 0 and as numbers. It is silent as
soon as one process is stopped, because then the check itself waits. Here each rank notes what it has submitted and what
it waits for. One that waits for unusually long asks the others' processes, beside Horovod (see `peer`), and so can say
which of them have not come and what they are doing instead.

A wait beyond the bound is ended where it is caused: the rank that the others wait for prints what it is doing and ends
with an error, as if it had died. Then everything goes on as it does after a death: horovodrun stops the job, or an
elastic one goes on without that rank.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hvd_hetero.policy.patience import Patience

from . import background, script
from .absence import JOIN, Absence
from .company import Company
from .notice import LEFT
from .peer import Ear, Peer, ask
from .remembered import Remembered
from .sleep import wait_until
from .stderr import tell
from .waits import Wait, Waits

PERIOD_S = 0.5  # between looks at what this rank waits for
GRACE_S = 60.0  # beyond the bound, for the rank that is to end; then this one ends itself


class Watch:
    """What one rank does and waits for.

    Args:
        patience: how long a wait may be; None: nobody watches, but this rank can be asked, and asks, who is awaited.
        say: prints.
        leave: ends this process at once, with a status.
    """

    def __init__(
        self,
        patience: Patience | None,
        *,
        say: Callable[[str], None] | None = None,
        leave: Callable[[int], Any] = os._exit,
    ) -> None:
        self._patience, self._leave = patience, leave
        self._say = say or tell
        self.hearers = Remembered()  # of each story, besides people
        self._waits = Waits()
        self._company = Company(lambda: self._waits.submitted, self._waits.times)
        self._ear: Ear | None = None
        self._closed = threading.Event()

    # What the engine tells ------------------------------------------------------------------------------------------

    def submitted(self, operation: str, over: Callable[[], bool] = lambda: False) -> None:
        """This rank takes part in an operation; `over()` tells whether all have, as far as that can be seen."""
        self._waits.submit(operation, over)

    def ended(self, operation: str) -> None:
        """The operation is over for this rank, well or not."""
        self._waits.end(operation)

    def waiting(self, operation: str, ranks: tuple[int, ...]) -> contextlib.AbstractContextManager[None]:
        """While this thread waits for an operation of these global ranks."""
        self._company.awaited = False
        return self._waits.of_thread(operation, ranks)

    def begin_aside(
        self, operation: str, ranks: tuple[int, ...], *, lasts: Callable[[], bool], broken: Callable[[], None]
    ) -> None:
        """A framework begins to wait for an operation, and no thread of Python's does: until `end_aside`. Where
        `lasts()` says before that that it has given up, the operation has failed, and `broken` is called."""
        self._company.awaited = False
        self._waits.begin_aside(operation, ranks, lasts=lasts, broken=broken)

    def end_aside(self, operation: str) -> None:
        """The framework waits no longer: the operation is over."""
        self._waits.end_aside(operation)

    # Who watches ----------------------------------------------------------------------------------------------------

    @property
    def watches(self) -> bool:
        """Whether anybody looks at what this rank waits for."""
        return self._ear is not None and self._patience is not None

    def introduce(self, rank: int) -> str:
        """Listens for questions to this rank; what the others have to know for that, as one line of text."""
        if self._ear is None:
            try:
                self._ear = Ear(self._answer)
            except OSError as error:
                self._say(f"hvd_hetero: no port to be asked at ({error}): waits are not explained.")
                return ""
            if self.watches:
                background.begin(self._watch, name="hvd_hetero.watch", end=self._closed.set)
                atexit.register(self._look_aside)
        self._company.me = me = self._ear.peer(rank)
        return me.to_text()

    def meet(self, texts: Sequence[str]) -> None:
        """Takes in what `introduce` returned on all ranks. What was under way on the ranks before is forgotten."""
        self._waits.forget()
        self._company.meet(map(Peer.from_text, filter(None, texts)))

    def explain(self, ranks: Sequence[int] | None = None) -> str:
        """Why an operation of these ranks (default: all) failed, as far as their processes tell; "" when all of them
        are there. It raises nothing: what is explained is worth more."""
        try:
            absent = self._company.absent("", ranks)
        except Exception as error:
            self._say(f"hvd_hetero: the other ranks cannot be asked: {error!r}")
            return ""
        return "; ".join(absence.text for absence in absent if not absence.answers)

    def wait_unless_awaited(self, done: Callable[[], bool], operation: str, ranks: tuple[int, ...]) -> bool:
        """See the port. Whoever waits does so until this rank comes, and so nobody is asked again before it waits."""
        if self._company.awaited:
            return done()
        with self.waiting(operation, ranks):
            over = wait_until(done, unless=self._company.awaits(operation, ranks))
        if over:  # who was seen to wait may do so in what came after it
            self._company.awaited = False
        return over

    def close(self) -> None:
        """Watches no more."""
        self._closed.set()
        if self._ear is not None:
            self._ear.close()

    def _watch(self) -> None:
        looked_s, told = 0.0, ""
        while True:
            began = time.monotonic()
            if self._closed.wait(PERIOD_S):
                return
            woken = time.monotonic()
            # A longer sleep than asked for: this process was stopped itself, and the others did not keep it waiting.
            elapsed_s = looked_s + min(woken - began, 2 * PERIOD_S)
            try:
                self._look_aside()
                for wait in self._waits.now():
                    wait.lasted_s += elapsed_s
                    self._look(wait)
            except Exception as error:  # a watchdog that fails must not end what it watches
                if repr(error) != told:  # and not with each look
                    told = repr(error)
                    self._say(f"hvd_hetero: the watchdog failed: {told}")
            looked_s = time.monotonic() - woken

    def _look_aside(self) -> None:
        """Ends the waits that nobody waits any longer, and says why, as far as the others' processes tell."""
        for wait in self._waits.now():
            if not wait.lasts():
                broken = wait.broken
                self._waits.end_aside(wait.operation)
                broken()
                del broken
                if why := self.explain(wait.ranks):
                    self._say(f'hvd_hetero: "{wait.operation}" failed: {why}.')

    def _absent(self, wait: Wait) -> list[Absence] | None:
        """Who is missing; None where it is over, as to ask the others takes its time, or where all of them are there
        and only have not joined yet."""
        absent = self._company.absent(wait.operation, wait.ranks)
        if wait.operation == JOIN and not absent:
            wait.begin_anew()
            return None
        return absent if wait in self._waits.now() and wait.lasts() else None

    def _look(self, wait: Wait) -> None:
        assert self._patience is not None
        if wait.due_s is None:
            wait.due_s, wait.early_s = self._patience.word_s(self._waits.step_s), self._patience.least_s
        end_s = self._patience.end_s(self._waits.step_s)
        if wait.lasted_s >= end_s:
            self._end(wait, end_s)
        elif wait.lasted_s >= min(wait.due_s, wait.early_s):
            wait.early_s = 2 * wait.lasted_s
            absent = self._absent(wait)
            # Ranks that wait for each other do so for good, however long first steps may take.
            if absent is not None and (wait.lasted_s >= wait.due_s or any(each.mutual for each in absent)):
                wait.due_s = 2 * wait.lasted_s
                self._say(self._story(wait, absent))
                self._record(wait, absent)

    def _record(self, wait: Wait, absent: Sequence[Absence]) -> None:
        self.hearers.call(
            operation=wait.operation, waited_s=wait.lasted_s, line=script.line(),
            missing=[absence.peer.rank for absence in absent],
        )  # fmt: skip

    def _story(self, wait: Wait, absent: Sequence[Absence]) -> str:
        head = (
            f'hvd_hetero: {self._company.me} has waited {wait.lasted_s:.0f} s for the others in "{wait.operation}", at '
            f"{script.line()}."
        )
        texts = [absence.text for absence in absent]
        texts = texts or ["every rank has come, or cannot be asked: the operation itself does not end."]
        return "\n".join([head, *(f"hvd_hetero:   {text}" for text in texts)])

    def _end(self, wait: Wait, end_s: float) -> None:
        """Ends a wait that is too long: by ending the ranks that it is for, and at last this one."""
        absent = self._absent(wait)
        if absent is None:
            return
        if not wait.told:
            wait.told = True
            self._say(self._story(wait, absent) + f"\nhvd_hetero:   that is the bound ({end_s:.0f} s): it ends here.")
            for absence in absent:
                if absence.answers and not absence.elsewhere:
                    reason = f'{self._company.me} has waited {wait.lasted_s:.0f} s for this rank in "{wait.operation}"'
                    with contextlib.suppress(ConnectionError):
                        ask(absence.peer, {"kind": "end", "reason": reason})
                elif not absence.answers and absence.peer.is_here:
                    absence.peer.kill()
            self._record(wait, absent)
        helpless = not any(absence.answers and not absence.elsewhere for absence in absent)
        if wait.lasted_s >= end_s + GRACE_S or (helpless and all(absence.answers for absence in absent)):
            self._finish(f'{self._company.me} waits in "{wait.operation}" for what never comes')

    # What others ask ------------------------------------------------------------------------------------------------

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if question["kind"] == "end":
            threading.Thread(target=self._finish, args=(question["reason"],)).start()
            return {}
        waits = self._waits.now()
        return {
            "submitted": self._waits.submitted,
            "times": self._waits.times(str(question.get("operation", ""))),
            "waits": [wait.operation for wait in waits],
            "among": [wait.ranks for wait in waits],
            "s": time.monotonic() - self._waits.since,
            "where": script.line(),
        }

    def _finish(self, reason: str) -> None:
        """Ends this process, with what it is doing."""
        where = f"It is at {script.line()}:\n{script.stack()}".rstrip()
        self._say(f"hvd_hetero: {self._company.me} ends with an error: {reason}. {where}")
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        self._leave(LEFT)

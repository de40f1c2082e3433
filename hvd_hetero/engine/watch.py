"""The watchdog: reports which ranks keep others waiting, in which operation and at which line, and ends endless waits.

Horovod's own stall check reports on rank 0 only, and gives rank numbers only. It reports nothing once a process is
stopped, because then the check itself waits. Here each rank records which operations it has submitted and for which it
waits. A rank that waits unusually long asks the processes of the others over TCP (see `peer`), and prints which of them
have not submitted the operation and what they are doing instead.

A wait beyond the bound (`Patience.bound_s`, 10 minutes by default) is ended at its cause: the rank that the others wait
for prints its stack and ends with an error. The job then reacts as to any lost process: horovodrun stops it, or an
elastic job goes on without that rank.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hvd_hetero.policy.patience import Patience

from . import background, script
from .absence import JOIN, Absence
from .callback import WeakMethods
from .peer import Peer, QuestionServer, ask
from .peer_group import PeerGroup
from .sleep import wait_until
from .stderr import flush_output, tell
from .termination import EXIT_STATUS_LEFT
from .waits import Wait, Waits

PERIOD_S = 0.5  # seconds between two looks at what this rank waits for
LAST_WORDS_S = 5.0  # seconds in which a rank that ends has to have said so
STAY_S = 30.0  # seconds for which a rank that is to end with others waits until they have
STAY_PERIOD_S = 0.1  # seconds between two looks at that
GRACE_S = 60.0  # seconds beyond the bound in which the missing rank may end; then the waiting rank ends itself


class Watch:
    """The watchdog of one rank. The engines tell it which operations the rank submits, waits for and completes.

    Args:
        patience: how long a wait may be. None switches off the reports and the ending of waits; this rank still answers
            the questions of others, and still asks whether others wait for it (`wait_avoiding_deadlock`).
        say: prints a text; by default to standard error.
        leave: ends this process at once, with the given exit status.

    Attributes:
        hearers: the callbacks of `Engine.hear_waits`, which are called for each reported wait.
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
        self.hearers = WeakMethods()
        self._waits = Waits()
        self._peer_group = PeerGroup(lambda: self._waits.submitted, self._waits.times)
        self._server: QuestionServer | None = None
        self._closed = threading.Event()
        self._stay: Callable[[], None] = lambda: None  # sleeps until this process may end

    # What the engine tells ------------------------------------------------------------------------------------------

    def submitted(self, operation: str, over: Callable[[], bool] = lambda: False) -> None:
        """Notes that this rank has submitted an operation. `over()` returns whether the operation is complete, as far
        as its handle tells."""
        self._waits.submit(operation, over)

    def ended(self, operation: str) -> None:
        """Notes that an operation has ended on this rank, with a result or an error."""
        self._waits.end(operation)

    def waiting(self, operation: str, ranks: tuple[int, ...]) -> contextlib.AbstractContextManager[None]:
        """A context in which this thread waits for an operation of these global ranks."""
        self._peer_group.awaited = False
        return self._waits.of_thread(operation, ranks)

    def begin_graph_wait(
        self, operation: str, ranks: tuple[int, ...], *, lasts: Callable[[], bool], broken: Callable[[], None]
    ) -> None:
        """Notes that a framework's graph, and no Python thread, waits for an operation, until `end_graph_wait`.

        Args:
            lasts: returns whether the graph still runs. If not, before `end_graph_wait`, the operation has failed.
            broken: is called then.
        """
        self._peer_group.awaited = False
        self._waits.begin_graph_wait(operation, ranks, lasts=lasts, broken=broken)

    def end_graph_wait(self, operation: str) -> None:
        """Ends a wait that `begin_graph_wait` has begun: the operation is complete."""
        self._waits.end_graph_wait(operation)

    # Who watches ----------------------------------------------------------------------------------------------------

    @property
    def watches(self) -> bool:
        """Whether long waits of this rank are reported and ended: it has a `Patience`, and listens at a port."""
        return self._server is not None and self._patience is not None

    def introduce(self, rank: int) -> str:
        """Starts to listen for questions to this rank, if it does not yet, and starts the watchdog's thread.

        Returns:
            This rank's `Peer` as one line of text, for `meet` on the other ranks; "" if no port can be opened.
        """
        if self._server is None:
            try:
                self._server = QuestionServer(self._answer)
            except OSError as error:
                self._say(f"hvd_hetero: no port to be asked at ({error}): waits are not explained.")
                return ""
            if self.watches:
                background.begin(self._watch, name="hvd_hetero.watch", end=self._closed.set)
                atexit.register(self._end_failed_graph_waits)
        self._peer_group.me = me = self._server.peer(rank)
        return me.to_text()

    def meet(self, texts: Sequence[str]) -> None:
        """Sets the other ranks, by what `introduce` returned on all ranks. Is called after each initialisation of
        Horovod; forgets the operations of the ranks before."""
        self._waits.forget()
        self._stay = lambda: None
        self._peer_group.meet(map(Peer.from_text, filter(None, texts)))

    def explain(self, ranks: Sequence[int] | None = None) -> str:
        """Asks the ranks (global; default: all) whether they are there, after an operation of theirs has failed.

        Returns:
            Which processes are gone or do not answer, as text; "" if all answer. It raises nothing, so that the failure
            which is to be explained is not replaced by another.
        """
        try:
            absent = self._peer_group.absent("", ranks)
        except Exception as error:
            self._say(f"hvd_hetero: the other ranks cannot be asked: {error!r}")
            return ""
        return "; ".join(absence.text for absence in absent if not absence.answers)

    def wait_avoiding_deadlock(self, done: Callable[[], bool], operation: str, ranks: tuple[int, ...]) -> bool:
        """See `Engine.wait_avoiding_deadlock`. A rank that was found to wait for this one goes on waiting until this
        one submits its operation; so while `awaited` is true, no rank is asked again."""
        if self._peer_group.awaited:
            return done()
        with self.waiting(operation, ranks):
            over = wait_until(done, unless=self._peer_group.awaits(operation, ranks))
        if over:  # the rank that waited may have waited in an operation that follows this one
            self._peer_group.awaited = False
        return over

    def end_after(self, ranks: Sequence[int], *, leave: Callable[[], None]) -> None:
        """Lets this process end after those of `ranks` (global), which have failed, or `STAY_S` from now.

        The launcher ends all ranks as soon as one has ended with an error. Those that have failed would lose their last
        words, and what they write as they unwind.

        Args:
            leave: is called if one of them waits for this rank: lets collectives fail on it, so that it can go on.
        """
        there, until_s = self._peer_group.still_there(ranks), time.monotonic() + STAY_S

        def stay() -> None:
            has_left = False
            while time.monotonic() < until_s and (waits := there()):
                if any(waits) and not has_left:
                    has_left = True
                    leave()
                time.sleep(STAY_PERIOD_S)

        self._stay = stay
        # Registered again, because the last registered function is called first: before Horovod is shut down.
        atexit.unregister(self._stay_behind)
        atexit.register(self._stay_behind)

    def _stay_behind(self) -> None:
        self._stay()

    def close(self) -> None:
        """Ends the watchdog's thread, and stops listening."""
        self._closed.set()
        if self._server is not None:
            self._server.close()

    def _watch(self) -> None:
        looked_s, told = 0.0, ""
        while True:
            began = time.monotonic()
            if self._closed.wait(PERIOD_S):
                return
            woken = time.monotonic()
            # A sleep much longer than asked for means that this process itself was stopped. That time is not counted:
            # the other ranks did not cause it.
            elapsed_s = looked_s + min(woken - began, 2 * PERIOD_S)
            try:
                self._end_failed_graph_waits()
                for wait in self._waits.now():
                    wait.lasted_s += elapsed_s
                    self._look(wait)
            except Exception as error:  # a failure of the watchdog must not end the job
                if repr(error) != told:  # print the same failure only once
                    told = repr(error)
                    self._say(f"hvd_hetero: the watchdog failed: {told}")
            looked_s = time.monotonic() - woken

    def _end_failed_graph_waits(self) -> None:
        """Ends the waits of graphs that run no longer, as after a failed operation: calls their `broken`, and prints
        which ranks are gone, if any are."""
        for wait in self._waits.now():
            if not wait.lasts():
                broken = wait.broken
                self._waits.end_graph_wait(wait.operation)
                broken()
                del broken
                if why := self.explain(wait.ranks):
                    self._say(f'hvd_hetero: "{wait.operation}" failed: {why}.')

    def _absent(self, wait: Wait) -> list[Absence] | None:
        """Returns the ranks that are missing in the operation of a wait.

        None if the wait has ended while the others were asked; or if the operation is that of `hvd.join()` and all
        other ranks answer: they still train, and this rank goes on waiting.
        """
        absent = self._peer_group.absent(wait.operation, wait.ranks)
        if wait.operation == JOIN and not absent:
            wait.begin_anew()
            return None
        return absent if wait in self._waits.now() and wait.lasts() else None

    def _look(self, wait: Wait) -> None:
        assert self._patience is not None
        if wait.report_at_s is None:
            wait.report_at_s = self._patience.warn_after_s(self._waits.step_s)
            wait.check_deadlock_at_s = self._patience.min_warn_s
        end_s = self._patience.end_after_s(self._waits.step_s)
        if wait.lasted_s >= end_s:
            self._end(wait, end_s)
        elif wait.lasted_s >= min(wait.report_at_s, wait.check_deadlock_at_s):
            wait.check_deadlock_at_s = 2 * wait.lasted_s
            absent = self._absent(wait)
            # A deadlock (`mutual`) never resolves, so it is reported early, before `report_at_s`.
            if absent is not None and (wait.lasted_s >= wait.report_at_s or any(each.mutual for each in absent)):
                wait.report_at_s = 2 * wait.lasted_s
                self._say(self._story(wait, absent))
                self._record(wait, absent)

    def _record(self, wait: Wait, absent: Sequence[Absence]) -> None:
        self.hearers.call(
            operation=wait.operation, waited_s=wait.lasted_s, line=script.line(),
            missing=[absence.peer.rank for absence in absent],
        )  # fmt: skip

    def _story(self, wait: Wait, absent: Sequence[Absence]) -> str:
        head = (
            f"hvd_hetero: {self._peer_group.me} has waited {wait.lasted_s:.0f} s for the others in "
            f'"{wait.operation}", at {script.line()}.'
        )
        texts = [absence.text for absence in absent]
        texts = texts or ["every rank has come, or cannot be asked: the operation itself has not ended."]
        return "\n".join([head, *(f"hvd_hetero:   {text}" for text in texts)])

    def _end(self, wait: Wait, end_s: float) -> None:
        """Ends a wait of more than `end_s` seconds, which is called at each look from then on.

        At first it asks the missing ranks that answer to end, and kills those of this host that do not answer. This
        rank ends itself if the wait lasts `GRACE_S` longer; or at once, if all missing ranks answer but wait in other
        operations, or none is missing.
        """
        absent = self._absent(wait)
        if absent is None:
            return
        if not wait.told:
            wait.told = True
            self._say(self._story(wait, absent) + f"\nhvd_hetero:   that is the bound ({end_s:.0f} s): it ends here.")
            for absence in absent:
                if absence.answers and not absence.elsewhere:
                    me, waited = self._peer_group.me, f"{wait.lasted_s:.0f} s"
                    reason = f'{me} has waited {waited} for this rank in "{wait.operation}"'
                    with contextlib.suppress(ConnectionError):
                        ask(absence.peer, {"kind": "end", "reason": reason})
                elif not absence.answers and absence.peer.is_here:
                    absence.peer.kill()
            self._record(wait, absent)
        helpless = all(absence.answers and absence.elsewhere for absence in absent)
        if helpless or wait.lasted_s >= end_s + GRACE_S:
            self._finish(f'{self._peer_group.me} waits in "{wait.operation}" for what never comes')

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
            "counts": [self._waits.times(wait.operation) for wait in waits],
            "s": time.monotonic() - self._waits.since,
            "where": script.line(),
        }

    def _finish(self, reason: str) -> None:
        """Prints `reason` and the stack of the main thread, and ends this process with status `EXIT_STATUS_LEFT`.

        Printing may never end: the main thread may be stuck in it, as nobody reads what this process says.
        """
        where = f"It is at {script.line()}:\n{script.stack()}".rstrip()

        def speak() -> None:
            self._say(f"hvd_hetero: {self._peer_group.me} ends with an error: {reason}. {where}")
            flush_output()

        speaking = threading.Thread(target=speak, daemon=True)
        try:
            speaking.start()  # which may fail, as when the interpreter shuts down
            speaking.join(LAST_WORDS_S)
        finally:
            self._leave(EXIT_STATUS_LEFT)

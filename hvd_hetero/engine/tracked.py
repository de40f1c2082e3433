"""`Tracked`: an operation that this rank has submitted, of which the watchdog knows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

from .callback import WeakMethods
from .watch import Watch

AROUND_WAITS = WeakMethods()  # see `Engine.during_waits`; one for all engines of this process


class Tracked:
    """An operation that this rank has submitted; tells the watchdog (`Watch`) of it and of the waits for it.

    Args:
        operation: its name.
        ranks: the global ranks that take part.
        watch: the watchdog; None if there is none, as in a job of one rank.
        over: returns whether the operation is complete.
    """

    def __init__(
        self,
        operation: str,
        ranks: tuple[int, ...],
        watch: Watch | None,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._operation, self._ranks, self._watch = operation, ranks, watch
        if watch is not None:
            watch.submitted(operation, over)

    @contextlib.contextmanager
    def waiting(self, failure: type[Exception]) -> Iterator[None]:
        """A context in which this rank waits for the operation; afterwards it counts as complete.

        Raises:
            failure: as raised within the context; with the ranks that are gone, if any are, in front of its text.
        """
        if self._watch is None:
            with AROUND_WAITS.entered():
                yield
            return
        try:
            with self._watch.waiting(self._operation, self._ranks), AROUND_WAITS.entered():
                yield
        except failure as error:
            why = self._watch.explain(self._ranks)
            if not why:
                raise
            raise failure(f'"{self._operation}" failed: {why}. Horovod says: {error}') from None
        finally:
            self._watch.ended(self._operation)

    def begin_graph_wait(self, *, lasts: Callable[[], bool], broken: Callable[[], None]) -> Callable[[], None]:
        """Notes that a framework's graph waits for the operation, and no Python thread: see `awaits_in_graph`.

        Args:
            lasts: returns whether the graph still runs.
            broken: is called if `lasts()` becomes False before the end of the wait.

        Returns:
            A function that ends the wait.
        """
        if self._watch is None:
            return lambda: None
        self._watch.begin_graph_wait(self._operation, self._ranks, lasts=lasts, broken=broken)
        return functools.partial(self._watch.end_graph_wait, self._operation)

"""The loop of an elastic job: what a rank does when other ranks die, join or leave. For any framework.

It replaces Horovod's own loop (`horovod.common.elastic.run_fn`), which has two faults. It initialises Horovod again
outside of its `try`, so that a second death at that moment ends the job. And if ranks only left, it goes on without
`state.sync()`, so that a sampler still deals samples to ranks that are gone. Here, after each change of the ranks:
initialise Horovod, rebuild the objects that depend on the ranks, synchronise the state, call `train`.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Protocol, TypeVar

from hvd_hetero.policy.rank_words import ranks_text

from .environment import is_elastic
from .stderr import tell
from .termination import EXIT_STATUS_LEFT, TerminationHandler

T = TypeVar("T")

MOST_FAILURES = 3  # retries without a commit and on as many ranks; after them the cause is probably not a lost rank


class ElasticState(Protocol):
    """The state of an elastic job, as `JobState` implements it.

    A script may also use a state derived from Horovod's `State`, which has `sync`, `restore` and `on_reset` only.
    """

    commits: int

    def leave(self) -> None: ...

    def leave_alone(self) -> None: ...

    def sync(self) -> None: ...

    def break_off(self) -> None: ...

    def restore(self) -> None: ...

    def begin_reset(self) -> None: ...

    def on_reset(self) -> None: ...


class Failures:
    """Counts failures in a row, with no commit and no change of the number of ranks between them.

    Args:
        most: how many of them are tolerated.
    """

    def __init__(self, most: int = MOST_FAILURES) -> None:
        self._most, self._seen = most, 0
        self._at: tuple[int, int] | None = None

    def again(self, *, commits: int, size: int) -> bool:
        """Counts a failure on `size` ranks after `commits` commits. Returns whether to try again."""
        self._seen = self._seen + 1 if self._at == (commits, size) else 1
        self._at = commits, size
        return self._seen <= self._most


def let_leave(leaving: Sequence[int], *, rank: int) -> None:
    """Ends this process if `rank` is one of the ranks `leaving`; is called at each commit, on all ranks.

    Raises:
        SystemExit: this rank leaves; with exit status `EXIT_STATUS_LEFT`.
        HostsUpdatedInterrupt: other ranks leave; the elastic loop goes on without them.
    """
    if rank in leaving:
        raise SystemExit(EXIT_STATUS_LEFT)
    if leaving:
        tell(f"hvd_hetero: going on without {ranks_text(leaving)}, told to end.")
        exceptions = importlib.import_module("horovod.common.exceptions")
        raise exceptions.HostsUpdatedInterrupt(False)


def run(
    train: Callable[..., T],
    *,
    restart: Callable[[Callable[[], contextlib.AbstractContextManager[None]]], None],
    size: Callable[[], int],
    recoverable: Callable[[Exception], bool],
    explain: Callable[[], str],
) -> Callable[..., T]:
    """Wraps `train(state, ...)` so that it is called again after each change of the ranks, on a synchronised `state`.

    Args:
        train: the script's function. Any collective in it may raise; it is then called again, and has to go on from
            what `state` holds.
        restart: initialises Horovod on the present ranks, and rebuilds the objects that depend on them. Its argument
            returns a context manager, to be entered while it waits for the other ranks.
        size: returns the number of ranks. Raises ValueError if Horovod is not initialised.
        recoverable: returns whether an exception says that a peer is gone. Other exceptions end this rank.
        explain: returns which ranks are gone, as text; "" if it is unknown.
    """
    elastic = importlib.import_module("horovod.common.elastic")
    exceptions = importlib.import_module("horovod.common.exceptions")

    @wraps(train)
    def wrapper(state: ElasticState, *args: Any, **kwargs: Any) -> T:
        if not (hasattr(state, "sync") and hasattr(state, "restore")):
            raise TypeError(
                "state: expected an elastic state, as hvd.elastic.TorchState or KerasState, as the first argument. "
                f"Received: a {type(state).__name__}."
            )
        manager = elastic.notification_manager
        manager.init()
        manager.register_listener(state)
        failures, changed = Failures(), False
        ranks, ours = size(), hasattr(state, "leave")
        others = "the others go on" if is_elastic() else "the others end with it"
        say = f"this rank leaves at the next commit; {others}."
        handler = TerminationHandler(state.leave, say=say) if ours else None
        waiting = contextlib.nullcontext if handler is None else partial(handler.unreachable, state.leave_alone)

        def begin_anew() -> None:
            """Goes on with the present ranks, unless this one was told to leave."""
            nonlocal ranks
            if handler is not None and handler.told:  # the others, if any are left, go on without this rank
                state.leave_alone()
                raise SystemExit(EXIT_STATUS_LEFT)
            if ours:
                state.begin_reset()
            try:
                restart(waiting)
            finally:  # also if another rank dies during the rebuild
                with contextlib.suppress(ValueError):  # not initialised
                    ranks = size()
            state.on_reset()

        try:
            while True:
                try:
                    if changed:
                        begin_anew()
                    state.sync()
                    return train(state, *args, **kwargs)
                except exceptions.HostsUpdatedInterrupt:
                    changed = True
                except Exception as error:
                    if not recoverable(error):
                        raise
                    if ours and not failures.again(commits=state.commits, size=ranks):
                        words = f"failed {MOST_FAILURES + 1} times in a row, with no commit in between: giving up."
                        tell(f"hvd_hetero: this job has {words}")
                        raise
                    why = explain() or str(error)
                    tell(f"hvd_hetero: {why}. Going back to the last commit.")
                    if ours:
                        state.break_off()
                    state.restore()
                    changed = True
        finally:
            if handler is not None:
                handler.close()
            manager.remove_listener(state)

    return wrapper

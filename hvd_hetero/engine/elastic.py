"""The loop of an elastic job: what a rank does when others die, join or leave. For any framework.

Horovod's own loop (`horovod.common.elastic.run_fn`) initialises anew outside of what it guards: a second death in that
moment ends the job. It also goes on without synchronising where ranks only left, which leaves a sampler dealing to
ranks that are gone. Here each round is: initialise, rebuild what was made on the ranks, synchronise, train.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from .notice import LEFT, Notice
from .stderr import tell

T = TypeVar("T")

MOST_FAILURES = 3  # in a row, with no commit between them and on the same number of ranks: then it is no rank that died


class ElasticState(Protocol):
    """A Horovod `State` that counts its commits; `leaving` is None where it cannot tell others that a rank leaves.

    A state of a script's own, made of Horovod's, has `sync`, `restore` and `on_reset` alone.
    """

    commits: int

    @property
    def leaving(self) -> Sequence[int] | None: ...

    def leave(self) -> None: ...

    def leave_alone(self) -> None: ...

    def sync(self) -> None: ...

    def break_off(self) -> None: ...

    def restore(self) -> None: ...

    def on_reset(self) -> None: ...


class Failures:
    """Failures in a row, in which nothing was achieved and nothing changed.

    Args:
        most: so many are passed over.
    """

    def __init__(self, most: int = MOST_FAILURES) -> None:
        self._most, self._seen = most, 0
        self._at: tuple[int, int] | None = None

    def again(self, *, commits: int, size: int) -> bool:
        """Notes a failure on `size` ranks after so many commits; whether another try is worth it."""
        self._seen = self._seen + 1 if self._at == (commits, size) else 1
        self._at = commits, size
        return self._seen <= self._most


def let_leave(leaving: Sequence[int], *, rank: int) -> None:
    """At a commit: ends this process if it is one of the ranks `leaving`. If others are, raises HostsUpdatedInterrupt,
    by which the job goes on without them."""
    if rank in leaving:
        raise SystemExit(LEFT)
    if leaving:
        ranks = ", ".join(map(str, leaving))
        tell(f"hvd_hetero: rank {ranks} leaves, as it was told to.")
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
    """`train(state, ...)`, called anew after each change of the ranks, with the state that all of them have then.

    Args:
        train: may end at any exchange, and is called again; it goes on from what `state` says.
        restart: initialises Horovod on the ranks that there are now, and rebuilds what was made on them. It is given
            what to enter while it waits for them.
        size: the number of ranks.
        recoverable: whether it is what an exchange raises when a peer is gone. What else `train` raises ends this rank.
        explain: which ranks are gone, in words.
    """
    elastic = importlib.import_module("horovod.common.elastic")
    exceptions = importlib.import_module("horovod.common.exceptions")

    @functools.wraps(train)
    def wrapper(state: ElasticState, *args: Any, **kwargs: Any) -> T:
        manager = elastic.notification_manager
        manager.init()
        manager.register_listener(state)
        failures, changed = Failures(), False
        ranks, ours = size(), hasattr(state, "leaving")
        say = "this rank leaves at the next commit; the others go on."
        notice = Notice(state.leave, say=say) if ours and state.leaving is not None else None
        try:
            while True:
                try:
                    if changed:
                        if notice is not None and notice.told:  # the others come together without it, if any are left
                            state.leave_alone()
                            raise SystemExit(LEFT)
                        try:
                            restart(
                                contextlib.nullcontext if notice is None
                                else functools.partial(notice.unreachable, state.leave_alone)
                            )  # fmt: skip
                        finally:  # also of ranks one of which dies while they rebuild
                            with contextlib.suppress(ValueError):  # not initialised
                                ranks = size()
                        state.on_reset()
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
            if notice is not None:
                notice.close()
            manager.remove_listener(state)

    return wrapper

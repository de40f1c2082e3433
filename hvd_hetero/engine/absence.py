"""Finds out why a rank has not submitted an operation, by asking its process (see `peer`)."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

from .peer import BusyError, GoneError, Peer, SilentError, ask

# The operation of `hvd.join()`. A rank that waits in it takes part, with zeros, in all other operations of the same
# ranks, until all of them have joined. So it is missing in none of them.
JOIN = "horovod.join"


def waits_for(me: Peer | None, state: dict[str, Any], submitted: Container[str], times: Callable[[str], int]) -> bool:
    """Whether another rank waits for this rank in an operation that this rank has not submitted.

    Args:
        me: this rank's process; None if it is not known, and then the answer is False.
        state: the other process's answer to a "state" question: see `Watch._answer`.
        submitted: names of the operations that this rank has submitted and that are under way.
        times: returns how often this rank has submitted an operation of a given name; 0 if that is not known. If the
            other rank has submitted it as often, it is complete here, and about to be complete there.
    """
    return me is not None and any(
        me.rank in among and operation not in submitted and operation != JOIN and not 0 < count <= times(operation)
        for operation, among, count in zip(state["waits"], state["among"], state["counts"], strict=True)
    )


@dataclass(frozen=True)
class Absence:
    """A rank that has not submitted an operation in which other ranks wait for it.

    Attributes:
        peer: the rank's process.
        text: a sentence that says what the rank is doing, for messages.
        answers: whether the process answers questions, if only by saying that it is asked too much.
        elsewhere: whether it waits in another operation. It may then be a third rank that keeps it waiting.
        mutual: whether it waits in another operation for the rank that asks: a deadlock.
    """

    peer: Peer
    text: str
    answers: bool
    elsewhere: bool = False
    mutual: bool = False


def absence_of(
    peer: Peer, operation: str, ranks: Sequence[int], *, me: Peer | None, submitted: Callable[[], Container[str]],
    times: Callable[[str], int],
) -> Absence | None:
    """Asks a rank's process why it has not submitted an operation. Returns None if it has, or need not.

    Args:
        operation: the operation's name.
        ranks: the global ranks that take part in it.
        me: this rank's process, which asks.
        submitted: returns the names of the operations that this rank has submitted and that are under way.
        times: returns how often this rank has submitted an operation of a given name; 0 if unknown. If the peer has
            submitted this one as often, it has already completed it.
    """
    try:
        state = ask(peer, {"kind": "state", "operation": operation})
    except GoneError:
        return Absence(peer, f"{peer} is gone: its process has ended", answers=False)
    except SilentError:
        text = f"{peer} does not answer: its process is stopped, or its host or the link to it is down"
        return Absence(peer, text, answers=False)
    except BusyError:
        return Absence(peer, f"{peer} cannot be asked: too many connections to its port are open", answers=True)
    if operation in state["submitted"] or operation in state["waits"]:
        return None
    if 0 < times(operation) <= state.get("times", 0):  # the operation is already complete on the peer
        return None
    if (JOIN, sorted(ranks)) in zip(state["waits"], map(sorted, state["among"]), strict=True):
        return None
    if state["waits"]:
        text = (
            f'{peer} waits in "{state["waits"][0]}", at {state["where"]}: all ranks must call the same operations, in '
            "the same order"
        )
        return Absence(peer, text, answers=True, elsewhere=True, mutual=waits_for(me, state, submitted(), times))
    text = f"{peer} has not come: it is at {state['where']}, for {state['s']:.0f} s outside of any operation"
    return Absence(peer, text, answers=True)

"""Why a rank is missing in an operation, by what its process answers, or does not."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

from .peer import GoneError, Peer, SilentError, ask

# A rank that waits in it takes part in all else that its ranks do, with zeros, until all of them have joined.
JOIN = "horovod.join"


def waits_for(me: Peer | None, state: dict[str, Any], submitted: Container[str]) -> bool:
    """Whether a process of this state waits in an operation with `me`, who takes part only in those `submitted`."""
    return me is not None and any(
        me.rank in among and operation not in submitted and operation != JOIN
        for operation, among in zip(state["waits"], state["among"], strict=True)
    )


@dataclass(frozen=True)
class Absence:
    """A rank that is missing in an operation."""

    peer: Peer
    text: str
    answers: bool
    elsewhere: bool = False  # it waits in another operation: perhaps for somebody else
    mutual: bool = False  # and it waits for who asks


def absence_of(
    peer: Peer, operation: str, ranks: Sequence[int], *, me: Peer | None, submitted: Callable[[], Container[str]],
    times: int = 0,
) -> Absence | None:
    """Why a rank is missing in an operation of these ranks; None when it is not. `submitted` says in which operations
    `me` takes part, and `times` how often it has in this one."""
    try:
        state = ask(peer, {"kind": "state", "operation": operation})
    except GoneError:
        return Absence(peer, f"{peer} is gone: its process has ended", answers=False)
    except SilentError:
        text = f"{peer} does not answer: its process is stopped, or its host or the link to it is down"
        return Absence(peer, text, answers=False)
    if operation in state["submitted"] or operation in state["waits"]:
        return None
    if 0 < times <= state.get("times", 0):  # it has come and gone
        return None
    if (JOIN, sorted(ranks)) in zip(state["waits"], map(sorted, state["among"]), strict=True):
        return None
    if state["waits"]:
        text = (
            f'{peer} waits in "{state["waits"][0]}", at {state["where"]}: all ranks must call the same operations, in '
            "the same order"
        )
        return Absence(peer, text, answers=True, elsewhere=True, mutual=waits_for(me, state, submitted()))
    text = f"{peer} has not come: it is at {state['where']}, for {state['s']:.0f} s outside of any operation"
    return Absence(peer, text, answers=True)

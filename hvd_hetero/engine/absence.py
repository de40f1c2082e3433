"""Why a rank is missing in an operation, by what its process answers, or does not."""

from __future__ import annotations

from dataclasses import dataclass

from .peer import GoneError, Peer, SilentError, ask


@dataclass(frozen=True)
class Absence:
    """A rank that is missing in an operation."""

    peer: Peer
    text: str
    answers: bool
    elsewhere: bool = False  # it waits in another operation: perhaps for somebody else


def absence_of(peer: Peer, operation: str) -> Absence | None:
    """Why a rank is missing in an operation; None when it is not."""
    try:
        state = ask(peer, {"kind": "state"})
    except GoneError:
        return Absence(peer, f"{peer} is gone: its process has ended", answers=False)
    except SilentError:
        text = f"{peer} does not answer: its process is stopped, or its host or the link to it is down"
        return Absence(peer, text, answers=False)
    if operation in state["submitted"] or operation in state["waits"]:
        return None
    if state["waits"]:
        text = (
            f'{peer} waits in "{state["waits"][0]}", at {state["where"]}: all ranks must call the same operations, in '
            "the same order"
        )
        return Absence(peer, text, answers=True, elsewhere=True)
    text = f"{peer} has not come: it is at {state['where']}, for {state['s']:.0f} s outside of any operation"
    return Absence(peer, text, answers=True)

"""What a stream may offer beyond being iterated: `set_epoch`, and places that it keeps itself, by `state_dict` and
`load_state_dict`.

Iterable datasets that can go on without reading what came before have the last two: those of Hugging Face's
`datasets`, and what is written for `torchdata.stateful_dataloader`. They are methods of the iterator or, if that has
none, of the dataset.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple


class Kept(NamedTuple):
    """What a stream keeps of a place in it, from which it goes on.

    Attributes:
        used: samples of the pass that come before that place.
        state: what its `state_dict()` returned.
        draws: states of the random number generators that it draws from; None where these are left to it.
    """

    used: int
    state: Any
    draws: Any = None


def tell_epoch(samples: Any, epoch: int) -> None:
    """Calls `samples.set_epoch(epoch)`, if there is such a method."""
    if callable(set_epoch := getattr(samples, "set_epoch", None)):
        set_epoch(epoch)


def keeper(samples: Any, iterator: Any) -> Any:
    """Which of a stream and an iterator over it keeps the place.

    Raises:
        TypeError: neither does.
    """
    for one in (iterator, samples):
        if callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None)):
            return one
    raise TypeError(
        'resumes="state": expected a stream with state_dict() and load_state_dict(), or with iterators that have them. '
        f"Received: {type(samples).__name__}, without. With resumes=True a rank that goes on reads again what it has "
        "used of the present pass."
    )


def state_of(one: Any) -> Any:
    """A copy of the state of a `keeper`, which does not change as reading goes on."""
    return copy.deepcopy(one.state_dict())


def iterator_at(samples: Any, kept: Kept | None) -> tuple[Iterator[Any], int]:
    """An iterator over `samples` from `kept` on, and the number of samples before the first one that it gives. None:
    from the beginning on."""
    iterator = iter(samples)
    if kept is None:
        return iterator, 0
    one = keeper(samples, iterator)
    one.load_state_dict(copy.deepcopy(kept.state))
    # A dataset's state holds for the iterators that are made from then on.
    return (iterator if one is iterator else iter(samples)), kept.used

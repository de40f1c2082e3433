"""Finds which rank of a saved job each rank of the present one continues."""

from __future__ import annotations

from collections.abc import Sequence

Device = tuple[int, int | None]  # the identity and the kind of a rank's hardware; the kind is None if not known


def match_ranks(saved: Sequence[Device], now: Sequence[Device]) -> list[int | None]:
    """Returns for each present rank the saved rank whose measurements it continues; None if there is none.

    That is the rank of the same identity. A job that goes on in other containers, or on other hosts, knows no
    identity: then it is a rank with a device of the same kind, each only once, in order. A rank of another kind
    continues none, also under the same number: a plan made for faster ranks is worse than equal shares, and takes
    several plans to leave.

    Args:
        saved: the devices of the saved job's ranks.
        now: the devices of the present ranks.
    """
    matches: list[int | None] = [None] * len(now)
    free = list(range(len(saved)))
    for which in range(2):
        for rank, device in enumerate(now):
            if matches[rank] is None and (found := [at for at in free if saved[at][which] == device[which]]):
                matches[rank] = found[0]
                free.remove(found[0])
    return matches

"""The ladder: how much is asked of each rank, so that one that cannot keep up neither holds up the others nor is lost.

    every step      in every exchange of gradients, with the share that its speed gives it
    smaller share   in every exchange, with less than that: its short stops and slow messages then fit into the slack
    fewer merges    takes no part in steps, only in merges now and then
    out             trains no more; it is still measured, and may come back

Three measurements say where a rank belongs, each with a limit for each rung; the worst of them counts. They do not
depend on the rung it is on, or it would get better by being asked less and go up and down for ever.

A rank goes down one rung after some bad windows in a row, and up one after more good ones; good are windows in which
everything is well on the better side of the limits (`relief`). Some rank always stays at every step: a better one
before a worse, the lower before the higher.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import NamedTuple


class Rung(IntEnum):
    """How much is asked of a rank; a larger number is further down."""

    EVERY_STEP = 0
    SMALLER_SHARE = 1
    FEWER_MERGES = 2
    OUT = 3

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


Limits = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Window:
    """What was measured of one rank in one window of time."""

    slowness: float = 1.0       # the others' typical speed over its own, see `slownesses`
    stalled: float = 0.0        # fraction of the time in which it was stopped
    link: float = 0.0           # seconds that its link needs for one gradient over those of a typical rank's step

    def __post_init__(self) -> None:
        if not self.slowness > 0.0:
            raise ValueError("slowness: expected a number above 0, 1 for a rank as fast as the others. "
                             f"Received: {self.slowness}.")
        if not 0.0 <= self.stalled <= 1.0:
            raise ValueError(f"stalled: expected a fraction from 0 to 1. Received: {self.stalled}.")
        if not self.link >= 0.0:
            raise ValueError(f"link: expected 0 or more. Received: {self.link}.")


@dataclass(frozen=True, kw_only=True)
class LadderRule:
    """From which value on a rank belongs on "smaller share", on "fewer merges" and out; and how soon it gets there."""

    slowness: Limits = (8.0, 20.0, 100.0)       # shares make up for much: a rank 8 times slower gives 1/8 of another
    stalled: Limits = (0.03, 0.15, 0.8)
    link: Limits = (0.3, 1.0, 50.0)
    bad_windows: int = 3        # in a row, until it goes down
    good_windows: int = 6       # in a row, until it goes up
    relief: float = 0.6         # of the limits: below, a window is a good one

    def __post_init__(self) -> None:
        for name in ("slowness", "stalled", "link"):
            limits = getattr(self, name)
            if len(limits) != 3 or not 0.0 < limits[0] <= limits[1] <= limits[2]:
                raise ValueError(f"{name}: expected three limits above 0, none below the one before. "
                                 f"Received: {limits}.")
        if not 1 <= self.bad_windows < self.good_windows:
            raise ValueError("bad_windows and good_windows: expected at least 1, and more good than bad ones. "
                             f"Received: {self.bad_windows} and {self.good_windows}.")
        if not 0.0 < self.relief < 1.0 or self.relief * self.slowness[0] <= 1.0:
            raise ValueError("relief: expected a number below 1 and above 1 / the first limit of slowness, or no rank "
                             f"ever goes up. Received: {self.relief} and {self.slowness[0]}.")


class Move(NamedTuple):
    """One rank's way from a rung to the next."""

    rank: int
    before: Rung
    after: Rung
    reason: str


def slownesses(samples_per_s: Sequence[float]) -> tuple[float, ...]:
    """By rank, the median speed of the others over its own; 1.0 for a single rank, infinite for one at 0."""
    if not samples_per_s or not all(math.isfinite(v) and v >= 0.0 for v in samples_per_s):
        raise ValueError("samples_per_s: expected finite speeds, 0 or more, one for each rank. "
                         f"Received: {list(samples_per_s)}.")
    if max(samples_per_s) == 0.0:
        raise ValueError(f"samples_per_s: expected a rank that computes. Received: {list(samples_per_s)}.")
    if len(samples_per_s) == 1:
        return (1.0,)
    others = [statistics.median([*samples_per_s[:i], *samples_per_s[i + 1:]]) for i in range(len(samples_per_s))]
    least = 1e-9 * max(samples_per_s)       # others that all stand still make nobody infinitely fast
    return tuple(max(other, least) / v if v > 0.0 else math.inf for other, v in zip(others, samples_per_s, strict=True))


def decide_rungs(current: Sequence[Rung], windows: Sequence[Sequence[Window]],
                 rule: LadderRule | None = None) -> list[Move]:
    """Who changes its rung, in the order of ranks; a rank moves by one rung and at most once.

    Args:
        current: the rung of each rank.
        windows: by rank what was measured since its rung last changed, oldest first. None were measured: it stays.
    """
    rule = rule or LadderRule()
    if not current or len(current) != len(windows):
        raise ValueError("current and windows: expected a rung and windows for each rank, and a rank at least. "
                         f"Received: {len(current)} and {len(windows)}.")
    rungs = [Rung(rung) for rung in current]
    moves = {}
    for rank, (rung, seen) in enumerate(zip(rungs, windows, strict=True)):
        move = _wanted(rank, rung, seen, rule)
        if move is not None:
            moves[rank] = move
    # Ranks that leave every step do so worst first; the last one that is there stays, whatever was measured of it.
    full = [rank for rank, rung in enumerate(rungs) if rung == Rung.EVERY_STEP]
    staying = [rank for rank in full if rank not in moves]
    if full and not staying:
        del moves[min(full, key=lambda rank: (_severity(windows[rank], rule), rank))]
    if not full:
        nearest = min(range(len(rungs)), key=lambda rank: (rungs[rank], _severity(windows[rank], rule), rank))
        moves[nearest] = Move(nearest, rungs[nearest], Rung(rungs[nearest] - 1), "no rank is at every step")
    return [moves[rank] for rank in sorted(moves)]


def _wanted(rank: int, rung: Rung, seen: Sequence[Window], rule: LadderRule) -> Move | None:
    """The move that a rank's own measurements ask for."""
    lately = seen[-rule.bad_windows:]
    if len(lately) == rule.bad_windows and all(_belongs(w, rule, 1.0)[0] > rung for w in lately):
        return Move(rank, rung, Rung(rung + 1), f"{_belongs(lately[-1], rule, 1.0)[1]}, {len(lately)} windows in a row")
    lately = seen[-rule.good_windows:]
    if len(lately) == rule.good_windows and all(_belongs(w, rule, rule.relief)[0] < rung for w in lately):
        return Move(rank, rung, Rung(rung - 1), f"well within the limits of \"{Rung(rung - 1)}\", "
                                                f"{len(lately)} windows in a row")
    return None


def _belongs(window: Window, rule: LadderRule, part: float) -> tuple[Rung, str]:
    """The rung that these measurements ask for, with limits at a part of the rule's; and the worst one, in words."""
    worst, words = Rung.EVERY_STEP, "nothing is wrong"
    for name, text in (("slowness", "{:.3g} times slower than the others"), ("stalled", "stopped {:.0%} of the time"),
                       ("link", "its link takes {:.2g} of a step")):
        value, limits = getattr(window, name), getattr(rule, name)
        rung = Rung(sum(value >= part * limit for limit in limits))
        if rung > worst:
            worst, words = rung, text.format(value)
    return worst, words


def _severity(seen: Sequence[Window], rule: LadderRule) -> float:
    """How bad the last window was: the largest measurement over its first limit; infinite where there is none."""
    if not seen:
        return math.inf
    return max(getattr(seen[-1], f.name) / getattr(rule, f.name)[0] for f in fields(Window))

"""Changes of speed: since when one rank has computed at the speed that it has now, and since which plan all have.

A change of speed is told from a change of share without knowing the overhead: for any overhead >= 0, a larger share
makes the step longer and a sample shorter. What makes *both* longer (or both shorter) is a change of speed.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence

from .speed import LEAST_NOISE, SHORTEST_S, Observation, by_size, middle

REACH = 24                   # observations on either side of a possible change of speed that are compared
FEW = 4.0                    # pairs of neighbours whose noise may by luck come out at half of what it is
CHANGE_IN_STANDARD_ERRORS = 5.0
MEDIAN_INEFFICIENCY = 1.2533  # standard error of a median over that of a mean, normal noise: sqrt(pi / 2)


def latest_regime(observations: Sequence[Observation], *, minimum: int = 4,
                  tolerance: float = 0.15) -> Sequence[Observation]:
    """What was measured since the speed last changed by more than `tolerance`; everything if it never did.

    At every point with `minimum` observations on both sides the medians before and after are compared: for each size
    seen on both sides, and for the two sizes that meet there. Of the slower side three quarters have to stand out (all
    of four), so that no handful of spikes passes for a change.
    """
    if minimum < 2 or not tolerance > 0.0:
        raise ValueError(f"minimum and tolerance: expected at least 2, and above 0. Received: {minimum}, {tolerance}.")
    seen = [o for o in observations if o.samples > 0]
    start = _latest_change(seen, minimum, tolerance)
    return latest_regime(seen[start:], minimum=minimum, tolerance=tolerance) if start else observations


def last_shift(windows: Sequence[Sequence[tuple[int, Observation]]], starts: Sequence[int], *,
               tolerance: float = 0.05) -> int:
    """The step since which no rank's speed changed together with the plan; 0 if none ever did.

    Ranks that wait less leave less of a shared machine to each other: a plan itself changes speeds, mostly of several
    ranks. Times from before compare with those after it on none of them, although a rank may not show it: what became
    shorter by a smaller share and longer by a slower core looks like overhead.

    Args:
        windows: of each rank, what was measured in which step.
        starts: the steps from which plans held, ascending.
        tolerance: relative; less than this between two plans is no change.
    """
    edges = [*starts, math.inf]
    spans = [(window[0][0], window[-1][0]) for window in windows if window]
    for index in range(len(starts) - 1, 0, -1):
        first, start, end = edges[index - 1:index + 2]
        if not any(earliest < start <= latest for earliest, latest in spans):   # no window reaches over it
            continue
        before = [[seen for step, seen in window if first <= step < start] for window in windows]
        after = [[seen for step, seen in window if start <= step < end] for window in windows]
        if any(_surely_changed(old, new) > tolerance for old, new in zip(before, after, strict=True)):
            return int(start)
    return 0


def _surely_changed(before: Sequence[Observation], after: Sequence[Observation], *, minimum: int = 4) -> float:
    """By how much a rank's speed changed at the least, relative to it and one standard error less; 0.0 if unknown."""
    if min(len(before), len(after)) < minimum:
        return 0.0
    (b, old), (c, new) = (max(by_size(seen).items(), key=lambda size: len(size[1])) for seen in (before, after))
    off = sorted(abs(t / middle(times) - 1.0) for times in (old, new) for t in times)
    noise = max(1.4826 * middle(off), LEAST_NOISE)
    return _slowdown(b, middle(old), c, middle(new)) - 1.0 - _error_of_change(noise, old, new)


def _slowdown(b: float, first: float, c: float, second: float) -> float:
    """How many times as long the slower of two speeds takes at the least: per step *and* per sample; below 1: none."""
    if second < first:      # time runs backwards: a faster speed after is a slower one before
        b, first, c, second = c, second, b, first
    return min(second / first, second * b / (first * c))


def _error_of_change(noise: float, old: Sequence[float], new: Sequence[float]) -> float:
    """The standard error of the ratio of two medians."""
    return MEDIAN_INEFFICIENCY * noise * math.sqrt(1.0 / len(old) + 1.0 / len(new))


def _latest_change(seen: Sequence[Observation], minimum: int, tolerance: float) -> int:
    """The index of the first observation after the latest change of speed; 0 if there was none."""
    steady = sorted(abs(p.pass_s - o.pass_s) / max(o.pass_s, SHORTEST_S)
                    for o, p in zip(seen, seen[1:], strict=False) if o.size == p.size)
    noise = max(1.4826 * middle(steady) / math.sqrt(2.0) if steady else 0.0, LEAST_NOISE)
    noise *= 1.0 + FEW / max(len(steady), 1)
    before, after = by_size(seen[:minimum]), by_size(seen[minimum:minimum + REACH])
    last, best, size, clearest = 0, 0, 0.0, 0.0
    for at in range(minimum, len(seen) - minimum + 1):
        pairs = [(b, b) for b in after if b in before]
        if seen[at - 1].size != seen[at].size:
            pairs.append((seen[at - 1].size, seen[at].size))
        for b, c in pairs:
            if min(len(before[b]), len(after[c])) < minimum:
                continue
            clarity = _change(b, before[b], c, after[c], noise, tolerance)
            if clarity > 0.0 and (at > last + minimum or clarity >= clearest):
                best, size, clearest = at, b if b == c else 0.0, clarity
            last = at if clarity > 0.0 else last
        _move(before, seen, add=at, drop=at - REACH)
        _move(after, seen, add=at + REACH, drop=at)
    return _boundary(seen, best, size, minimum) if size else best


def _change(b: float, old: Sequence[float], c: float, new: Sequence[float], noise: float, tolerance: float) -> float:
    """How many standard errors lie between the speeds before (size b) and after (size c); 0.0 if that is no change."""
    surely = _slowdown(b, middle(old), c, middle(new))
    if surely <= 1.0 + tolerance:
        return 0.0
    error = _error_of_change(noise, old, new)
    margin = max(tolerance, CHANGE_IN_STANDARD_ERRORS * error)
    slow = max(old, new, key=middle)
    quarter = slow[(len(slow) - 1) // 4] / middle(slow) * surely
    return (surely - 1.0) / error if surely > 1.0 + margin and quarter > 1.0 + 0.5 * margin else 0.0


def _move(times: dict[float, list[float]], seen: Sequence[Observation], *, add: int, drop: int) -> None:
    """None; slides a window of times by size one observation onwards."""
    if add < len(seen):
        insort(times.setdefault(seen[add].size, []), max(seen[add].pass_s, SHORTEST_S))
    if drop >= 0:
        of_size = times[seen[drop].size]
        del of_size[bisect_left(of_size, max(seen[drop].pass_s, SHORTEST_S))]
        if not of_size:
            del times[seen[drop].size]


def _boundary(seen: Sequence[Observation], near: int, size: float, minimum: int) -> int:
    """The cut close to `near` that leaves the fewest observations of `size` on the wrong side of it."""
    first, stop = max(near - REACH, 0), min(near + REACH, len(seen))
    old = middle(by_size(seen[first:near])[size])
    new = middle(by_size(seen[near:stop])[size])
    late = [(o.pass_s**2 > old * new) == (new > old) for o in seen[first:stop]]
    wrong = sum(not is_late for is_late, o in zip(late, seen[first:stop], strict=True) if o.size == size)
    fewest, where = len(seen), near
    for at, is_late in enumerate(late, start=first):
        if fewest >= wrong and minimum <= at <= len(seen) - minimum:
            fewest, where = wrong, at
        if seen[at].size == size:
            wrong += 1 if is_late else -1
    return where

"""Detects changes of speed, so that speed models are fitted to observations from after the last change only.

A change of speed is told from a change of share without knowledge of the overhead. For any overhead >= 0, a larger
share makes the step longer and the time per sample shorter. If *both* become longer (or both shorter), the speed of the
rank has changed.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise

from .speed import LEAST_NOISE, SHORTEST_S, Observation, by_size, middle

REACH = 24                   # observations on either side of a possible change of speed that are compared
FEW = 4.0                    # noise that is estimated from so many pairs of neighbours is doubled: it may be too low
CHANGE_IN_STANDARD_ERRORS = 5.0
CHANGED_BY_A_PLAN = 0.05     # a plan changed speeds if that of a rank differs by more than this fraction
FEWEST_WITH_A_PLAN = 4       # observations of a rank with a plan, to compare them with those of another plan
MEDIAN_INEFFICIENCY = 1.2533  # standard error of a median over that of a mean, normal noise: sqrt(pi / 2)


def since_last_speed_change(observations: Sequence[Observation], *, minimum: int = 4,
                            tolerance: float = 0.15) -> Sequence[Observation]:
    """The observations of one rank since its speed last changed; all of them if it never did.

    At every point with `minimum` observations on both sides, the median times before and after are compared: for each
    size (samples per pass) that occurs on both sides, and for the two sizes that meet at that point. Three quarters of
    the slower side have to stand out (all, if there are four), so that a few spikes do not count as a change.

    Args:
        observations: oldest first.
        minimum: at least 2.
        tolerance: relative; a smaller change of time is none.
    """
    if minimum < 2 or not tolerance > 0.0:
        raise ValueError(f"minimum and tolerance: expected at least 2, and above 0. Received: {minimum}, {tolerance}.")
    seen = [o for o in observations if o.samples > 0]
    start = _latest_change(seen, minimum, tolerance)
    return since_last_speed_change(seen[start:], minimum=minimum, tolerance=tolerance) if start else observations


def last_plan_that_changed_speeds(windows: Sequence[Sequence[tuple[int, Observation]]], starts: Sequence[int]) -> int:
    """The first step of the last plan with which the speed of any rank changed; 0 if there was no such plan.

    A plan can itself change speeds, mostly of several ranks: ranks that wait less leave less of a shared machine to
    each other. Then observations of *no* rank from before that plan should be compared with later ones, also if the
    change does not show on a rank: a time that became shorter by a smaller share and longer by a slower core looks like
    overhead.

    Args:
        windows: by rank, pairs of a step and its observation, oldest first.
        starts: the first steps of all plans, ascending.
    """
    edges = [*starts, math.inf]
    spans = [(window[0][0], window[-1][0]) for window in windows if window]
    for index in range(len(starts) - 1, 0, -1):
        first, start, end = edges[index - 1:index + 2]
        if not any(earliest < start <= latest for earliest, latest in spans):   # no window has steps of both plans
            continue
        before = [[seen for step, seen in window if first <= step < start] for window in windows]
        after = [[seen for step, seen in window if start <= step < end] for window in windows]
        if any(_surely_changed(old, new) > CHANGED_BY_A_PLAN for old, new in zip(before, after, strict=True)):
            return int(start)
    return 0


def _surely_changed(before: Sequence[Observation], after: Sequence[Observation]) -> float:
    """The relative change of a rank's speed, as a lower bound less one standard error; may be negative; 0.0 if unknown.

    Each side's most frequent size is compared; sides with fewer than `FEWEST_WITH_A_PLAN` observations are not.
    """
    if min(len(before), len(after)) < FEWEST_WITH_A_PLAN:
        return 0.0
    (b, old), (c, new) = (max(by_size(seen).items(), key=lambda size: len(size[1])) for seen in (before, after))
    off = sorted(abs(t / middle(times) - 1.0) for times in (old, new) for t in times)
    noise = max(1.4826 * middle(off), LEAST_NOISE)
    return _slowdown(b, middle(old), c, middle(new)) - 1.0 - _error_of_change(noise, old, new)


def _slowdown(b: float, first: float, c: float, second: float) -> float:
    """The factor by which one speed is surely slower than the other, whichever it is; 1 or less: no surely slower one.

    It is the smaller of the factors of the time per step and of the time per sample.

    Args:
        b, first: samples and seconds of a pass before.
        c, second: samples and seconds of a pass after.
    """
    if second < first:      # swap the sides: a faster speed after is a slower one before
        b, first, c, second = c, second, b, first
    return min(second / first, second * b / (first * c))


def _error_of_change(noise: float, old: Sequence[float], new: Sequence[float]) -> float:
    """The standard error of the ratio of two medians, where one observation has the relative noise `noise`."""
    return MEDIAN_INEFFICIENCY * noise * math.sqrt(1.0 / len(old) + 1.0 / len(new))


def _latest_change(seen: Sequence[Observation], minimum: int, tolerance: float) -> int:
    """The index of the first observation after the latest change of speed; 0 if there was none."""
    if _steady(seen, minimum, tolerance):  # which is quicker told
        return 0
    steady = sorted(abs(p.pass_s - o.pass_s) / max(o.pass_s, SHORTEST_S)
                    for o, p in pairwise(seen) if o.size == p.size)
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


def _steady(seen: Sequence[Observation], minimum: int, tolerance: float) -> bool:
    """Whether no medians of `minimum` observations or more can differ by more than `tolerance`, whichever these are."""
    each = (minimum - 1) // 2  # so many observations at least lie on either side of a median
    within = {b: (times[each], times[-1 - each]) for b, times in by_size(seen).items() if len(times) >= minimum}
    meeting = {(o.size, p.size) for o, p in pairwise(seen)}
    return all(
        _slowdown(b, first, c, second) <= 1.0 + tolerance
        for b, c in [*((b, b) for b in within), *meeting] if b in within and c in within
        for first, second in zip(within[b], reversed(within[c]), strict=True)
    )


def _change(b: float, old: Sequence[float], c: float, new: Sequence[float], noise: float, tolerance: float) -> float:
    """How many standard errors lie between the speed before and the one after; 0.0 if there is no significant change.

    Args:
        b, old: samples and sorted seconds of a pass before.
        c, new: samples and sorted seconds of a pass after.
        noise: relative noise of one observation.
    """
    surely = _slowdown(b, middle(old), c, middle(new))
    if surely <= 1.0 + tolerance:
        return 0.0
    error = _error_of_change(noise, old, new)
    margin = max(tolerance, CHANGE_IN_STANDARD_ERRORS * error)
    slow = max(old, new, key=middle)
    quarter = slow[(len(slow) - 1) // 4] / middle(slow) * surely
    return (surely - 1.0) / error if surely > 1.0 + margin and quarter > 1.0 + 0.5 * margin else 0.0


def _move(times: dict[float, list[float]], seen: Sequence[Observation], *, add: int, drop: int) -> None:
    """Slides a window, which maps sizes to sorted times, one observation onwards.

    Args:
        times: the window; changed in place.
        seen: all observations.
        add: the index of the observation that enters; beyond the last one: none does.
        drop: the index of the observation that leaves; below 0: none does.
    """
    if add < len(seen):
        insort(times.setdefault(seen[add].size, []), max(seen[add].pass_s, SHORTEST_S))
    if drop >= 0:
        of_size = times[seen[drop].size]
        del of_size[bisect_left(of_size, max(seen[drop].pass_s, SHORTEST_S))]
        if not of_size:
            del times[seen[drop].size]


def _boundary(seen: Sequence[Observation], near: int, size: float, minimum: int) -> int:
    """The index near `near` that separates slow from fast observations of `size` with the fewest on the wrong side."""
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

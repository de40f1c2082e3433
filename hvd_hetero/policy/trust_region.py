"""How far one plan moves the shares: within a trust region, and half as far where a rank goes back.

Each share grows at most by the factor of the trust region and shrinks at most by its square, as speed models are
extrapolated from the shares seen so far; to a share that its rank's model was measured at, it moves at once. A move
that reverses the last one is halved (LB-BSP, section 3.3.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from .partition import Bound, split
from .speed import SpeedModel


def reachable(current: Sequence[int], models: Sequence[SpeedModel], limits: Sequence[Bound], *, trust_region: float,
              last: Sequence[int] | None, micro_batch: Sequence[int | None] | None = None
              ) -> tuple[tuple[int, ...], bool]:
    """The best shares that one plan may lead to from the current ones; and whether the trust region keeps some share
    from going further.

    Args:
        current: the shares now, by rank; those returned have the same sum.
        models: speed models by rank.
        limits: bounds of shares by rank, which allow the current ones.
        trust_region: the factor by which a share may grow, above 1; `math.inf`: no limit.
        last: the shares before the current ones; None: no move is halved.
        micro_batch: by rank, the most samples of one pass; None: no limit.
    """
    whole = sum(current)
    least = whole / (8 * len(models))      # a smaller share may grow as if it were this large: else it grows too slowly
    trusted = [_narrowed(limit, min(share / trust_region**2, model.measured[0]),
                         max(max(share, least, limit.quantum) * trust_region, model.measured[1]))
               for share, limit, model in zip(current, limits, models, strict=True)]
    shares = split(models, whole, trusted, micro_batch=micro_batch)      # the current ones are always within
    cut = any(
        (share == trust.lower > limit.lower) or (share == trust.upper != limit.upper)
        for share, trust, limit in zip(shares, trusted, limits, strict=True)
    )
    if last is None:
        return shares, cut
    damped = []
    for new, now, old, trust in zip(shares, current, last, trusted, strict=True):
        half = (now + new) / 2
        damped.append(_narrowed(trust, min(now, half), max(now, half)) if _reverses(new, now, old) else trust)
    return split(models, whole, damped, micro_batch=micro_batch), cut


def turns_back(shares: Sequence[int], current: Sequence[int], last: Sequence[int] | None) -> bool:
    """Whether a rank's share, with these, goes back from the current one towards the one before it."""
    return last is not None and any(map(_reverses, shares, current, last))


def _reverses(new: int, now: int, old: int) -> bool:
    """Whether a share that went from `old` to `now` goes back with `new`."""
    return (new - now) * (now - old) < 0


def _narrowed(bound: Bound, lower: float, upper: float) -> Bound:
    """The intersection of `bound` with [lower, upper], rounded outwards to the quantum. It must not be empty."""
    low = max(bound.lower, math.floor(lower / bound.quantum) * bound.quantum)
    highest = math.inf if bound.upper is None else bound.upper
    high = min(highest, upper if math.isinf(upper) else math.ceil(upper / bound.quantum) * bound.quantum)
    return replace(bound, lower=low, upper=None if math.isinf(high) else int(high))

"""The ladder: how much each rank takes part in training, from every step down to not at all, and the way back up.

    every step -> smaller share -> fewer merges -> out

- A smaller share is what `partition.split` gives to a slower rank.
- Fewer merges, where ranks train apart. The shortest round of a rank is one step. Where that alone takes r rounds of
  the fastest rank, r = s_i / (H min_j s_j), every merge would come r times later, for all. Such a rank takes part in
  every k-th merge instead, k being r to the nearest, and has said nothing to those between (eager-SGD, Li et al. 2020,
  arXiv:1908.04207, lets ranks contribute nothing where they are late; here they say so in advance).
- Out: `split` gives a rank no sample where a single one would make it the last of all, if its bounds allow that.
- Up again: k follows the measured seconds both ways. A rank that is out is not measured any more, so it is tried with
  the smallest share when it has been out for long enough: tries become rarer by doubling, and none costs more than a
  hundredth of the time since the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from .partition import Bound, InfeasibleError, split, step_time_s
from .replan import Plan
from .speed import SpeedModel

KEPT = 0.75             # rounds by which r may be off k before k changes: half of one, and a band against noise
LEAST_SLOWER = 3.0      # times as slow as the fastest rank has to be who misses merges: short rounds are noisy
LEAST_IDLE_STEPS = 256  # before the first try; twice as many before each further one
TRY_STEPS = 10          # global batches of a try: a few to settle, and a few that are measured
PRICE = 0.01            # of the time since a rank went out, at most, for a try


class Rung(IntEnum):
    """How much a rank takes part; a larger number is further down: EVERY_STEP, SMALLER_SHARE, FEWER_MERGES, OUT."""

    EVERY_STEP = 0
    SMALLER_SHARE = 1
    FEWER_MERGES = 2
    OUT = 3

    @property
    def title(self) -> str:
        """The rung in words."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, kw_only=True)
class Move:
    """A rank that goes up or down, and why."""

    rank: int
    before: Rung
    after: Rung
    reason: str


def rungs(shares: Sequence[int], intervals: Sequence[int]) -> tuple[Rung, ...]:
    """Where each rank stands, with these shares of a global batch, taking part in every k-th merge."""
    if not shares or len(shares) != len(intervals) or min(shares) < 0 or min(intervals) < 1:
        raise ValueError("shares and intervals: expected one of each for every rank, at least 0 and at least 1. "
                         f"Received: {list(shares)} and {list(intervals)}.")
    equal = sum(shares) // len(shares)
    return tuple(
        Rung.OUT if share == 0 else Rung.FEWER_MERGES if k > 1 else
        Rung.SMALLER_SHARE if share < equal else Rung.EVERY_STEP
        for share, k in zip(shares, intervals, strict=True)
    )


def moves(before: Sequence[Rung], after: Sequence[Rung], reason: str) -> tuple[Move, ...]:
    """The ranks that have moved from one rung to another, and why."""
    return tuple(
        Move(rank=rank, before=old, after=new, reason=reason)
        for rank, (old, new) in enumerate(zip(before, after, strict=True)) if old != new
    )


def merge_intervals(step_s: Sequence[float], lengths: Sequence[int], *, current: Sequence[int],
                    most: int) -> tuple[int, ...]:
    """For each rank k: it takes part in every k-th merge. The fastest rank takes part in each.

    k at most doubles at a time: one long step may have been a stall.

    Args:
        step_s: seconds of one local step, by rank.
        lengths: local steps of each rank's round, as `staleness.round_lengths` gives them.
        current: the intervals that hold now.
        most: no interval is longer.
    """
    if not step_s or not len(step_s) == len(lengths) == len(current):
        raise ValueError("step_s, lengths and current: expected one of each for every rank. "
                         f"Received: {len(step_s)}, {len(lengths)} and {len(current)}.")
    if not all(math.isfinite(s) and s > 0.0 for s in step_s) or min(lengths) < 1 or most < 1:
        raise ValueError("step_s, lengths and most: expected finite seconds above 0, and at least 1. "
                         f"Received: {list(step_s)}, {list(lengths)} and {most}.")
    fastest = min(range(len(step_s)), key=lambda rank: (step_s[rank], rank))
    round_s = lengths[fastest] * step_s[fastest]
    chosen = []
    for seconds, length, k in zip(step_s, lengths, current, strict=True):
        rounds = length * seconds / round_s
        if seconds < LEAST_SLOWER * step_s[fastest]:
            rounds = 1.0
        near = k if abs(rounds - k) <= KEPT else math.floor(rounds + 0.5)
        chosen.append(min(max(near, 1), 2 * k, most))
    return tuple(chosen)


def idle_since(plans: Sequence[Plan], rank: int) -> int | None:
    """The step from which `rank` has had no sample; None where it has some. `plans`: all so far, oldest first."""
    since = None
    for plan in reversed(plans):
        if plan.shares[rank]:
            break
        since = plan.step
    return since


def trial(plans: Sequence[Plan], models: Sequence[SpeedModel], *, step: int, bounds: Sequence[Bound],
          micro_batch: Sequence[int | None] | None = None, try_steps: int = TRY_STEPS) -> Plan | None:
    """The plan that tries a rank again which has been out for long enough; None where there is none.

    Args:
        plans: all so far, oldest first, of the ranks that there are.
        models: by rank; of one that is out, what was known of it.
        try_steps: global batches that the rank will have a sample of until a plan can take them away again.
    """
    current = plans[-1]
    if all(current.shares):
        return None
    whole = sum(current.shares)
    usual_s = step_time_s(models, current.shares, micro_batch)
    for rank in range(len(bounds)):
        since = idle_since(plans, rank)
        least = -(-max(bounds[rank].lower, 1) // bounds[rank].quantum) * bounds[rank].quantum
        if since is None or not bounds[rank].allows(least):
            continue
        tried = sum(1 for old, new in zip(plans, plans[1:], strict=False) if new.shares[rank] and not old.shares[rank])
        cost_steps = try_steps * max(0.0, models[rank].time_s(least, micro_batch[rank] if micro_batch else None)
                                     / usual_s - 1.0)
        wait_steps = max(LEAST_IDLE_STEPS * 2**tried, cost_steps / PRICE)
        if step - since < wait_steps or step - current.step < LEAST_IDLE_STEPS:
            continue
        only = [replace(bound, lower=least, upper=least) if i == rank else bound if current.shares[i]
                else replace(bound, lower=0, upper=0) for i, bound in enumerate(bounds)]
        try:
            shares = split(models, whole, only, micro_batch=micro_batch)
        except InfeasibleError:
            continue
        return replace(current, version=current.version + 1, step=step, shares=shares, predicted_step_s=None,
                       reason=f"rank {rank} is tried again: no sample for {step - since} steps")
    return None

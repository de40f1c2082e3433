"""The ladder: how much each rank takes part in training, from every step down to not at all, and the way back up.

    every step -> smaller share -> fewer merges -> out

- A smaller share is what `partition.split` gives to a slower rank.
- Fewer merges, with local SGD. The shortest round of a rank is one local step. If that one step takes as long as r
  rounds of the fastest rank, r = s_i / (H min_j s_j), every merge would come r times later, for all ranks. Such a rank
  takes part in every k-th merge instead, k being r rounded, and contributes nothing to the merges between (eager-SGD,
  Li et al. 2020, arXiv:1908.04207, lets ranks contribute nothing when they are late; here they say so in advance).
- Out: `split` gives a rank no sample if a single one would make it the slowest of all, and if its bounds allow 0.
- Up again: k follows the measured seconds in both directions. A rank that is out is not measured any more, so it is
  tried with its smallest share when it has been out for long enough. The time before a try doubles with each one, and
  a try costs at most a hundredth of the time since the rank went out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise

from .partition import Bound, InfeasibleError, split, step_time_s
from .replan import Plan
from .speed import SpeedModel

KEPT = 0.75             # k changes when r differs from it by more rounds than this: rounding's half, and a dead band
LEAST_SLOWER = 3.0      # a rank misses merges only if it is so many times slower than the fastest: times are noisy
LEAST_IDLE_STEPS = 256  # steps that a rank is out before its first try; twice as many before each further one
TRY_STEPS = 10          # global batches of a try: a few to settle, and a few that are measured
KEPT_STEPS = 4096       # plans that held within so many batches are kept: ranks in local steps may be so far behind
PRICE = 0.01            # the most that a try may cost, as a fraction of the time since the rank went out


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
    """The move of a rank from one rung to another, and why."""

    rank: int
    before: Rung
    after: Rung
    reason: str


def rungs(shares: Sequence[int], intervals: Sequence[int]) -> tuple[Rung, ...]:
    """The rung of each rank.

    Args:
        shares: samples of a global batch, by rank.
        intervals: by rank k, for a rank that takes part in every k-th merge; 1 with synchronous steps.
    """
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
    """The moves between two lists of rungs, each by rank, all for the same reason; ranks that stay are left out."""
    return tuple(
        Move(rank=rank, before=old, after=new, reason=reason)
        for rank, (old, new) in enumerate(zip(before, after, strict=True)) if old != new
    )


def merge_intervals(step_s: Sequence[float], lengths: Sequence[int], *, current: Sequence[int],
                    most: int) -> tuple[int, ...]:
    """By rank, the k of "takes part in every k-th merge" of local SGD; 1 for the fastest rank.

    k at most doubles in one call, as a single long step may have been a stall.

    Args:
        step_s: seconds of one local step, by rank.
        lengths: local steps of each rank's round, as `local_round.round_lengths` returns them.
        current: the present k of each rank.
        most: the largest k.
    """
    if not step_s or not len(step_s) == len(lengths) == len(current):
        raise ValueError("step_s, lengths and current: expected one of each for every rank. "
                         f"Received: {len(step_s)}, {len(lengths)} and {len(current)}.")
    if not all(math.isfinite(s) and s > 0.0 for s in step_s) or min(lengths) < 1 or most < 1:
        raise ValueError("step_s, lengths and most: expected finite seconds above 0, and at least 1. "
                         f"Received: {list(step_s)}, {list(lengths)} and {most}.")
    fastest = min(range(len(step_s)), key=step_s.__getitem__)
    round_s = lengths[fastest] * step_s[fastest]
    chosen = []
    for seconds, length, k in zip(step_s, lengths, current, strict=True):
        rounds = length * seconds / round_s
        if seconds < LEAST_SLOWER * step_s[fastest]:
            rounds = 1.0
        near = k if abs(rounds - k) <= KEPT else math.floor(rounds + 0.5)
        chosen.append(min(near, 2 * k, most))
    return tuple(chosen)


def plans_to_keep(plans: Sequence[Plan], step: int) -> list[Plan]:
    """The plans that held within the `KEPT_STEPS` batches before `step`, and the older ones that `idle_since` and
    `trial` need: the first, and those with which a rank lost all its samples or got some again.

    Args:
        plans: those kept so far, oldest first.
    """
    ends = [*(plan.step for plan in plans[1:]), math.inf]
    old = sum(end <= step - KEPT_STEPS for end in ends)
    out = [[share == 0 for share in plan.shares] for plan in plans[:old]]
    changes = [plans[index] for index in range(old) if index == 0 or out[index] != out[index - 1]]
    return [*changes, *plans[old:]]


def idle_since(plans: Sequence[Plan], rank: int) -> int | None:
    """The step since which `rank` has had no sample; None if it has samples now. `plans`: all so far, oldest first."""
    since = None
    for plan in reversed(plans):
        if plan.shares[rank]:
            break
        since = plan.step
    return since


def trial(plans: Sequence[Plan], models: Sequence[SpeedModel], *, step: int, bounds: Sequence[Bound],
          micro_batch: Sequence[int | None] | None = None, try_steps: int = TRY_STEPS) -> Plan | None:
    """A plan that gives its smallest share to a rank that has been out for long enough; None if there is no such rank.

    Args:
        plans: all plans of the present ranks so far, oldest first.
        models: speed models by rank; for a rank that is out, the last known one.
        step: the step from which the plan is to hold.
        bounds: of shares, by rank; they allow the present shares.
        micro_batch: by rank, the most samples of one pass; None: no limit.
        try_steps: global batches in which the rank has samples, until the next plan can take them away again.
    """
    current = plans[-1]
    if all(current.shares):
        return None
    whole = sum(current.shares)
    usual_s = step_time_s(models, current.shares, micro_batch)
    for rank in range(len(bounds)):
        since = idle_since(plans, rank)
        least = bounds[rank].quantum
        if since is None or not bounds[rank].allows(least):
            continue
        tried = sum(1 for old, new in pairwise(plans) if new.shares[rank] and not old.shares[rank])
        tried_s = models[rank].time_s(least, micro_batch[rank] if micro_batch else None)
        cost_steps = try_steps * (tried_s / usual_s - 1.0)
        wait_steps = max(LEAST_IDLE_STEPS * 2**tried, cost_steps / PRICE)
        if step - since < wait_steps or step - current.step < LEAST_IDLE_STEPS:
            continue
        only = [replace(bound, lower=least, upper=least) if i == rank else bound if current.shares[i]
                else replace(bound, upper=0) for i, bound in enumerate(bounds)]
        try:
            shares = split(models, whole, only, micro_batch=micro_batch)
        except InfeasibleError:
            continue
        return replace(current, version=current.version + 1, step=step, shares=shares, predicted_step_s=None,
                       reason=f"rank {rank} is tried again: no sample for {step - since} steps")
    return None

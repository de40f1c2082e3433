"""Local SGD between ranks of different speed: how long each one's rounds are, and what its contribution weighs.

Rounds (DyLU: Liu et al. 2024, arXiv 2401.09135, equation 6): who is slower takes fewer local steps, so that all reach
the end of a round at about the same time and a merge is never far ahead of anybody,

    H_i = max(1, floor(H * min_j s_j / s_i))         s_i: seconds of rank i's local step; the fastest takes H

Merges: rank i sends before_i * Delta_i and, beside it, two numbers. From the sums alone every rank knows what follows:

    u_i = Delta_i / |a_i|      before_i = w_i / |a_i|      beside_i = (w_i, r_i)
    merged = (sum r / sum w) * sum before_i Delta_i = (sum r) * (mean u, weighted by w)

u is progress per step, and r, the reach, how much of global batches the rank has worked off: what synchronous steps
would have moved the model for its samples. So a merge moves the model as far as synchronous steps over the samples that
are in it, however many or few steps each rank made of them, and whoever is missing.

- One shared stream of samples: w = samples, |a| = steps. A sample weighs the same whoever took it, and however many
  steps its rank made in the round: before_i is its batch.
- A fixed shard for each rank: FedNova (Wang et al. 2020, arXiv 2007.07481), w = the shard's part of all data and |a|
  the sum of what each of the round's gradients was multiplied with. By samples, fast ranks' shards would win. The sum
  of r, in the units of |a|, is its tau_eff, which the paper leaves open; its own choice, the mean of |a| weighted by w,
  is the same where a rank's part of the data is its part of the batch.

Steps: a rank with fewer samples than the mean of all makes a part of each of its updates, and counts as much of a step
in |a|, so that a merge goes as far:

    b n / B at most 1        b of the global batch's B samples, n ranks

A rate that suits B samples, and B / n of them well enough, need not suit one: with a share of 1 of 24, a rank alone
would diverge at a rate that synchronous training bears, and what is merged of where it got to makes that worse. With a
rate in proportion to the batch (linear scaling, Goyal et al. 2017, arXiv 1706.02677) as many samples take it as far as
the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Local steps of the fastest rank between two merges where nobody says: docs/local_sgd.md says why.
ROUND_STEPS = 2
# Short rounds are for what is learned; a rank that stands still for a second or two is to hold nobody up all the same.
BOUND_ROUNDS, BOUND_STEPS = 4.0, 16

SAME = 1e-9      # relative: a quotient this close below a whole number is that number, rounded


def round_lengths(step_s: Sequence[float], round_steps: int) -> tuple[int, ...]:
    """The local steps that each rank takes between two merges; the fastest takes `round_steps`.

    Every rank has to pass the same seconds (gathered, not its own view of them): the answer is then the same.

    Args:
        step_s: seconds of one local step, by rank.
    """
    if round_steps < 1:
        raise ValueError(f"round_steps: expected at least 1. Received: {round_steps}.")
    if not step_s or not all(math.isfinite(s) and s > 0.0 for s in step_s):
        raise ValueError("step_s: expected finite seconds above 0, one for each rank. "
                         f"Received: {list(step_s)}.")
    fastest = min(step_s)
    return tuple(min(max(math.floor(round_steps * (fastest / s) * (1.0 + SAME)), 1), round_steps) for s in step_s)


def usual_bound(round_steps: int) -> float:
    """The default number of rounds for which a rank goes on without a merge."""
    return max(BOUND_ROUNDS, BOUND_STEPS / round_steps)


def step_part(share: int, whole: int, ranks: int) -> float:
    """The part of an update that a rank with this share of the global batch makes apart; 1.0 for one without any."""
    return min(1.0, share * ranks / whole) if share else 1.0


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """What one rank's delta weighs in a merge: w, |a| and r, see above; |a| and r in whatever unit all ranks use."""

    weight: float
    norm: float = 1.0
    reach: float = 0.0

    def __post_init__(self) -> None:
        for name in ("weight", "reach"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name}: expected a finite number, 0 or more. Received: {value}.")
        if not (math.isfinite(self.norm) and self.norm > 0.0):
            raise ValueError("norm: expected a finite number above 0; a rank without a step has weight 0 and norm 1. "
                             f"Received: {self.norm}.")

    @property
    def before(self) -> float:
        """The factor for the delta before the sum."""
        return self.weight / self.norm

    @property
    def beside(self) -> tuple[float, float]:
        """The numbers that are summed beside the delta, from which `factor` follows."""
        return self.weight, self.reach

    def spread(self, delta_square: float) -> float:
        """What is summed for `policy.guard.drift_ratio`, from the squared norm of this rank's delta."""
        return self.weight * delta_square / self.norm**2


NOTHING = Contribution(weight=0.0)


def contribution(weight: float, norm: float, reach: float) -> Contribution:
    """That of a rank in one merge.

    Args:
        weight: its samples of the stream that all share, or its shard's part of all data. All ranks may divide it by
            one reference, for the range of fp16.
        norm: its steps, or the sum of their learning rates (with a momentum that outlives merges, every gradient goes
            in 1 / (1 - momentum) times, on all ranks alike); of those steps that had samples. 0 where none had: then
            the rank weighs nothing.
        reach: the part of each global batch that was to be the rank's, summed over all of its steps, and with `norm`
            of learning rates multiplied by each.
    """
    return Contribution(weight=weight if norm else 0.0, norm=norm or 1.0, reach=reach)


def factor(beside: Sequence[float]) -> float:
    """What the sum of the deltas is multiplied with, from the sum of all `beside`; 0.0 where nobody contributed."""
    if len(beside) != 2 or not all(math.isfinite(x) and x >= 0.0 for x in beside):
        raise ValueError("beside: expected the sums of both numbers, finite and 0 or more. "
                         f"Received: {list(beside)}.")
    weight, reach = beside
    return reach / weight if weight > 0.0 else 0.0

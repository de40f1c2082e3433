"""Local SGD between ranks of different speed: the length of each rank's rounds, and the weight of its contribution.

Round lengths (DyLU: Liu et al. 2024, arXiv 2401.09135, equation 6). Slower ranks take fewer local steps, so that all
ranks reach the end of a round at about the same time and contributions are not stale:

    H_i = max(1, floor(H * min_j s_j / s_i))         s_i: seconds of rank i's local step; the fastest rank takes H

Merges. Delta_i is how far rank i has moved its model since its last contribution. The rank sends c_i * Delta_i and the
numbers w_i and r_i. From the sums of these over ranks, every rank computes the merged delta:

    u_i = Delta_i / |a_i|      c_i = w_i / |a_i|
    merged = (sum r / sum w) * sum c_i Delta_i = (sum r) * (mean u, weighted by w)

u_i is the rank's progress per step, w_i its weight, and |a_i| the norm. r_i, the reach, is the number of global batches
that the rank has worked off: it adds its part of the global batch for each local step. So a merge moves the model as
far as synchronous steps over the samples in the merge would, whatever the number of steps of each rank, and whichever
ranks are missing.

- All ranks share one stream of samples: w = samples, |a| = steps. A sample weighs the same whichever rank processed it,
  and however many steps that rank made in the round: c_i is the rank's batch.
- Each rank has a fixed shard of the data: FedNova (Wang et al. 2020, arXiv 2007.07481), w = the shard's part of all
  data, |a| = the sum of the factors (learning rates) of the round's gradients. With w = samples, the shards of fast
  ranks would weigh too much. The sum of r, in the units of |a|, is FedNova's tau_eff, which the paper leaves open. Its
  own choice, the mean of |a| weighted by w, is the same if a rank's part of the data is its part of the batch.

Small batches. A rank with b of the global batch's B samples, fewer than the mean B / n of the n ranks, applies only a
part of each update, and counts only that part of a step in |a|, so that a merge goes as far as without this:

    part = b n / B, at most 1

A learning rate that suits B samples, and B / n samples well enough, may be too large for a single one. With 1 sample of
24, local steps of a rank could diverge at a rate at which synchronous training converges, and merging the result makes
the model worse. With a rate in proportion to the batch (linear scaling, Goyal et al. 2017, arXiv 1706.02677) the rank
moves as far per sample as the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# The default number of local steps of the fastest rank between two merges: docs/local_sgd.md says why.
ROUND_STEPS = 2
# The default bound on going on without a merge, in rounds and in local steps, the larger of the two: rounds are short,
# but a rank that stalls for a second or two should not hold up the others.
BOUND_ROUNDS, BOUND_STEPS = 4.0, 16

SAME = 1e-9      # relative: a quotient this close below a whole number is that number, rounded


def round_lengths(step_s: Sequence[float], round_steps: int) -> tuple[int, ...]:
    """The number of local steps between two merges, by rank.

    Every rank has to pass the same numbers, gathered from all ranks, so that all get the same result.

    Args:
        step_s: seconds of one local step, by rank.
        round_steps: the local steps of the fastest rank.
    """
    if round_steps < 1:
        raise ValueError(f"round_steps: expected at least 1. Received: {round_steps}.")
    if not step_s or not all(math.isfinite(s) and s > 0.0 for s in step_s):
        raise ValueError("step_s: expected finite seconds above 0, one for each rank. "
                         f"Received: {list(step_s)}.")
    fastest = min(step_s)
    return tuple(max(math.floor(round_steps * (fastest / s) * (1.0 + SAME)), 1) for s in step_s)


def default_bound_rounds(round_steps: int) -> float:
    """The default number of rounds for which a rank goes on with local steps while a merge is still under way."""
    return max(BOUND_ROUNDS, BOUND_STEPS / round_steps)


def update_fraction(share: int, whole: int, ranks: int) -> float:
    """The part of its update that a rank applies in a local step: see "Small batches" above.

    Args:
        share: samples of the rank in a global batch; with 0, the part is 1.0.
        whole: samples of a global batch.
        ranks: the number of ranks.
    """
    return min(1.0, share * ranks / whole) if share else 1.0


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """The numbers that weigh one rank's delta in a merge, in the notation of this module's docstring.

    Attributes:
        weight: w, 0 or more.
        norm: |a|, above 0; in steps, or in units of learning rate.
        reach: r, 0 or more, in global batches, or in the same times the learning rate.
    """

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
    def delta_factor(self) -> float:
        """The factor by which the rank multiplies its delta before the sum over ranks: c = w / |a|."""
        return self.weight / self.norm

    @property
    def weight_and_reach(self) -> tuple[float, float]:
        """The numbers w and r, which are summed over ranks together with the delta; `merge_factor` takes their sums."""
        return self.weight, self.reach

    def spread(self, delta_square: float) -> float:
        """The rank's term w |u|^2 of `spread_sum` of `policy.guard.drift_ratio`.

        Args:
            delta_square: the squared norm of the rank's delta.
        """
        return self.weight * delta_square / self.norm**2


NOTHING = Contribution(weight=0.0)


def contribution(weight: float, norm: float, reach: float) -> Contribution:
    """The contribution of a rank to one merge.

    Args:
        weight: the rank's samples since its last contribution, or with FedNova its shard's part of all data. All ranks
            may divide it by the same reference, for the range of fp16.
        norm: the rank's number of steps with samples, or with FedNova the sum of their learning rates. (A momentum that
            outlives merges multiplies each gradient by 1 / (1 - momentum), on all ranks alike.) 0 if no step had
            samples: the rank then has weight 0.
        reach: the rank's planned part of each global batch, summed over all of its steps; with FedNova, each times its
            learning rate.
    """
    return Contribution(weight=weight if norm else 0.0, norm=norm or 1.0, reach=reach)


def merge_factor(sums: Sequence[float]) -> float:
    """The factor that turns the summed deltas into the merged delta: sum r / sum w.

    Args:
        sums: the sums over ranks of both numbers of `Contribution.weight_and_reach`.

    Returns:
        0.0 if no rank contributed.
    """
    if len(sums) != 2 or not all(math.isfinite(x) and x >= 0.0 for x in sums):
        raise ValueError(f"sums: expected those of weight and reach, finite and 0 or more. Received: {list(sums)}.")
    weight, reach = sums
    return reach / weight if weight > 0.0 else 0.0

"""Local SGD between ranks of different speed: how long each one's rounds are, and what its contribution weighs.

Rounds (DyLU: Liu et al. 2024, arXiv 2401.09135, equation 6): who is slower takes fewer local steps, so that all reach
the end of a round at about the same time and a merge is never far ahead of anybody,

    H_i = max(1, floor(H * min_j s_j / s_i))         s_i: seconds of rank i's local step; the fastest takes H

Merges: rank i sends before_i * Delta_i and, beside it, two numbers. From the sums alone every rank knows what follows:

    u_i = Delta_i / |a_i|      before_i = w_i / |a_i|      beside_i = (w_i, w_i |a_i|)
    merged = (sum w |a|) / (sum w)^2 * sum before_i Delta_i = (mean |a|) * (mean u), both means weighted by w

- One shared stream of samples: w = samples and |a| = 1. No objective is favoured, and the variance is the smallest.
- A fixed shard for each rank: FedNova (Wang et al. 2020, arXiv 2007.07481), w = the shard's part of all data and |a|
  the sum of what each of the round's gradients was multiplied with. By samples, fast ranks' shards would win.

A stale contribution weighs less by how much *more* stale it is than the median one: where all are equally stale nothing
is thrown away. The sum of weights is what it is divided by, so that damping one rank shortens no step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SAME = 1e-9      # relative: a quotient this close below a whole number is that number, rounded


def round_lengths(step_s: Sequence[float], round_steps: int, *, shortest: int = 1,
                  longest: int | None = None) -> tuple[int, ...]:
    """The local steps that each rank takes between two merges; the fastest takes `round_steps`.

    Every rank has to pass the same seconds (gathered, not its own view of them): the answer is then the same.

    Args:
        step_s: seconds of one local step, by rank.
        shortest, longest: no rank takes fewer or more. A `shortest` above 1 makes slow ranks late for merges.
    """
    most = round_steps if longest is None else longest
    if round_steps < 1 or not 1 <= shortest <= most:
        raise ValueError("round_steps, shortest and longest: expected at least 1, and shortest at most longest. "
                         f"Received: {round_steps}, {shortest} and {longest}.")
    if not step_s or not all(math.isfinite(s) and s > 0.0 for s in step_s):
        raise ValueError("step_s: expected finite seconds above 0, one for each rank. "
                         f"Received: {list(step_s)}.")
    fastest = min(step_s)
    return tuple(min(max(math.floor(round_steps * (fastest / s) * (1.0 + SAME)), shortest), most) for s in step_s)


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """What one rank's delta weighs in a merge; `norm` is |a|, see above, in whatever unit all ranks use."""

    weight: float
    norm: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0.0):
            raise ValueError(f"weight: expected a finite number, 0 or more. Received: {self.weight}.")
        if not (math.isfinite(self.norm) and self.norm > 0.0):
            raise ValueError("norm: expected a finite number above 0; a rank without a step has weight 0 and norm 1. "
                             f"Received: {self.norm}.")

    @property
    def before(self) -> float:
        """What the delta is multiplied with before the sum."""
        return self.weight / self.norm

    @property
    def beside(self) -> tuple[float, float]:
        """What is summed beside the delta, for `factor`."""
        return self.weight, self.weight * self.norm

    def spread(self, delta_square: float) -> float:
        """What is summed for `policy.guard.drift_ratio`, from the squared norm of this rank's delta."""
        return self.weight * delta_square / self.norm**2


def by_samples(samples: float, *, damping: float = 1.0) -> Contribution:
    """The contribution of a rank that took `samples` from the stream all share.

    All ranks may divide their samples by one reference (what a rank takes on average), for the range of fp16.
    """
    if not (math.isfinite(samples) and samples >= 0.0):
        raise ValueError(f"samples: expected a finite number, 0 or more. Received: {samples}.")
    return Contribution(weight=samples * _checked(damping))


def by_shard(part: float, norm: float, *, damping: float = 1.0) -> Contribution:
    """The contribution of a rank that keeps to its own shard (FedNova).

    Args:
        part: the shard's part of all data. Where ranks are missing from a merge, the others' parts count as the whole.
        norm: `norm_of_steps` or `norm_of_rates` of its round; 0 for a rank without a step, which says nothing.
    """
    if not (math.isfinite(part) and part >= 0.0 and math.isfinite(norm) and norm >= 0.0):
        raise ValueError(f"part and norm: expected finite numbers, 0 or more. Received: {part} and {norm}.")
    if norm == 0.0:
        return Contribution(weight=0.0)
    return Contribution(weight=part * _checked(damping), norm=norm)


def factor(beside: Sequence[float]) -> float:
    """What the sum of the deltas is multiplied with, from the sum of all `beside`; 0.0 where nobody contributed."""
    if len(beside) != 2 or not all(math.isfinite(x) and x >= 0.0 for x in beside):
        raise ValueError("beside: expected the sums of both numbers, finite and 0 or more. "
                         f"Received: {list(beside)}.")
    weight, weighted_norm = beside
    return weighted_norm / weight**2 if weight > 0.0 else 0.0


def norm_of_steps(steps: int, *, momentum: float = 0.0, rate: float = 1.0, kept: bool = False) -> float:
    """|a| of so many steps of SGD at one rate: the sum of what each gradient was multiplied with.

    Heavy-ball momentum from zero moves by m_k = rho m_(k-1) + g_k, so that the gradient of step k goes in
    1 + rho + ... + rho^(steps - k) times:  |a| = rate * (steps - rho (1 - rho^steps) / (1 - rho)) / (1 - rho).

    Args:
        kept: the momentum outlives merges. What a round inherits from those before makes up for what it leaves to those
            after it: |a| = rate * steps / (1 - rho), right once rounds have become alike.
    """
    if steps < 0:
        raise ValueError(f"steps: expected 0 or more. Received: {steps}.")
    _check_momentum(momentum)
    _check_rates([rate])
    if kept or momentum == 0.0:
        return rate * steps / (1.0 - momentum)
    decayed = -math.expm1(steps * math.log(momentum))
    return rate * (steps - momentum * decayed / (1.0 - momentum)) / (1.0 - momentum)


def norm_of_rates(rates: Sequence[float], *, momentum: float = 0.0) -> float:
    """|a| of steps of SGD at these rates, one for each step, momentum from zero.

    Step k moves by rate_k * m_k, and m_k holds (1 - rho^k) / (1 - rho) gradients, of whichever steps.
    """
    _check_momentum(momentum)
    _check_rates(rates)
    return math.fsum(rate * (1.0 - momentum**k) for k, rate in enumerate(rates, start=1)) / (1.0 - momentum)


def damping(staleness: Sequence[int], *, rule: str = "power", exponent: float = 0.5) -> tuple[float, ...]:
    """What each rank's weight is multiplied with, from how many merges old the model was that it started from.

    With x the staleness beyond the median, at least 0: "power" is (1 + x)^-exponent (FedAsync: Xie et al. 2019, arXiv
    1903.03934), "inverse" 1 / max(1, x) (Zhang et al. 2016, arXiv 1511.05950).
    """
    if rule not in ("power", "inverse"):
        raise ValueError(f"rule: expected power or inverse. Received: {rule!r}.")
    if not (math.isfinite(exponent) and exponent >= 0.0):
        raise ValueError(f"exponent: expected a finite number, 0 or more. Received: {exponent}.")
    if not staleness or min(staleness) < 0:
        raise ValueError(f"staleness: expected 0 or more merges, for each rank. Received: {list(staleness)}.")
    middle = statistics.median(staleness)
    excess = [max(tau - middle, 0.0) for tau in staleness]
    return tuple((1.0 + x) ** -exponent if rule == "power" else 1.0 / max(1.0, x) for x in excess)


def _checked(damping: float) -> float:
    if not 0.0 <= damping <= 1.0:
        raise ValueError(f"damping: expected 0 to 1, as `damping` gives it. Received: {damping}.")
    return damping


def _check_momentum(momentum: float) -> None:
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"momentum: expected 0 or more and below 1. Received: {momentum}.")


def _check_rates(rates: Sequence[float]) -> None:
    if not all(math.isfinite(rate) and rate >= 0.0 for rate in rates):
        raise ValueError(f"rate: expected finite learning rates, 0 or more. Received: {list(rates)}.")

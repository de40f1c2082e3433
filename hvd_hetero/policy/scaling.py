"""Learning-rate factors: what a batch, a noise and a staleness other than those tuned for make of a learning rate.

S is the effective batch over the one that the learning rate was tuned for. Each rule gives 1 at S = 1:

    linear     S                          SGD (Goyal et al. 2017, arXiv:1706.02677)
    sqrt       sqrt(S)                    Adam and its kin (Malladi et al. 2022, arXiv:2205.10287)
    adascale   (q + 1) / (q / S + 1)      SGD, q = sigma^2 / mu^2 measured (Johnson et al. 2020, arXiv:2007.05105)

q is the variance of a gradient over the tuned batch, over its squared mean. Noise alone (q without bound) makes it
linear, no noise makes it 1.

Only the four operations and square roots: IEEE 754 rounds them alike everywhere, which pow() is not held to, so ranks
on different machines get the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

DEAD_BAND = 0.05  # of a batch; less is no change of it


def linear(scale: float) -> float:
    """S."""
    return _positive("scale", scale)


def sqrt(scale: float) -> float:
    """The square root of S."""
    return math.sqrt(_positive("scale", scale))


def adascale(scale: float, noise: float | None) -> float:
    """AdaScale's gain, between 1 and S; 1 while the noise is not known, which is the safe end for a larger batch."""
    _positive("scale", scale)
    if noise is None:
        return min(1.0, scale)
    if not noise >= 0:
        raise ValueError(f"noise: expected 0 or more. Received: {noise}.")
    return scale if math.isinf(noise) else (noise + 1.0) / (noise / scale + 1.0)


def damping(staleness: float, usual: float) -> float:
    """What is left of a step whose contributions are more stale than usual: 1 / sqrt(1 + max(0, tau - usual)).

    The root is that of FedAsync (Xie et al. 2019, arXiv:1903.03934). What is usual costs nothing: where every
    contribution is n merges old, damping by n would slow all of training down n times over.
    """
    if not staleness >= 0:
        raise ValueError(f"staleness: expected 0 or more. Received: {staleness}.")
    return 1.0 / math.sqrt(1.0 + max(0.0, staleness - usual))


def standing_batch(current: float, recent: Sequence[float], declared: float) -> float:
    """The batch that a learning rate should follow, in samples.

    It is the largest of the recent ones: a short batch at the end of an epoch says nothing about the next, but where
    not one of them was whole, somebody's samples are missing for good. Changes within the dead band are none.

    Args:
        current: what it was.
        recent: samples of the last steps over all ranks; 0 where nothing is known.
        declared: samples of a whole global batch.
    """
    largest = min(max(recent, default=0.0), declared)
    if largest >= (1.0 - DEAD_BAND) * declared:
        return declared
    return current if largest <= 0 or abs(largest - current) <= DEAD_BAND * current else largest


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """A value on its way to a target, in a straight line (the gradual warm-up of Goyal et al. is one).

    Towards a target that moves at every step it becomes an exponential mean over `steps`.
    """

    value: float
    target: float
    steps_left: int = 0

    def __post_init__(self) -> None:
        if self.steps_left < 0:
            raise ValueError(f"steps_left: expected 0 or more. Received: {self.steps_left}.")

    def towards(self, target: float, steps: int) -> Ramp:
        """On to `target`, in `steps` or what is left of this ramp, whichever is longer."""
        return self if target == self.target else Ramp(
            value=self.value, target=target, steps_left=max(steps, self.steps_left)
        )

    def next(self) -> Ramp:
        """A step further."""
        if self.steps_left <= 1:
            return replace(self, value=self.target, steps_left=0)
        moved = self.value + (self.target - self.value) / self.steps_left
        return replace(self, value=moved, steps_left=self.steps_left - 1)


@dataclass(frozen=True, kw_only=True)
class NoiseSums:
    """What an estimate of the noise rests on. Rank i's mean gradient over its b_i samples is g_i; theirs together is g.

    Attributes:
        squared_norms: the sum of |g_i|^2 over the ranks that had samples.
        inverse_batches: the sum of 1 / b_i over the same ranks.
        ranks: how many they are.
        merged: |g|^2, g = sum b_i g_i / B.
        batch: B, the sum of b_i.
    """

    squared_norms: float
    inverse_batches: float
    ranks: float
    merged: float
    batch: float


def noise_and_signal(sums: NoiseSums) -> tuple[float, float] | None:
    """Unbiased estimates of tr(Sigma), the variance of one sample's gradient, and of |G|^2, the true gradient's norm.

    With the means over ranks m of |g_i|^2 and h of 1 / b_i,

        E m = |G|^2 + h tr(Sigma)      E |g|^2 = |G|^2 + tr(Sigma) / B

    are two equations for the two unknowns, whatever the b_i. (With equal batches they are those of McCandlish et al.
    2018, arXiv:1812.06162, appendix A. The mean batch put there for uneven ones is wrong: h is not 1 over their mean.)
    Either estimate may be negative. None where one rank has all samples, or a number is not finite.
    """
    if sums.ranks < 2 or not sums.batch > 0:
        return None
    mean_square, mean_inverse = sums.squared_norms / sums.ranks, sums.inverse_batches / sums.ranks
    # The difference below loses no digits: h is at least n / B for n ranks (means of n and of 1 / n).
    noise = (mean_square - sums.merged) / (mean_inverse - 1.0 / sums.batch)
    signal = sums.merged - noise / sums.batch
    return (noise, signal) if math.isfinite(noise) and math.isfinite(signal) else None


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """Exponential means of noise and signal. Each has its own, because the mean of their ratio would be biased."""

    noise: float = 0.0
    signal: float = 0.0
    weight: float = 0.0  # of what was seen; 0: nothing
    smoothing: float = 0.99

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"smoothing: expected 0 or more, and less than 1. Received: {self.smoothing}.")

    def seen(self, noise: float, signal: float) -> NoiseScale:
        """The smoothed estimates with one more pair taken in."""
        old, new = self.smoothing, 1.0 - self.smoothing
        return replace(
            self,
            noise=old * self.noise + new * noise,
            signal=old * self.signal + new * signal,
            weight=old * self.weight + new,
        )

    @property
    def samples(self) -> float | None:
        """tr(Sigma) / |G|^2: the batch at which noise equals signal. None before anything was seen."""
        if self.weight == 0.0:
            return None
        if self.noise <= 0:
            return 0.0
        return self.noise / self.signal if self.signal > 0 else math.inf


def _positive(name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"{name}: expected a finite number above 0. Received: {value}.")
    return value

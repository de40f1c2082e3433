"""Learning-rate factors, from the size of the batch, the noise of the gradient, and staleness.

S is the effective batch over the batch that the learning rate was tuned for. Each rule gives 1 at S = 1:

    linear     S                          SGD (Goyal et al. 2017, arXiv:1706.02677)
    sqrt       sqrt(S)                    Adam and its kin (Malladi et al. 2022, arXiv:2205.10287)
    adascale   (q + 1) / (q / S + 1)      SGD, q = sigma^2 / mu^2 measured (Johnson et al. 2020, arXiv:2007.05105)

q is the variance of the gradient of a tuned batch over the square of its mean. With noise alone (q without bound),
adascale is linear; without noise, it is 1.

Only the four basic operations and square roots are used. IEEE 754 prescribes how they round, unlike pow(), so ranks on
different machines get the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

DEAD_BAND = 0.05  # relative; a smaller change of the batch is ignored


def linear(scale: float) -> float:
    """The linear rule: the factor is `scale`, the S of this module's docstring."""
    return _positive(scale)


def sqrt(scale: float) -> float:
    """The square-root rule: the factor is the root of `scale`, the S of this module's docstring."""
    return math.sqrt(_positive(scale))


def adascale(scale: float, noise: float | None) -> float:
    """The AdaScale rule: a factor between 1 and S.

    Args:
        scale: S, the effective batch over the tuned one.
        noise: q, variance over squared mean of the tuned batch's gradient; None while it is not known. The result is
            then the smaller of 1 and S, which is safe.
    """
    _positive(scale)
    if noise is None:
        return min(1.0, scale)
    if not noise >= 0:
        raise ValueError(f"noise: expected 0 or more. Received: {noise}.")
    return scale if math.isinf(noise) else (noise + 1.0) / (noise / scale + 1.0)


def damping(staleness: float, usual: float) -> float:
    """The learning-rate factor for contributions that are staler than usual: 1 / sqrt(1 + max(0, tau - usual)).

    The root is that of FedAsync (Xie et al. 2019, arXiv:1903.03934). Usual staleness is not damped: if every
    contribution is n merges old, that would slow down all of training.

    Args:
        staleness: tau, in merges.
        usual: the usual staleness of this job, in merges.
    """
    if not staleness >= 0:
        raise ValueError(f"staleness: expected 0 or more. Received: {staleness}.")
    return 1.0 / math.sqrt(1.0 + max(0.0, staleness - usual))


def standing_batch(current: float, recent: Sequence[float], declared: float) -> float:
    """The size of the batch that the learning rate should follow, in samples.

    It is the largest of the recent batches: a short batch at the end of an epoch is an exception, but if none of the
    recent batches is whole, some rank's samples are missing for good. Changes below `DEAD_BAND` are ignored.

    Args:
        current: the last result.
        recent: samples of the last steps, summed over all ranks; 0 if not known.
        declared: samples of a whole global batch.
    """
    largest = max(recent, default=0.0)
    if largest >= (1.0 - DEAD_BAND) * declared:
        return declared
    return current if largest <= 0 or abs(largest - current) <= DEAD_BAND * current else largest


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """A value that moves to a target in equal steps, such as the factor in the gradual warm-up of Goyal et al.

    Towards a target that changes at every step, the value follows an exponential mean of it. Immutable.
    """

    value: float
    target: float
    steps_left: int = 0

    def __post_init__(self) -> None:
        if self.steps_left < 0:
            raise ValueError(f"steps_left: expected 0 or more. Received: {self.steps_left}.")

    def towards(self, target: float, steps: int) -> Ramp:
        """The ramp from the present value to a new target, in `steps` steps or the steps left, whichever are more."""
        return self if target == self.target else Ramp(
            value=self.value, target=target, steps_left=max(steps, self.steps_left)
        )

    def next(self) -> Ramp:
        """The ramp one step later."""
        if self.steps_left <= 1:
            return replace(self, value=self.target, steps_left=0)
        moved = self.value + (self.target - self.value) / self.steps_left
        return replace(self, value=moved, steps_left=self.steps_left - 1)


@dataclass(frozen=True, kw_only=True)
class NoiseSums:
    """The sums over ranks from which `noise_and_signal` estimates the gradient's noise.

    g_i is the mean gradient of rank i over its b_i samples, and g = sum b_i g_i / B is that of the global batch.

    Attributes:
        squared_norms: the sum of |g_i|^2 over the ranks that had samples.
        inverse_batches: the sum of 1 / b_i over the same ranks.
        ranks: the number of these ranks.
        merged: |g|^2.
        batch: B, the sum of b_i.
    """

    squared_norms: float
    inverse_batches: float
    ranks: float
    merged: float
    batch: float


def noise_and_signal(sums: NoiseSums) -> tuple[float, float] | None:
    """Unbiased estimates of tr(Sigma), the variance of one sample's gradient, and |G|^2, the true gradient's squared
    norm.

    With m the mean of |g_i|^2 over ranks, and h that of 1 / b_i,

        E m = |G|^2 + h tr(Sigma)      E |g|^2 = |G|^2 + tr(Sigma) / B

    are two equations for the two unknowns, for any b_i. (With equal batches they are those of McCandlish et al. 2018,
    arXiv:1812.06162, appendix A. For unequal batches, their mean would be wrong there: h is not 1 over the mean batch.)

    Returns:
        (tr(Sigma), |G|^2), either of which may be negative; None if one rank has all samples, or if a number is not
        finite.
    """
    if sums.ranks < 2 or not sums.batch > 0:
        return None
    mean_square, mean_inverse = sums.squared_norms / sums.ranks, sums.inverse_batches / sums.ranks
    # The difference below loses no digits: for n ranks h is at least n / B (harmonic mean <= arithmetic mean).
    noise = (mean_square - sums.merged) / (mean_inverse - 1.0 / sums.batch)
    signal = sums.merged - noise / sums.batch
    return (noise, signal) if math.isfinite(signal) else None  # it is not, where the noise is not


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """Exponential means of noise and signal, averaged separately, because a mean of their ratio would be biased."""

    noise: float = 0.0  # the mean of tr(Sigma), times `weight`
    signal: float = 0.0  # the mean of |G|^2, times `weight`
    weight: float = 0.0  # the sum of the weights of all estimates so far, which tends to 1; 0: there is none yet
    smoothing: float = 0.99  # the weight of the past in each update

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"smoothing: expected 0 or more, and less than 1. Received: {self.smoothing}.")

    def seen(self, noise: float, signal: float) -> NoiseScale:
        """The means with one more pair of estimates of `noise_and_signal` taken in."""
        old, new = self.smoothing, 1.0 - self.smoothing
        return replace(
            self,
            noise=old * self.noise + new * noise,
            signal=old * self.signal + new * signal,
            weight=old * self.weight + new,
        )

    @property
    def samples(self) -> float | None:
        """The noise scale tr(Sigma) / |G|^2: the batch in samples where noise equals signal; None without estimates."""
        if self.weight == 0.0:
            return None
        if self.noise <= 0:
            return 0.0
        return self.noise / self.signal if self.signal > 0 else math.inf


def _positive(scale: float) -> float:
    if not 0 < scale < math.inf:
        raise ValueError(f"scale: expected a finite number above 0. Received: {scale}.")
    return scale

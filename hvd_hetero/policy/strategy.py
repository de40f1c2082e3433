"""Predicts the speed of synchronous training, in which ranks wait for each other, and of local SGD, and chooses one.

Samples per second of all ranks together, with shares b_i of the global batch B, compute times t_i and fractions f_i of
time in which a rank is stopped:

    synchronous    B / (mean time of the slowest rank + stops of any rank + exchange that backward does not hide)
    local          sum_i b_i (1 - f_i) / t_i(b_i)
                   times bound / merge if a merge takes longer than the bound: the time for which a rank goes on without
                   a merge; with a bound of 0, times round / (round + merge)
                   at most B / max_i t_i(b_i), as ranks make equally many steps in an epoch, and meet at its end

Samples per second are not progress: a synchronous step is exact, and local steps between merges are each worth a little
less. So synchronous training is chosen if it is nearly as fast as local SGD, and it is left only if it is clearly
slower. Between the two thresholds the present strategy stays, so that noise of the measurements does not make the
choice alternate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .jitter import Jitter, synchronous_step_s
from .local_round import default_bound_rounds, round_lengths
from .speed import SpeedModel

SYNCHRONOUS, LOCAL = "synchronous", "local"

# Thresholds between the strategies: by which fraction synchronous training is slower than local SGD.
NEAR = 0.05   # it is chosen if it is slower by at most this
LEAVE = 0.15  # it is left if it is slower by more than this


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted speed of one strategy."""

    strategy: str                               # SYNCHRONOUS or LOCAL
    samples_per_s: float                        # of all ranks together
    period_s: float                             # seconds of a synchronous step, or of a round of local SGD
    round_lengths: tuple[int, ...] = ()         # local SGD: steps of a round, by rank; 0 for a rank without samples

    def __post_init__(self) -> None:
        if self.strategy not in (SYNCHRONOUS, LOCAL):
            raise ValueError(f"strategy: expected {SYNCHRONOUS} or {LOCAL}. Received: {self.strategy!r}.")
        if not (math.isfinite(self.samples_per_s) and self.samples_per_s > 0.0 and self.period_s > 0.0):
            raise ValueError("samples_per_s and period_s: expected numbers above 0. "
                             f"Received: {self.samples_per_s} and {self.period_s}.")


@dataclass(frozen=True, kw_only=True)
class StrategyChoice:
    """The strategy to train with from now on, and why it was chosen, with the predicted speeds."""

    strategy: str
    reason: str


def predict_synchronous(models: Sequence[SpeedModel], shares: Sequence[int], *, jitters: Sequence[Jitter] | None = None,
                        exchange_s: float = 0.0, micro_batch: Sequence[int | None] | None = None) -> Prediction:
    """The predicted speed of synchronous training with these shares.

    Args:
        models: the speed model of each rank.
        shares: samples of a global batch, by rank.
        jitters: by rank; None: all ranks are steady.
        exchange_s: seconds of a step's gradient exchange that the backward pass does not hide.
        micro_batch: by rank, the most samples of one pass; None: no limit.
    """
    times_s, steady = _times(models, shares, jitters, micro_batch)
    step_s = synchronous_step_s(times_s, steady, exchange_s=exchange_s)
    return Prediction(strategy=SYNCHRONOUS, samples_per_s=sum(shares) / step_s, period_s=step_s)


def predict_local(models: Sequence[SpeedModel], samples: Sequence[int], *, round_steps: int,
                  bound_rounds: float | None = None, merge_s: float = 0.0, jitters: Sequence[Jitter] | None = None,
                  micro_batch: Sequence[int | None] | None = None) -> Prediction:
    """The predicted speed of local SGD, in which ranks go on with local steps while they merge.

    All ranks make equally many steps in an epoch, which is dealt in global batches, and wait for the slowest at its
    end. Stops are left out of that wait, because shares adapt to them with local steps.

    Args:
        models: the speed model of each rank.
        samples: samples of one local step, by rank; 0 for a rank that takes no part.
        round_steps: local steps of the fastest rank in a round; those of the others follow from
            `local_round.round_lengths`.
        bound_rounds: rounds for which a rank goes on while a merge is under way; 0: it waits for each merge. None:
            `local_round.default_bound_rounds`.
        merge_s: seconds of one merge.
        jitters: by rank; None: all ranks are steady.
        micro_batch: by rank, the most samples of one pass; None: no limit.
    """
    if not (math.isfinite(merge_s) and merge_s >= 0.0):
        raise ValueError(f"merge_s: expected a finite number, 0 or more. Received: {merge_s}.")
    times_s, steady = _times(models, samples, jitters, micro_batch)
    alone_s = [j.alone_s(t) for t, j in zip(times_s, steady, strict=True)]
    taking_part = [s for s in alone_s if s > 0.0]
    lengths = iter(round_lengths(taking_part, round_steps))
    steps = tuple(next(lengths) if s > 0.0 else 0 for s in alone_s)
    computing_s = max(h * s for h, s in zip(steps, alone_s, strict=True))
    bound_rounds = default_bound_rounds(round_steps) if bound_rounds is None else bound_rounds
    round_s = max(computing_s, merge_s) if bound_rounds else computing_s + merge_s
    busy = min(1.0, max(1.0, bound_rounds) * computing_s / round_s)
    rate = math.fsum(b / s for b, s in zip(samples, alone_s, strict=True) if s > 0.0)
    most = sum(samples) / max(times_s)
    return Prediction(strategy=LOCAL, samples_per_s=min(rate * busy, most), period_s=round_s, round_lengths=steps)


def choose_strategy(synchronous: Prediction, local: Prediction, *, current: str | None = None) -> StrategyChoice:
    """Chooses the strategy to train with.

    Args:
        synchronous: prediction for synchronous training.
        local: prediction for local SGD.
        current: the present strategy; None before the first choice.
    """
    if (synchronous.strategy, local.strategy) != (SYNCHRONOUS, LOCAL):
        raise ValueError("synchronous and local: expected a prediction of each, in this order. "
                         f"Received: {synchronous.strategy} and {local.strategy}.")
    if current not in (None, SYNCHRONOUS, LOCAL):
        raise ValueError(f"current: expected {SYNCHRONOUS}, {LOCAL} or None. Received: {current!r}.")
    behind = 1.0 - synchronous.samples_per_s / max(synchronous.samples_per_s, local.samples_per_s)
    rates = f"{synchronous.samples_per_s:.4g} samples/s synchronous, {local.samples_per_s:.4g} local"
    if behind == 0.0:
        return StrategyChoice(strategy=SYNCHRONOUS, reason=f"{rates}: nothing is faster than exact steps")
    if behind <= NEAR:
        return StrategyChoice(strategy=SYNCHRONOUS, reason=f"{rates}: exact steps are only {behind:.1%} slower")
    if behind > LEAVE or current is None:
        return StrategyChoice(strategy=LOCAL, reason=f"{rates}: synchronous is {behind:.1%} slower")
    between = f"{behind:.1%} slower, between {NEAR:.0%} and {LEAVE:.0%} nothing changes"
    return StrategyChoice(strategy=current, reason=f"{rates}: {between}")


def _times(models: Sequence[SpeedModel], samples: Sequence[int], jitters: Sequence[Jitter] | None,
           micro_batch: Sequence[int | None] | None) -> tuple[list[float], list[Jitter]]:
    """The compute seconds and the jitter of each rank; raises ValueError if arguments do not fit the models."""
    for name, given in (("samples", samples), ("jitters", jitters), ("micro_batch", micro_batch)):
        if given is not None and len(given) != len(models):
            raise ValueError(f"{name}: expected one for each of {len(models)} models. Received: {len(given)}.")
    if not models or min(samples) < 0 or max(samples) == 0:
        raise ValueError("models and samples: expected a model at least, and samples of 0 or more, not all 0. "
                         f"Received: {len(models)} models and {list(samples)}.")
    caps = micro_batch or [None] * len(models)
    times_s = [m.time_s(b, cap) for m, b, cap in zip(models, samples, caps, strict=True)]
    return times_s, list(jitters) if jitters is not None else [Jitter()] * len(models)

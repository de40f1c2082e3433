"""Forecasts the speed of a job with other settings: equal shares, best shares, local steps, fewer ranks.

A rank is worth having if a step of all ranks, T*(all), is shorter than a step without it, T*(without i), each with the
best split of the global batch. A rank that cannot process a single sample within the step of the others slows them
down. `hvd-hetero plan` shows these forecasts.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .jitter import Jitter
from .local_round import ROUND_STEPS
from .partition import Bound, InfeasibleError, equal_shares, split
from .rank_words import ranks_text
from .speed import SpeedModel
from .strategy import Prediction, predict_local, predict_synchronous

MOST_NAMED = 8  # the most ranks that a title lists by number
GROWTH = 1.25  # ratio between consecutive numbers of ranks to leave out, for large numbers
WORTH = 0.02  # the fraction of the throughput from which a gain counts as one


class Way(enum.Enum):
    """A way to train."""

    EQUAL = "equal shares"
    BEST = "best shares"
    LOCAL = "best shares, local steps"
    FEWER = "without the slowest ranks"


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A way to train, its shares, and the speed that it should reach."""

    way: Way
    shares: tuple[int, ...]  # samples of a global batch, by rank; 0 for a rank that is left out
    prediction: Prediction

    @property
    def title(self) -> str:
        """The way in words, with the ranks that are left out."""
        if self.way is not Way.FEWER:
            return self.way.value
        if len(self.without) > MOST_NAMED:
            return f"without the {len(self.without)} slowest ranks"
        return f"without {ranks_text(self.without)}"

    @property
    def step_s(self) -> float | None:
        """Seconds of a synchronous step; None for local steps."""
        return None if self.way is Way.LOCAL else self.prediction.period_s

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks together."""
        return self.prediction.samples_per_s

    @property
    def without(self) -> tuple[int, ...]:
        """The ranks that have no samples."""
        return tuple(rank for rank, share in enumerate(self.shares) if not share)


def counts(most: int) -> list[int]:
    """The numbers of ranks to leave out for which a forecast is made: 1, 2, 3, ... up to `most`.

    Beyond 2 * `MOST_NAMED` they grow by the factor `GROWTH` instead of by 1.
    """
    found: list[int] = []
    while not found or found[-1] < most:
        last = found[-1] if found else 0
        found.append(min(most, max(last + 1, int(last * GROWTH) if last >= 2 * MOST_NAMED else 0)))
    return found if most > 0 else []


def forecasts(
    models: Sequence[SpeedModel],
    global_batch_size: int,
    *,
    bounds: Sequence[Bound] | None = None,
    jitters: Sequence[Jitter] | None = None,
    exchange_s: float = 0.0,
    round_steps: int = ROUND_STEPS,
    micro_batch: Sequence[int | None] | None = None,
) -> list[Forecast]:
    """A forecast for each way to train that the bounds allow.

    These are equal shares, the best shares, the best shares with local steps, and the best shares without the slowest
    rank, without the two slowest, and so on; of large numbers of ranks, only those of `counts`.

    Args:
        models: the speed model of each rank.
        global_batch_size: samples of a global batch.
        bounds: of shares, by rank; a rank that is left out has a share of 0, whatever its lower bound. None: no bounds.
        jitters: by rank; None: all ranks are steady.
        exchange_s: seconds of a step beyond computing. It is taken to be the same for any number of ranks above one.
        round_steps: local steps of the fastest rank in a round of local SGD.
        micro_batch: by rank, the most samples of one pass; None: a share takes one pass.

    Raises:
        InfeasibleError: no shares within the bounds sum to the global batch.
    """
    ranks = range(len(models))
    limits = [Bound()] * len(models) if bounds is None else list(bounds)
    steady = [Jitter()] * len(models) if jitters is None else list(jitters)
    caps = [None] * len(models) if micro_batch is None else list(micro_batch)

    def together(way: Way, shares: Sequence[int]) -> Forecast:
        """The forecast for synchronous steps of the ranks that have a share."""
        some = [rank for rank in ranks if shares[rank]]
        prediction = predict_synchronous(
            [models[rank] for rank in some], [shares[rank] for rank in some], jitters=[steady[rank] for rank in some],
            exchange_s=exchange_s if len(some) > 1 else 0.0, micro_batch=[caps[rank] for rank in some],
        )  # fmt: skip
        return Forecast(way=way, shares=tuple(shares), prediction=prediction)

    found = []
    balanced = split(models, global_batch_size, limits, micro_batch=caps)
    best = together(Way.BEST, balanced)
    equal = equal_shares(global_batch_size, len(models))
    if all(map(Bound.allows, limits, equal)):
        found.append(together(Way.EQUAL, equal))
        # Shares that balance mean times may be worse if times vary much, as then any of many ranks may be the last.
        best = min(best, replace(found[0], way=Way.BEST), key=lambda each: each.prediction.period_s)
    found.append(best)
    local = predict_local(models, balanced, round_steps=round_steps, merge_s=exchange_s, jitters=steady,
                          micro_batch=caps)
    found.append(Forecast(way=Way.LOCAL, shares=balanced, prediction=local))
    usual = max(1, global_batch_size // len(models))
    slowest = sorted(ranks, key=lambda rank: -models[rank].time_s(usual, caps[rank]))
    for count in counts(len(models) - 1):
        out = set(slowest[:count])
        narrowed = [Bound(upper=0) if rank in out else limits[rank] for rank in ranks]
        try:
            shares = split(models, global_batch_size, narrowed, micro_batch=caps)
        except InfeasibleError:  # what is left has no room for the batch
            break
        found.append(together(Way.FEWER, shares))
    return found


def advice(found: Sequence[Forecast]) -> str:
    """A sentence that says whether the slowest ranks are worth having, of what `forecasts` returned."""
    whole = next(each for each in found if each.way is Way.BEST)
    fewer = [each for each in found if each.way is Way.FEWER]
    if len(whole.shares) == 1:
        return "There is one rank alone: nothing can be shared out."
    if not fewer:
        return "The slowest rank cannot be done without: the others do not hold the batch."
    other = max(fewer, key=lambda each: each.samples_per_s)
    gain = whole.samples_per_s / other.samples_per_s
    if gain >= 1.0 + WORTH:
        return f"All ranks together make {gain:.2f} times what they would without the slower ones: keep all."
    if gain > 1.0 - WORTH:
        return f"{other.title.capitalize()} the others would be as fast: they add nothing to synchronous steps."
    return (
        f"{other.title.capitalize()} the others would make {1 / gain:.2f} times as much: leave them out, or let them "
        'miss steps with min_share=0 or strategy="local".'
    )

"""Local SGD as a strategy: its numbers, which all ranks have the same. `rounds` does it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvd_hetero.policy.guard import Guard
from hvd_hetero.policy.staleness import usual_bound

from .argument import check_whole
from .outer import Outer

WEIGHTS = ("samples", "fednova")
WHEN = ("always", "faster")
SECOND_MOMENTS = ("global", "own")
CALM = Guard(round_steps=1).calm


@dataclass(frozen=True, kw_only=True)
class LocalSGD:
    """Local SGD as a strategy: what all ranks must have the same.

    A rank whose share is less than the mean of all makes a part of each of its updates (`policy.staleness`).

    Args:
        round_steps: updates between two contributions of the fastest rank; with several backward passes per step, each
            is over as many global batches.
        bound_rounds: a rank waits when it has gone on for so many rounds since its last contribution without a merge;
            0 to wait for each merge. None: 4, or as many as make 16 updates.
        most_missed: a rank of which one step takes about two rounds of the fastest rank, or more, takes part in fewer
            merges, and misses at most so many in a row. From the first on it needs the memory of so many more copies
            of its parameters as they travel. None is missed where a merge is more than one sum (codecs, topologies),
            with several fragments, with FedNova's weights, and with bound_rounds=0.
        warmup_steps: so many global batches are taken in synchronous steps first: far from the end of training,
            progress made apart adds up badly (post-local SGD, Lin et al. 2018, arXiv:1808.07217).
        fragments: parts of the model that merge one after the other, so that a merge uses the link for a part of it.
        outer: what a merge does to the model.
        weights: whose progress counts for how much; a merge moves the model as far as synchronous steps over its
            samples (`policy.staleness`). "samples": each sample counts alike, for ranks that draw from one shared order
            (as BalancedDataLoader deals it). "fednova": progress per step counts alike on all ranks that made any, for
            ranks with equal parts of the data as their own (Wang et al. 2020, arXiv:2007.07481).
        second_moments: of an optimizer of Adam's kind, whose steps get shorter with noise. "global": each rank keeps
            what the global batch's gradient would have made of them, as estimated from what it keeps itself
            (`policy.second_moments`), for one copy more of them. "own": what its own gradients make of them.
        compensation: lambda of `outer.compensated`; 0 for none, which is right for all but plain SGD.
        merge_each_epoch: all ranks wait for each other, and hold one model, where `BalancedDataLoader` ends an epoch;
            elsewhere `optimizer.merge()` does that.
        drift_limit: rounds are halved when ranks drift apart by so many times what noise explains, see `policy.guard`;
            None for never.
        when: "always", or "faster": only while steps apart are clearly faster than synchronous ones, as predicted from
            speeds, stops and exchanges measured while the job runs (`policy.strategy`).
    """

    round_steps: int = 2
    bound_rounds: float | None = None
    most_missed: int = 3
    warmup_steps: int = 20
    fragments: int = 1
    outer: Outer = Outer()
    weights: str = "samples"
    second_moments: str = "global"
    compensation: float = 0.0
    merge_each_epoch: bool = True
    drift_limit: float | None = 1.5
    when: str = "always"

    def __post_init__(self) -> None:
        for name, least in (("round_steps", 1), ("most_missed", 0), ("warmup_steps", 0), ("fragments", 1)):
            check_whole(name, getattr(self, name), least=least)
        for name in ("bound_rounds", "compensation"):
            value = getattr(self, name)
            left = value is None and name == "bound_rounds"
            if not left and not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                raise ValueError(f"{name}: expected a finite number, 0 or more. Received: {value!r}.")
        if 0 < self.most_rounds < 1:
            raise ValueError(
                "bound_rounds: expected 0, to wait for every merge, or at least 1, since a rank contributes once a "
                f"round. Received: {self.bound_rounds}."
            )
        for name, choices in (("weights", WEIGHTS), ("second_moments", SECOND_MOMENTS), ("when", WHEN)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: expected one of {', '.join(choices)}. Received: {getattr(self, name)!r}.")
        if not isinstance(self.outer, Outer):
            raise TypeError(f"outer: expected an Outer. Received: {self.outer!r}.")
        if self.drift_limit is not None and not self.drift_limit > CALM:
            raise ValueError(f"drift_limit: expected a number above {CALM}, or None. Received: {self.drift_limit!r}.")

    @property
    def most_rounds(self) -> float:
        """`bound_rounds`, as a number."""
        return usual_bound(self.round_steps) if self.bound_rounds is None else self.bound_rounds


def strategy_of(strategy: LocalSGD | str) -> LocalSGD | None:
    """The local strategy that a user's argument names; None for synchronous training."""
    if isinstance(strategy, LocalSGD):
        return strategy
    if strategy not in ("synchronous", "local", "auto"):
        raise ValueError(
            f'strategy: expected "synchronous", "local", "auto" or an hvd.LocalSGD. Received: {strategy!r}.'
        )
    if strategy == "synchronous":
        return None
    return LocalSGD(when="always" if strategy == "local" else "faster")

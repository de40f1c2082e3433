"""The arguments of local SGD, the strategy in which ranks make steps by themselves; `rounds` carries it out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

from hvd_hetero.policy.guard import Guard
from hvd_hetero.policy.local_round import default_bound_rounds

from .argument import check_whole
from .outer import Outer

WEIGHTS = ("samples", "fednova")
WHEN = ("always", "faster")
SECOND_MOMENTS = ("global", "own")
CALM = Guard(round_steps=1).calm


@dataclass(frozen=True, kw_only=True)
class LocalSGD:
    """Local SGD: each rank makes its own updates (local steps), and the ranks' models are merged once per round.

    A merge is an all-reduce of what each rank has changed in its parameters, its progress; ranks do not wait for it,
    within `bound_rounds`. A rank whose share is less than the mean makes a part of each of its updates
    (`policy.local_round`). All ranks need the same arguments.

    Args:
        round_steps: local steps of the fastest rank in a round, from one contribution to the next; slower ranks make
            fewer. With several backward passes per step, a step takes as many global batches.
        bound_rounds: rounds that a rank trains on after its contribution before it waits for the merge; 0 to wait for
            each merge. None: 4, or as many as make 16 updates if those are more.
        most_missed: merges in a row that a very slow rank may miss. A rank of which one step takes about two rounds of
            the fastest rank, or more, takes part in fewer merges. From the first missed one on it needs memory for so
            many more copies of its parameters as they travel. No merge is missed where it is more than one sum (codecs,
            topologies), with several fragments, with weights="fednova", and with bound_rounds=0.
        warmup_steps: number of global batches taken in synchronous steps first: early in training, local progress adds
            up badly (post-local SGD, Lin et al. 2018, arXiv:1808.07217).
        fragments: parts of the model that merge one after the other, so that each merge sends a part of the model.
        outer: the outer optimizer, which moves the model by the merged progress.
        weights: how much each rank's progress counts; in all, a merge moves the model as far as synchronous steps over
            the same samples (`policy.local_round`). "samples": each sample counts alike, for ranks that draw from one
            shared order (as BalancedDataLoader deals it). "fednova": progress per step counts alike on all ranks that
            made any, for ranks that each have an equal part of the data as their own (Wang et al. 2020,
            arXiv:2007.07481).
        second_moments: for Adam and optimizers like it, which make shorter steps the noisier their gradients are.
            "global": each rank keeps the second moments that gradients of the global batch would give, estimated from
            its own (`policy.second_moments`), which takes one more copy of them. "own": those of its own gradients.
        compensation: lambda of `outer.compensated`; 0 for none, which is right for all but plain SGD.
        merge_each_epoch: whether `BalancedDataLoader` ends each epoch with a merge that all ranks wait for, so that all
            hold one model; elsewhere `optimizer.merge()` does that.
        drift_limit: rounds are halved when ranks drift apart by more than so many times what gradient noise explains
            (`policy.guard`); None for never.
        when: "always"; or "faster": local steps only while they are clearly faster than synchronous ones, as predicted
            from speeds, stops and exchanges measured while the job runs (`policy.strategy`).

    Raises:
        ValueError, TypeError: an argument is out of range or of another type.
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
        limit = self.drift_limit
        if limit is not None and not (isinstance(limit, Real) and limit > CALM):
            raise ValueError(f"drift_limit: expected a number above {CALM}, or None. Received: {limit!r}.")

    @property
    def most_rounds(self) -> float:
        """`bound_rounds`, or its default if that is None."""
        return default_bound_rounds(self.round_steps) if self.bound_rounds is None else self.bound_rounds


def strategy_of(strategy: LocalSGD | str) -> LocalSGD | None:
    """Returns the local strategy for the argument `strategy` of a user; None for synchronous training.

    Raises:
        ValueError: it is neither a `LocalSGD` nor "synchronous", "local" or "auto".
    """
    if isinstance(strategy, LocalSGD):
        return strategy
    if strategy not in ("synchronous", "local", "auto"):
        raise ValueError(
            f'strategy: expected "synchronous", "local", "auto" or an hvd.LocalSGD. Received: {strategy!r}.'
        )
    if strategy == "synchronous":
        return None
    return LocalSGD(when="always" if strategy == "local" else "faster")

"""Splits a global batch into shares of the ranks, so that the slowest rank finishes as early as possible.

    minimise max_i t_i(b_i)   with   sum_i b_i = B,   lower_i <= b_i <= upper_i,   b_i a multiple of quantum_i

Equal quanta: a greedy algorithm gives each next quantum to argmin_i t_i(b_i + q), which is optimal for every
non-decreasing t_i (Ibaraki & Katoh 1988, "Resource Allocation Problems", min-max objective). To save work, it starts
from the shares that finish by a deadline found by bisection, which it would pass anyway.

Unequal quanta: to reach the sum is a subset-sum problem. The earliest deadline by which it can be reached is searched
for, with sets of reachable sums as the bits of integers (Bellman 1957).

Ties go to the rank with the smaller seconds per sample (of computing or of loading, whichever takes longer), then to
the one that computes a single sample faster, then to the lower rank. So the result is the same wherever it is computed,
and a slower rank never gets more.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from .speed import SpeedModel

T = TypeVar("T")

HANDED_OUT_SINGLY = 4        # quanta per rank that are left to the greedy: for so few a bisection does not pay
BISECTIONS = 80              # more than the bits of a double: the bracket is then two neighbouring numbers


class InfeasibleError(ValueError):
    """No shares within the bounds sum to the global batch."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The shares that a rank may have: multiples of `quantum` from `lower` to `upper`, in samples.

    `upper` is what the rank's memory holds; None: no limit. Raises ValueError for `lower` below 0, `upper` below
    `lower`, or `quantum` below 1.
    """

    lower: int = 0
    upper: int | None = None
    quantum: int = 1

    def __post_init__(self) -> None:
        if self.lower < 0 or self.quantum < 1:
            raise ValueError("lower and quantum: expected at least 0 and at least 1. "
                             f"Received: {self.lower} and {self.quantum}.")
        if self.upper is not None and self.upper < self.lower:
            raise ValueError(f"upper: expected at least lower ({self.lower}), or None. Received: {self.upper}.")

    def allows(self, share: int) -> bool:
        """Whether a rank may have this share."""
        return share >= self.lower and (self.upper is None or share <= self.upper) and share % self.quantum == 0


def split(models: Sequence[SpeedModel], global_batch_size: int, bounds: Sequence[Bound] | None = None, *,
          micro_batch: Sequence[int | None] | None = None) -> tuple[int, ...]:
    """The shares with which the slowest rank finishes earliest, by rank. The minimum is exact, not an approximation.

    Args:
        models: the speed model of each rank.
        global_batch_size: the sum of the shares.
        bounds: of shares, by rank; None: no bounds.
        micro_batch: by rank, the most samples of one forward and backward pass; a larger share takes several passes,
            each with its overhead. None: no limit.

    Raises:
        InfeasibleError: no shares within the bounds sum to the global batch.
        ValueError: no models, a global batch below 1, or lists of other lengths than `models`.
    """
    ranks = [_Rank(rank, model, bound, cap, global_batch_size) for rank, (model, bound, cap) in enumerate(zip(
        models, _per_rank(bounds, Bound(), models, "bounds"), _per_rank(micro_batch, None, models, "micro_batch"),
        strict=True))]
    _check(ranks, global_batch_size)
    if len({r.quantum for r in ranks}) > 1:
        return _split_uneven_quanta(ranks, global_batch_size)
    if global_batch_size % ranks[0].quantum:
        raise InfeasibleError(f"global_batch_size: expected a multiple of {ranks[0].quantum}, every rank's quantum. "
                              f"Received: {global_batch_size}.")
    return _split_even_quanta(ranks, global_batch_size)


def equal_shares(global_batch_size: int, ranks: int) -> tuple[int, ...]:
    """Shares of `ranks` ranks that differ by at most one sample, the larger ones first."""
    if ranks < 1 or global_batch_size < 0:
        raise ValueError("global_batch_size and ranks: expected at least 0 and at least 1. "
                         f"Received: {global_batch_size} and {ranks}.")
    share, more = divmod(global_batch_size, ranks)
    return (share + 1,) * more + (share,) * (ranks - more)


def step_time_s(models: Sequence[SpeedModel], shares: Sequence[int],
                micro_batch: Sequence[int | None] | None = None) -> float:
    """The predicted seconds that the slowest rank takes for its share by computing or loading, without the exchange."""
    caps = _per_rank(micro_batch, None, models, "micro_batch")
    return max((m.time_s(b, cap) for m, b, cap in zip(models, shares, caps, strict=True)), default=0.0)


def micro_batches(share: int, cap: int | None) -> tuple[int, ...]:
    """The sizes of the fewest micro-batches of at most `cap` samples that make up a share; () for a share of 0.

    They differ by at most one sample. `cap` None: one micro-batch.
    """
    if share < 0 or (cap is not None and cap < 1):
        raise ValueError(f"share and cap: expected at least 0, and at least 1 or None. Received: {share} and {cap}.")
    if share == 0:
        return ()
    return equal_shares(share, 1 if cap is None else -(-share // cap))


def _per_rank(given: Sequence[T] | None, default: T, models: Sequence[SpeedModel], name: str) -> Sequence[T]:
    if given is None:
        return [default] * len(models)
    if len(given) != len(models):
        raise ValueError(f"{name}: expected one for each of {len(models)} models. Received: {len(given)}.")
    return given


class _Rank:
    """A rank as `split` sees it: its bounds rounded to its quantum, time as a function of share, and the inverse.

    Args:
        cap: the most samples of one pass; None: no limit.
        most: the global batch, which no share exceeds.
    """

    def __init__(self, rank: int, model: SpeedModel, bound: Bound, cap: int | None, most: int) -> None:
        if cap is not None and cap < 1:
            raise ValueError(f"micro_batch: expected at least 1 or None for rank {rank}. Received: {cap}.")
        self.rank, self.model, self.cap, self.quantum = rank, model, cap, bound.quantum
        self.lowest = -(-bound.lower // bound.quantum) * bound.quantum
        self.highest = min(most, most if bound.upper is None else bound.upper) // bound.quantum * bound.quantum
        if bound.upper is not None and self.lowest > bound.upper:
            raise InfeasibleError(f"bounds: expected a multiple of {bound.quantum} between {bound.lower} and "
                                  f"{bound.upper} for rank {rank}. Received: a range without one.")

    @property
    def each_s(self) -> float:
        """The seconds of one more sample in a large share: of computing or loading it, whichever takes longer."""
        return max(self.model.seconds_per_sample, self.model.loading_s)

    def offer(self, share: int) -> tuple[float, float, float, int]:
        """The key by which the greedy chooses who gets a share: the smallest gets it. Everything after the first number
        breaks ties."""
        return self.time_s(share), self.each_s, self.model.compute_s(1), self.rank

    def time_s(self, share: int) -> float:
        """The predicted seconds that the rank takes for a share."""
        return self.model.time_s(share, self.cap)

    def within(self, deadline_s: float) -> int:
        """The largest share that finishes by the deadline; the smallest allowed share if none does."""
        each, overhead, cap = self.model.seconds_per_sample, self.model.overhead_s, self.cap or max(self.highest, 1)
        pass_s = overhead + cap * each  # of a whole one
        passes = int(min(deadline_s / pass_s, self.highest // cap))
        share = passes * cap + max(0, int(min((deadline_s - passes * pass_s - overhead) / each, cap)))
        if self.model.loading_s:
            share = int(min(deadline_s / self.model.loading_s, share))
        share = min(max(share // self.quantum * self.quantum, self.lowest), self.highest)
        # What is rounded above may be off by a sample.
        while share < self.highest and self.time_s(share + self.quantum) <= deadline_s:
            share += self.quantum
        while share > self.lowest and self.time_s(share) > deadline_s:
            share -= self.quantum
        return share


def _check(ranks: Sequence[_Rank], whole: int) -> None:
    """Raises ValueError for no ranks or no samples, InfeasibleError if the bounds' sums do not enclose `whole`."""
    if not ranks or whole < 1:
        raise ValueError("models and global_batch_size: expected at least one model and at least 1. "
                         f"Received: {len(ranks)} and {whole}.")
    least, most = sum(r.lowest for r in ranks), sum(r.highest for r in ranks)
    if least > whole:
        raise InfeasibleError(f"global_batch_size: expected at least {least}, the sum of the ranks' lower bounds "
                              f"(rounded up to their quanta). Received: {whole}. Lower the bounds or use fewer ranks.")
    if most < whole:
        raise InfeasibleError(f"global_batch_size: expected at most {most}, what all ranks hold in one step "
                              f"(rounded down to their quanta). Received: {whole}. Raise the upper bounds, with "
                              "micro-batches where memory sets them.")


def _deadline(ranks: Sequence[_Rank], whole: int, slack: int) -> tuple[float, list[int]]:
    """A deadline by which at most `whole` samples finish, and the shares that do.

    The bisection ends when the shares sum to at least `whole - slack`, or when it cannot be refined. While the bracket
    spans orders of magnitude it bisects these: the deadline may be 1e-300 of what the slowest rank alone would take.
    """
    early, late = 0.0, max(r.time_s(r.highest) for r in ranks)
    soonest = min(r.time_s(r.quantum) for r in ranks)  # before that, no share above the smallest finishes
    shares = [r.lowest for r in ranks]
    for _ in range(BISECTIONS):
        if whole - sum(shares) <= slack:
            break
        least = max(early, soonest)
        middle = math.sqrt(least) * math.sqrt(late) if 0.0 < 4.0 * least < late else 0.5 * (early + late)
        finished = [r.within(middle) for r in ranks]
        if sum(finished) > whole:
            late = middle
        else:
            early, shares = middle, finished
    return early, shares


def _split_even_quanta(ranks: Sequence[_Rank], whole: int) -> tuple[int, ...]:
    """The optimal shares for equal quanta: the greedy, started from the shares that `_deadline` finds."""
    quantum = ranks[0].quantum
    _, shares = _deadline(ranks, whole, HANDED_OUT_SINGLY * len(ranks) * quantum)

    queue = [r.offer(shares[r.rank] + quantum) for r in ranks if shares[r.rank] < r.highest]
    heapq.heapify(queue)
    for _ in range((whole - sum(shares)) // quantum):
        r = ranks[queue[0][-1]]
        shares[r.rank] += quantum
        if shares[r.rank] < r.highest:
            heapq.heapreplace(queue, r.offer(shares[r.rank] + quantum))
        else:
            heapq.heappop(queue)
    return tuple(shares)


def _split_uneven_quanta(ranks: Sequence[_Rank], whole: int) -> tuple[int, ...]:
    """The optimal shares for unequal quanta: those of the earliest deadline by which some shares sum to `whole`."""
    everything = _sums(ranks, [r.highest for r in ranks], whole)[-1]
    if not everything >> whole & 1:
        raise InfeasibleError("global_batch_size: expected a sum of multiples of the ranks' quanta within their "
                              f"bounds; the nearest below is {everything.bit_length() - 1}. Received: {whole}.")
    early, late = 0.0, max(r.time_s(r.highest) for r in ranks)
    if sum(r.lowest for r in ranks) < whole:
        early, _ = _deadline(ranks, whole - 1, sum(r.quantum for r in ranks))
    stride = max(r.quantum * r.each_s for r in ranks)
    while True:
        finished = [r.within(early) for r in ranks]
        times = [r.time_s(b + r.quantum) for r, b in zip(ranks, finished, strict=True) if b < r.highest]
        middle = max(min(times, default=late), min(early + stride, 0.5 * (early + late)))
        if middle >= late:
            return _pick(ranks, [r.within(late) for r in ranks], whole)
        if _sums(ranks, [r.within(middle) for r in ranks], whole)[-1] >> whole & 1:
            late = middle
        else:
            early, stride = middle, 2.0 * stride


def _sums(ranks: Sequence[_Rank], most: Sequence[int], whole: int) -> list[int]:
    """The sums that the first 0, 1, 2, ... ranks can reach with shares of at most `most`: bit n is the sum n."""
    reached = [1]
    for r, top in zip(ranks, most, strict=True):
        sums, quanta, several = reached[-1] << r.lowest, (top - r.lowest) // r.quantum, 1
        while quanta > 0:
            several = min(several, quanta)
            sums |= sums << several * r.quantum
            quanta, several = quanta - several, 2 * several
        reached.append(sums & ((2 << whole) - 1))
    return reached


def _pick(ranks: Sequence[_Rank], most: Sequence[int], whole: int) -> tuple[int, ...]:
    """Shares of at most `most` that sum to `whole`, each close to the same fraction of its `most`.

    Among ranks of equal bounds and micro-batch, the faster one gets the larger share.
    """
    reached, left, shares = _sums(ranks, most, whole), whole, list(most)
    for i in reversed(range(len(ranks))):
        r, bits = ranks[i], reached[i].to_bytes(whole // 8 + 1, "little")
        wanted = round((left * most[i] / max(sum(most[:i + 1]), 1) - r.lowest) / r.quantum)
        nearest = (r.lowest + k * r.quantum for far in itertools.count() for k in (wanted - far, wanted + far))
        shares[i] = next(b for b in nearest if r.lowest <= b <= min(most[i], left)
                         and bits[(left - b) // 8] >> (left - b) % 8 & 1)
        left -= shares[i]
    for kind in dict.fromkeys((r.lowest, r.highest, r.quantum, r.cap) for r in ranks):
        alike = [r for r in ranks if (r.lowest, r.highest, r.quantum, r.cap) == kind]
        sizes = sorted((shares[r.rank] for r in alike), reverse=True)
        times = {r.rank: r.offer(sizes[0]) for r in alike}
        swapped = dict(zip(sorted(times, key=times.__getitem__), sizes, strict=True))
        if all(b <= most[rank] for rank, b in swapped.items()):
            shares = [swapped.get(rank, b) for rank, b in enumerate(shares)]
    return tuple(shares)

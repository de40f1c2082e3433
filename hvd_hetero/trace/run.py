"""The record of a run as it was read: the entries of each rank, and summaries of them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress, pairwise
from statistics import median

from hvd_hetero.policy.replan import Plan

from .entry import Event, Step

NEWEST = 64       # so many last steps of a rank count as its newest
PAUSE = 10.0      # an interval so many times longer than the median is a pause (a checkpoint, a validation)


@dataclass(frozen=True, kw_only=True)
class RankSummary:
    """A summary of one rank's record. Medians are over its steps; 0.0 if there are none."""

    rank: int
    steps: int
    samples: int
    median_data_s: float
    median_compute_s: float
    median_wait_s: float
    samples_per_s: float
    bytes: int
    shares: tuple[tuple[int, int], ...]      # (step, share) for each step at which the share changed


@dataclass(kw_only=True)
class RankRun:
    """The record of one rank."""

    rank: int
    host: str = ""           # name of the host of its last session
    hosts: dict[int, str] = field(default_factory=dict)        # name of the host of each session, by its first step
    steps: list[Step] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    sessions: int = 0        # how often the run was started
    dropped: int = 0         # records that could not be written
    unreadable: int = 0      # lines that are not of this format

    @property
    def session_starts(self) -> Set[int]:
        """The first step of each session."""
        return self.hosts.keys()

    @property
    def newest(self) -> list[Step]:
        """The rank's last steps with samples."""
        return [step for step in self.steps[-NEWEST:] if step.samples > 0]

    @property
    def loading_s(self) -> float:
        """The least seconds per sample that loading took in the newest steps; 0.0: too little to be noticed."""
        return _median(step.loading_s / step.samples for step in self.newest)

    def counted(self, skip: int) -> list[bool]:
        """For each step, whether it comes after the first `skip` steps of its session."""
        found, place = [], 0
        for step in self.steps:
            place = 0 if step.step in self.session_starts else place
            found.append(place >= skip)
            place += 1
        return found

    def after(self, skip: int) -> list[Step]:
        """The steps without the first `skip` of each session, in which frameworks compile and caches fill."""
        return list(compress(self.steps, self.counted(skip)))

    @property
    def merging_s(self) -> dict[int, float]:
        """Seconds of the merges that ended phases of local steps, by the step that came next.

        They come between two steps, so that no step has them in its `wait_s`.
        """
        found: dict[int, float] = {}
        for event in self.events:
            if event.kind == "together":  # one for each optimizer with local steps
                step = event.fields["step"]
                found[step] = found.get(step, 0.0) + event.fields.get("wait_s", 0.0)
        return found

    def summary(self, *, skip: int = 0) -> RankSummary:
        """Summarises the steps after the first `skip` of each session."""
        steps = self.after(skip)
        shares = [(s.step, s.share) for i, s in enumerate(steps) if i == 0 or s.share != steps[i - 1].share]
        return RankSummary(
            rank=self.rank,
            steps=len(steps),
            samples=sum(s.samples for s in steps),
            median_data_s=_median(s.data_s for s in steps),
            median_compute_s=_median(s.compute_s for s in steps),
            median_wait_s=_median(s.wait_s for s in steps),
            samples_per_s=_samples_per_s(steps, self.merging_s, self.session_starts),
            bytes=sum(s.bytes for s in steps),
            shares=tuple(shares),
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """The record of a run.

    Attributes:
        folder: where it was read from.
        ranks: the records by rank.
    """

    folder: str
    ranks: dict[int, RankRun]

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of the run, oldest first, which are the same on all ranks.

        They are those of the rank with the most plans among those `present` at the end. Ranks that left an elastic job
        may have recorded plans that were undone.
        """
        longest: list[Plan] = []
        for rank in self.present.values():
            longest = max(longest, rank.plans, key=len)
        return tuple(longest)

    @cached_property
    def present(self) -> dict[int, RankRun]:
        """The records of the ranks that trained at the end: as many as the newest plan has shares.

        Others have left an elastic job, or the job went on from a checkpoint without them.
        """
        # There always is a rank 0. Looking for the rank that recorded last would compare clocks of different hosts.
        those = [self.ranks[0]] if 0 in self.ranks and self.ranks[0].steps else self.ranks.values()
        last = max(those, key=lambda run: run.steps[-1].t_s if run.steps else 0.0)
        size = len(last.plans[-1].shares) if last.plans else math.inf
        return {rank: run for rank, run in self.ranks.items() if rank < size}

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks of the newest plan that have no recorded step, as when their files are missing."""
        size = len(self.plans[-1].shares) if self.plans else 0
        return tuple(rank for rank in range(size) if rank not in self.ranks or not self.ranks[rank].steps)

    def size_at(self, step: int) -> int | None:
        """The number of ranks in a step, by the plan that held then; None if no plan is recorded."""
        at = bisect_right(self._begins, step) - 1
        return len(self.plans[max(0, at)].shares) if self.plans else None

    @cached_property
    def _begins(self) -> list[int]:
        """For each plan, the step from which it holds."""
        return [plan.step for plan in self.plans]

    @property
    def gone(self) -> tuple[int, ...]:
        """The ranks with a record that are not `present` at the end."""
        return tuple(sorted(set(self.ranks) - set(self.present)))

    def summaries(self, *, skip: int = 0) -> tuple[RankSummary, ...]:
        """One summary per rank, in the order of ranks."""
        return tuple(rank.summary(skip=skip) for rank in self.ranks.values())


def _median(values: Iterable[float]) -> float:
    seen = list(values)
    return float(median(seen)) if seen else 0.0


def _samples_per_s(steps: Sequence[Step], merging_s: Mapping[int, float], starts: Set[int]) -> float:
    """Samples per second over the intervals between consecutive steps, without pauses (see `PAUSE`).

    Args:
        merging_s: see `RankRun.merging_s`; those that came after one of `steps` count as time, even where they are
            long.
        starts: the first steps of sessions; the intervals before them are left out.
    """
    follows = [(a, b) for a, b in pairwise(steps) if b.step == a.step + 1 and b.step not in starts]
    pairs = [(b, b.t_s - a.t_s) for a, b in follows if b.t_s > a.t_s]
    spans = [(step.samples, max(0.0, span - merging_s.get(step.step, 0.0))) for step, span in pairs]
    longest = PAUSE * _median(span for _, span in spans)
    spans = [(samples, span) for samples, span in spans if span <= longest]
    seen = {step.step for step in steps}
    merging = sum(took for step, took in merging_s.items() if step - 1 in seen)
    whole = sum(span for _, span in spans) + merging
    return sum(samples for samples, _ in spans) / whole if whole else 0.0
